"""Bundles: the hot bytes of an image and workload, as the store has them and as a start uses them.

`format` and `hot_store` own what the store has; `replay` and `preload` use a bundle in a start. May
import `record` and the packages below it.
"""
