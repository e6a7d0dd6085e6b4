"""Containers over an image's tree, for `bootseer run --image`: root, process, and runc.

`container.prepare_container` mounts the image; `extracted.prepare_extracted` works without FUSE.
May import `images` and the packages below it.
"""
