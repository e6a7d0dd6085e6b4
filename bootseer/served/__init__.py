"""What processes that serve in the background share: their start, their sockets, their errors."""
