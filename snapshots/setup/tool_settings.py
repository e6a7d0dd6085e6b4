"""Files with settings of pip, uv and conda: which index, which wheels, which channels.

Alone knows where these tools look. What such a file says without deciding the result, a cache or a
timeout, is left out of pip's; of the others' files the whole text counts, without users in URLs.
Edge: reads the files, changes nothing.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence

from bootseer.base.redact import HIDDEN, secret_values, without_users
from bootseer.errors import InvalidInputError
from bootseer.snapshots.setup.digests import bytes_digest
from bootseer.snapshots.setup.fingerprint import Part, Public
from bootseer.snapshots.setup.place import Place
from bootseer.snapshots.setup.shown_words import shown_values

TOOLS = ("pip", "uv", "conda")
_BYTES_MAX = 1024 * 1024
# Options of pip that say how it works, not what it installs.
_PIP_INDIFFERENT = {
    *("cache-dir", "no-cache-dir", "timeout", "retries", "progress-bar", "quiet", "verbose", "log"),
    *("disable-pip-version-check", "no-color", "no-input", "proxy", "cert", "client-cert"),
    *("root-user-action", "require-virtualenv", "keyring-provider", "trusted-host", "debug"),
    *("no-python-version-warning", "no-warn-script-location", "no-warn-conflicts", "exists-action"),
    *("default-timeout", "format", "resume-retries", "use-feature"),
}
# Options of pip whose values are requirements, paths, URLs and switches.
_PIP_SHOWN = {
    *("index-url", "extra-index-url", "find-links", "no-index", "pre", "no-binary", "only-binary"),
    *("prefer-binary", "constraint", "requirement", "target", "prefix", "root", "user", "no-deps"),
    *("upgrade", "upgrade-strategy", "platform", "python-version", "implementation", "abi", "src"),
    *("no-build-isolation", "require-hashes", "no-compile", "break-system-packages", "editable"),
}
_TRUE = {"1", "true", "yes", "y", "t", "on"}


def settings_parts(
    place: Place,
    tools: Collection[str],
    environ: Mapping[str, str],
    prefix: str,
    outputs: Sequence[bytes],
) -> Public:
    """Parts for the files with settings of `tools` that are there; `prefix`: of the interpreter.
    Files in `outputs`, the targets, are what the set-up makes. Never raises."""
    parts: dict[str, Part] = {}
    secrets: list[str] = []
    for tool, path in _candidates(place, tools, environ, prefix):
        absolute = os.fsencode(os.path.normpath(place.absolute(path)))
        text = _read(place, path)
        if not text or any(absolute.startswith(output + b"/") for output in outputs):
            continue
        value = None
        if tool == "pip":
            value, found = _pip_options(text, secret_values(environ))
            secrets += found
        elif path.endswith("pyproject.toml"):
            value = _uv_table(text)
        else:
            value = bytes_digest(without_users(text).encode("utf-8", "surrogateescape")).value
        if value:
            name = f"settings {_shown(path, environ)}"
            parts.setdefault(name, Part(name, value))
    return Public(tuple(sorted(parts.values())), tuple(secrets))


def _shown(path: str, environ: Mapping[str, str]) -> str:
    """A path that is the same for all users."""
    home = environ.get("HOME", "").rstrip("/")
    return f"~{path[len(home) :]}" if home and path.startswith(f"{home}/") else path


def _candidates(
    place: Place, tools: Collection[str], environ: Mapping[str, str], prefix: str
) -> Iterator[tuple[str, str]]:
    """(tool, path) of every file that may be there."""
    home = environ.get("HOME", "").rstrip("/")
    config = environ.get("XDG_CONFIG_HOME") or f"{home}/.config"
    shared = [one for one in environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if one]
    if "pip" in tools and environ.get("PIP_CONFIG_FILE") != os.devnull:
        site = dict.fromkeys(filter(None, (prefix, environ.get("VIRTUAL_ENV", ""))))
        named = filter(None, [environ.get("PIP_CONFIG_FILE", "")])
        for path in (
            *(f"{folder}/pip/pip.conf" for folder in shared),
            "/etc/pip.conf",
            f"{home}/.pip/pip.conf",
            f"{config}/pip/pip.conf",
            *(f"{folder}/pip.conf" for folder in site),
            *named,
        ):
            yield "pip", path
    if "uv" in tools and environ.get("UV_NO_CONFIG", "").lower() not in _TRUE:
        folders = [place.directory]
        while folders[-1] not in ("/", ""):
            folders.append(os.path.dirname(folders[-1]))
        for path in (
            *filter(None, [environ.get("UV_CONFIG_FILE", "")]),
            *(os.path.join(folder, "uv.toml") for folder in folders),
            *(os.path.join(folder, "pyproject.toml") for folder in folders),
            f"{config}/uv/uv.toml",
            *(f"{folder}/uv/uv.toml" for folder in shared),
            "/etc/uv/uv.toml",
        ):
            yield "uv", path
    if "conda" in tools:
        roots = filter(None, (environ.get("CONDA_ROOT", ""), environ.get("CONDA_PREFIX", "")))
        for path in (
            "/etc/conda/.condarc",
            "/etc/conda/condarc",
            *(f"{root}/{name}" for root in roots for name in (".condarc", "condarc")),
            *(f"{config}/conda/{name}" for name in (".condarc", "condarc")),
            *(f"{home}/{name}" for name in (".conda/.condarc", ".condarc", ".mambarc")),
            *filter(None, (environ.get("CONDARC", ""), environ.get("MAMBARC", ""))),
        ):
            yield "conda", path


def _read(place: Place, path: str) -> str:
    try:
        file = place.host(path)
        if not file.is_file() or file.stat().st_size > _BYTES_MAX:
            return ""
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, InvalidInputError):
        return ""


def _pip_options(text: str, known: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """What decides, as JSON, and its secrets; a digest of what pip would refuse."""
    import configparser  # here: most nodes have no such file

    parser = configparser.RawConfigParser()
    try:
        parser.read_string(text)
        options = {
            f"{section}.{option}": " ".join(parser.get(section, option).split())
            for section in sorted(parser.sections())
            for option in sorted(parser.options(section))
            if option.replace("_", "-") not in _PIP_INDIFFERENT
        }
    except configparser.Error:
        return bytes_digest(without_users(text).encode("utf-8", "surrogateescape")).value, ()
    secrets: list[str] = []
    for name, value in options.items():
        if name.rpartition(".")[2].replace("_", "-") in _PIP_SHOWN:
            options[name], found = shown_values(value, known)
            secrets += found
        else:
            options[name] = HIDDEN
            secrets.append(value)
    return json.dumps(options, ensure_ascii=True) if options else "", tuple(secrets)


def _uv_table(text: str) -> str:
    """A digest of a project's `[tool.uv]`, or nothing."""
    if "tool.uv" not in text:
        return ""
    import tomllib  # here: most set-ups have none

    try:
        table = tomllib.loads(text).get("tool", {}).get("uv", {})
        data = without_users(json.dumps(table, sort_keys=True, default=str))
    except (tomllib.TOMLDecodeError, AttributeError, RecursionError):
        data = text
    return bytes_digest(data.encode("utf-8", "surrogateescape")).value if data != "{}" else ""
