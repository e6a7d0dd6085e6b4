"""Reads of an image's streams: from the node cache, the bundle, the store or the registry.

`image_bytes` answers reads; `fill` completes an image. May import `bundle` and the packages below
it.
"""
