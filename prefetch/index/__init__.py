"""An image in the store: layers packed once, one tree over all of them, their records."""
