"""Publishing after a start: the image that it pulled, its trace, hot set and bundle.

Public: `publishing` (background processes), `indexing`, `publish_image`, `bundle_build`. May import
of `prefetch`: `reading` and below.
"""
