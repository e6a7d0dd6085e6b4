"""The bytes that a start will read: found, replayed, handed to the kernel, judged."""
