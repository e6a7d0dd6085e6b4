"""Checkpoints on remote storage as files: each large one striped over many parts, verified.

- model: `layout` (the format, docs/format/stripe.md), `view` (where a byte of a generation is)
- core: `stored` (what is there), `tree` (changes of names, commits), `reader` and `writer` (bytes,
  through one `memory` budget), `reader_keeper` and `graveyard` (what was replaced), `warm`
- edge: `file_system` (for the kernel: `name_operations`, `file_operations`), `server` (the process
  behind a mount), `mount`

Alone owns what is durable and visible when; docs/SEMANTICS.md says what users may rely on. Callers
use `mount.mount_checkpoints` and `mount.unmount_checkpoints`; `storage.StripedStorage` and `copy`
do without a mount. Nothing is imported here, so that each part costs only itself.
"""
