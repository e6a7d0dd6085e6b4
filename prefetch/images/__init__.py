"""Images that can be mounted: `find` looks one up or pulls it, `mount` mounts it.

May import `serve` and the packages below it.
"""
