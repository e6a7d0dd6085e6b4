"""Mounts and their life: mount(2), the table of mounts, supervisor and workers."""
