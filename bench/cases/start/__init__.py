"""Cases of a start as a whole, and of what it takes besides image, environment and checkpoint."""
