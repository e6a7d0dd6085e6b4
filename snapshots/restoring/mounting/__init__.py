"""Environments that are mounted: served trees, overlays over them, containers' roots."""
