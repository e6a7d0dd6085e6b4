"""Environment snapshots: what a set-up command makes, kept once and put in place everywhere else.

- ask: `command`, `request`, `inputs`, `interpreter`, `fingerprint`, `targets`: what a set-up is and
  depends on, to one key
- look: `scan`, `diff`: which names of a target came, changed and went
- keep: `capture`, `manifest`, `catalogue`, `keeper`: from a target to a blob and a manifest in the
  store; of many nodes one does it, under a lease
- use: `fetch`, `restore`, `merge`, `work`, `lock`, `state`: from a manifest to a target that is
  wholly there or untouched, whoever is killed

Alone owns `snapshots/` in the store (docs/format/snapshot.md) and the `.bootseer-*` folders beside
targets. Callers use `run.run_setup`, and `commands` for snapshots of plain directories. Nothing is
imported here, so that each part costs only itself.
"""
