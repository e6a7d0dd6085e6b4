"""What the kernel asks of a mounted checkpoint tree, and what it is shown."""
