"""Overlays that show what is served, or lies here whole, on directories of the host."""
