"""Names of what is stored: each segment and layout is a generation, and has a name of its own."""

import secrets


def new_generation() -> str:
    """A name that no other writer, on any node, chooses."""
    return secrets.token_hex(16)
