"""Kept caches: files that compilers and frameworks made in one start, restored before later starts.

- `known`: the caches that frameworks name by environment variables
- `packages`: the Python of a command, and the versions of its packages
- `finding`: the caches of one start, each with its key, and the facts about the node in the key
- `contents`, `units`: which files of a folder are kept, and which of them belong together
- `restoring`: store to folder; `publishing`: folder to store, by one node at a time
- `run`: the stage of a start; `duty`: publishing by the attendant
- `records`: notes about caches on this node; `commands`: `bootseer cache`

One published state of a cache is called a generation. It is a snapshot of one directory
(`bootseer.snapshots.catalogue`) whose key has a part named `cache`, so that the store's formats,
its garbage collector and the extraction are those of snapshots.
"""
