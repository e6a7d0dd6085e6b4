"""Checkpoints on remote storage as files: each large one striped over many parts, verified.

- model, here: `layout` (the format, docs/format/stripe.md), `view` (where a byte of a generation
  is), `stripe_settings` (how new files are stored)
- core: `reading` and `writing` (bytes, through one `memory` budget), `names` (lookup,
  commits, deletion of replaced files); `storage` puts them together
- edge: `mounted` (the kernel's view, and the processes behind a mount), `tools` (functions, and
  the work behind `bootseer checkpoint`), `fsspec_system` (fsspec), `group` (ranks of one job)

docs/SEMANTICS.md says what is durable and visible when. This `__init__` and those of the folders
import nothing, so that each part loads only its own imports. May import `fuse.kernel`, `served`,
`store`, `transfer` and below.
"""
