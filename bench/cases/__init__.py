"""One case per module, each named CASE."""
