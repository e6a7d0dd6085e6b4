"""Garbage collection of a store: `inventory` lists, `plan` decides (pure), `collect` deletes.

The formats themselves say how their objects hang together (`store.objects.records`); this package
knows none of them.
"""
