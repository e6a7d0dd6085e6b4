{{- /* Labels of everything, beside those of a component, which selectors use. */ -}}
{{- define "bootseer.labels" -}}
app.kubernetes.io/part-of: bootseer
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "bootseer.component" -}}
app.kubernetes.io/name: bootseer
app.kubernetes.io/component: {{ . }}
{{- end }}

{{- define "bootseer.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- /* What each pod of a node has: where it runs, and its priority. */ -}}
{{- define "bootseer.placement" -}}
priorityClassName: {{ .Values.priorityClassName | quote }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ quote . }}
  {{- end }}
{{- end }}
hostNetwork: {{ .Values.hostNetwork }}
dnsPolicy: {{ ternary "ClusterFirstWithHostNet" "ClusterFirst" .Values.hostNetwork }}
enableServiceLinks: false
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "bootseer.env" -}}
- {name: BOOTSEER_CONFIG, value: /etc/bootseer/bootseer.toml}
- name: BOOTSEER_NODE
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Paths in the container are those on the node: mounts made in one are seen by all, and by containerd. */ -}}
{{- define "bootseer.mounts" -}}
- {name: config, mountPath: /etc/bootseer, readOnly: true}
- {name: dev, mountPath: /dev}
- {name: state, mountPath: {{ .Values.stateDir }}, mountPropagation: Bidirectional}
- {name: run, mountPath: {{ .Values.runDir }}, mountPropagation: Bidirectional}
{{- with .Values.metrics.directory }}
- {name: metrics, mountPath: {{ . }}}
{{- end }}
{{- with .Values.containerd.registryHostsDir }}
- {name: registries, mountPath: {{ . }}, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "bootseer.volumes" -}}
- name: config
  configMap: {name: bootseer-config}
- name: dev
  hostPath: {path: /dev, type: Directory}
- name: state
  hostPath: {path: {{ .Values.stateDir }}, type: DirectoryOrCreate}
- name: run
  hostPath: {path: {{ .Values.runDir }}, type: DirectoryOrCreate}
{{- with .Values.metrics.directory }}
- name: metrics
  hostPath: {path: {{ . }}, type: DirectoryOrCreate}
{{- end }}
{{- with .Values.containerd.registryHostsDir }}
- name: registries
  hostPath: {path: {{ . }}, type: DirectoryOrCreate}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Ready once it has answered. */ -}}
{{- define "bootseer.startupProbe" -}}
startupProbe:
  exec: {command: {{ toJson . }}}
  periodSeconds: 3
  timeoutSeconds: 10
  failureThreshold: 100
{{- end }}

{{- /* Asked seldom afterwards, since each question starts a Python. */ -}}
{{- define "bootseer.probes" -}}
{{ include "bootseer.startupProbe" . }}
livenessProbe:
  exec: {command: {{ toJson . }}}
  periodSeconds: 120
  timeoutSeconds: 30
  failureThreshold: 5
{{- end }}
