"""Garbage collection of a store: `inventory` lists, `plan` decides (pure), `collect` deletes.

The formats describe how their objects refer to each other (`store.objects.records`); this package
knows no format. May import `store` and below.
"""
