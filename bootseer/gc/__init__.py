"""Garbage collection of a store: `inventory` reads what is there, `plan` decides (pure), `collect`
deletes. With `launch` and `cli` the only package that knows images and snapshots together.
"""
