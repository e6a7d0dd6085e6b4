"""The codec of the tree index."""
