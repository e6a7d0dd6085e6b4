// Renders a Helm chart as `helm template` does, for tests and for the plain manifests: Helm's engine is
// text/template with sprig and the functions below (helm/pkg/engine). It reads {"chart", "values",
// "release", "apis"} from standard input and writes the text of each template. Hooks, subcharts and the values' schema are not looked at.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"github.com/ghodss/yaml"
)

type values = map[string]interface{}

// files is .Files of a chart.
type files string

func (folder files) Get(name string) (string, error) {
	data, err := os.ReadFile(filepath.Join(string(folder), name))
	return string(data), err
}

// apis is .Capabilities.APIVersions.
type apis []string

func (known apis) Has(name string) bool {
	for _, one := range known {
		if one == name {
			return true
		}
	}
	return false
}

func toYaml(value interface{}) (string, error) {
	data, err := yaml.Marshal(value)
	return strings.TrimSuffix(string(data), "\n"), err
}

func fromYaml(text string) (values, error) {
	found := values{}
	err := yaml.Unmarshal([]byte(text), &found)
	return found, err
}

func functions(all *template.Template) template.FuncMap {
	found := sprig.TxtFuncMap()
	delete(found, "env")
	delete(found, "expandenv")
	found["toYaml"] = toYaml
	found["fromYaml"] = fromYaml
	found["lookup"] = func(...string) values { return values{} }
	found["required"] = func(message string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return nil, fmt.Errorf("%s", message)
		}
		return value, nil
	}
	found["include"] = func(name string, data interface{}) (string, error) {
		var text strings.Builder
		err := all.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	found["tpl"] = func(source string, data interface{}) (string, error) {
		one, err := all.Clone()
		if err == nil {
			one, err = one.New("tpl").Parse(source)
		}
		if err != nil {
			return "", err
		}
		var text strings.Builder
		err = one.Execute(&text, data)
		return text.String(), err
	}
	return found
}

// merged puts what the user gave over the chart's defaults; a null removes a default.
func merged(under, over values) values {
	for key, value := range over {
		below, isTable := under[key].(values)
		above, alsoTable := value.(values)
		switch {
		case value == nil:
			delete(under, key)
		case isTable && alsoTable:
			under[key] = merged(below, above)
		default:
			under[key] = value
		}
	}
	return under
}

func readYaml(path string) values {
	data, err := os.ReadFile(path)
	check(err)
	found, err := fromYaml(string(data))
	check(err)
	return found
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	var asked struct {
		Chart   string
		Values  values
		Release values
		Apis    apis
	}
	check(json.NewDecoder(os.Stdin).Decode(&asked))
	chart := values{}
	for key, value := range readYaml(filepath.Join(asked.Chart, "Chart.yaml")) {
		chart[strings.ToUpper(key[:1])+key[1:]] = value
	}
	data := values{
		"Values":       merged(readYaml(filepath.Join(asked.Chart, "values.yaml")), asked.Values),
		"Chart":        chart,
		"Release":      asked.Release,
		"Files":        files(asked.Chart),
		"Capabilities": values{"APIVersions": asked.Apis},
	}
	all := template.New("chart").Option("missingkey=zero")
	all.Funcs(functions(all))
	paths, err := filepath.Glob(filepath.Join(asked.Chart, "templates", "*"))
	check(err)
	sort.Strings(paths)
	base := fmt.Sprint(chart["Name"], "/templates")
	for _, path := range paths {
		source, err := os.ReadFile(path)
		check(err)
		_, err = all.New(base + "/" + filepath.Base(path)).Parse(string(source))
		check(err)
	}
	rendered := map[string]string{}
	for _, path := range paths {
		name := base + "/" + filepath.Base(path)
		if strings.HasSuffix(name, ".yaml") {
			data["Template"] = values{"Name": name, "BasePath": base}
			var text strings.Builder
			check(all.ExecuteTemplate(&text, name, data))
			rendered[filepath.Base(path)] = strings.ReplaceAll(text.String(), "<no value>", "")
		}
	}
	check(json.NewEncoder(os.Stdout).Encode(rendered))
}
