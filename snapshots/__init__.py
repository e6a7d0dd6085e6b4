"""Environment snapshots: what a set-up command makes, kept once and put in place everywhere else.

- `setup/`: what a set-up is and depends on, to one key; its process
- `targets/`: the directories that a set-up makes or changes: scans, locks, users, last state
- `capture/`, `catalogue/`: from a target to a blob and a manifest in the store; of many nodes one
  does it, under a lease
- `restoring/`: from a manifest to a target that is wholly there or untouched, even after a kill
- `relocation/`: a restored environment made to work at another prefix
- `explain`, `archive`, `commands`: what people ask of the snapshots that a store holds

Alone owns `snapshots/` in the store (docs/format/snapshot.md) and the `.bootseer-*` folders beside
targets. Callers use `run.run_setup`, and `commands` for snapshots of plain directories. Nothing is
imported here, so that each part costs only itself.
"""
