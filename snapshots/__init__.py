"""Environments: the result of a set-up command, captured once and restored on every other node.

| module | content |
|---|---|
| `explain` | the answer to "would this set-up run, and why?" |
| `environment` | one set-up on one node: restored, or run under a lease and captured |
| `archive` | snapshots of existing directories, and tar archives in and out |
| `restore` | the choice between mount, link and extraction |
| `relocation` | an environment changed so that it works at another path |
| `mounting`, `holder` | overlays made on targets, and the process behind one |
| `node_trees` | extracted trees that the node keeps; reflink copies |
| `mounted` | overlays that are there: found, kept, recovered, unmounted |
| `staging` | staging, commit and recovery of files in a target |
| `fetch` | extraction through the fetch engine |
| `capture`, `sharing` | packing of a change; content that earlier blobs hold |
| `diff` | differences between snapshots, packages and keys |
| `catalogue`, `manifest` | snapshots in the store, and their format |
| `key`, `key_parts` | the key of a set-up, and the encoding of its parts |
| `command_parts`, `shown` | parts from command and variables, with the words that may be shown |
| `layers` | overlayfs upper directories |
| `targets`, `target_inference` | directories that a set-up changes: locks, users, last state |
| `inputs`, `python` | files and interpreter that decide the result |
| `commands`, `shell` | set-up commands and shell scripts, read without running them |
| `scan` | contents of a directory, and differences between two scans |

No module imports one that is above it in the order of `pyproject.toml` (import-linter). The package
owns `snapshots/` in the store (docs/format/snapshot.md) and the `.bootseer-*` folders beside
targets. Nothing is imported here, so that each part costs only itself.
"""
