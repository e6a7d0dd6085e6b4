"""File systems to mount, and ways to clean up after mounts."""
