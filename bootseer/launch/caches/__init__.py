"""Kept caches: what the first start of a job compiles, had by every later start before its command.

- `known`: the caches that frameworks name by variables; `machine`, `packages`: what decides whether
  their files can be used; `finding`: the caches of one start, each with its key
- `contents`, `units`: what of a folder is kept, and what of that belongs together
- `restoring`: from the store into the folder; `publishing`: the next generation, by one node
- `duty`: when the attendant publishes; `records`: what this node knows of caches
- `run`: the stage of a start; `commands`: what people ask

A generation is a snapshot of one directory (`bootseer.snapshots.catalogue`) whose key has a part
called `cache`, so the store's formats, its collector and the extraction are those of snapshots.
"""
