"""Stands in for `helm` where there is none: installs, upgrades, removes the chart of this checkout.

Renders by the engine that Helm uses and applies by kubectl, what others need first. It knows the
options that docs/kubernetes.md shows. What a test adds to the values is in the file HELM_VALUES;
what is installed is noted in the file HELM_STATE.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.containers.chart import NEWER_APIS, objects, render

# What `helm install` creates first, and removes last.
_FIRST = ("Namespace", "ServiceAccount", "Secret", "ConfigMap", "ClusterRole", "Role")
_DEADLINE_S = 600.0


def main() -> None:
    """One call of `helm`."""
    parser = argparse.ArgumentParser(prog="helm")
    parser.add_argument("verb", choices=["install", "upgrade", "uninstall"])
    parser.add_argument("release", choices=["bootseer"])
    parser.add_argument("chart", nargs="?", choices=["docker/kubernetes/chart"])
    parser.add_argument("--namespace", required=True)
    for flag in ("--create-namespace", "--reuse-values"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="values")
    asked = parser.parse_args()
    state = Path(os.environ["HELM_STATE"])
    before: dict[str, Any] = json.loads(state.read_text()) if state.exists() else {}
    if asked.verb == "uninstall":
        _kubectl("delete", *_DELETE, text=_listed(before["values"], asked.namespace))
        state.unlink()
        return
    values = json.loads(Path(os.environ["HELM_VALUES"]).read_text())
    if asked.reuse_values:
        values = before["values"]
    for setting in asked.values:
        _set(values, setting)
    if asked.create_namespace:
        _kubectl("create", "namespace", asked.namespace)
    _kubectl("apply", "--filename", "-", text=_listed(values, asked.namespace))
    state.write_text(json.dumps({"values": values}))


_DELETE = ("--ignore-not-found", "--filename", "-")


def _listed(values: dict[str, Any], namespace: str) -> str:
    versions = _kubectl("api-versions").split()
    apis = [api for api in NEWER_APIS if api.rpartition("/")[0] in versions]
    found = objects(render(values, apis=apis, namespace=namespace))
    found.sort(key=lambda one: _FIRST.index(one["kind"]) if one["kind"] in _FIRST else 99)
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": found})


def _set(values: dict[str, Any], setting: str) -> None:
    path, _, text = setting.partition("=")
    *folders, name = path.split(".")
    for folder in folders:
        values = values.setdefault(folder, {})
    if text.startswith("{"):
        values[name] = text.strip("{}").split(",")
    else:
        values[name] = int(text) if text.isdecimal() else text


def _kubectl(*words: str, text: str | None = None) -> str:
    done = subprocess.run(
        ["kubectl", *words],
        input=text,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_DEADLINE_S,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    main()
