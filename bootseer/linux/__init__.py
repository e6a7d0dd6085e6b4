"""What Bootseer asks of Linux, each once: paths below a root, processes, waiting, ownership."""
