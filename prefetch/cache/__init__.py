"""The node's cache on disk: streams of image layers (`node_cache`), indexes, and the size limit.

Imports no other package of `prefetch`.
"""
