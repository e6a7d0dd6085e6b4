"""Puts a snapshot on its targets: mounted, linked or extracted; `restore_modes` is the way in."""
