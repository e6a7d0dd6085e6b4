"""Reads of a tree's streams through the node cache, and every way in which missing bytes come."""
