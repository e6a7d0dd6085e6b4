"""Containers over an image's tree: their root, their process, and runc."""
