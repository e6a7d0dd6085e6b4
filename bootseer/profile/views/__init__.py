"""What a start says, as text for a terminal and as files for other programs. Pure (no I/O)."""
