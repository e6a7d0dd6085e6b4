"""Checkpoints on remote storage as files: each large one striped over many parts, verified.

- model, here: `layout` (the format, docs/format/stripe.md), `view` (where a byte of a generation
  is), `stripe_settings` (how new files are stored)
- core: `reading` and `writing` (bytes, through one `memory` budget), `names` (what is there,
  commits, and what was replaced); `storage` puts them together
- edge: `mounted` (the kernel's view, and the processes behind a mount), `tools` (functions, and
  the work behind `bootseer checkpoint`), `fsspec_system` and `fsspec_file` (fsspec), `group` (for
  ranks of one job)

Alone owns what is durable and visible when; docs/SEMANTICS.md says what users may rely on. Nothing
is imported here or in the folders' `__init__`, so that each part costs only itself.
"""
