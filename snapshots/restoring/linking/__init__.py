"""Environments that are linked from trees which the node has extracted before."""
