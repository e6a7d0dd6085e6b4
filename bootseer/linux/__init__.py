"""The kernel's doors: paths below a root, processes, waiting, ownership and removal of files."""
