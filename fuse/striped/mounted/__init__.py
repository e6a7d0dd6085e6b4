"""A striped tree as a mounted file system: its operations, its processes, their hand-over."""
