"""Garbage collection of a store: `inventory` reads what is there, `plan` decides (pure), `collect`
deletes. What an object needs its format says (`store.objects.records`): no format is known here.
"""
