"""Which server takes which part of a file that is being written."""
