"""Packing of a directory or a tar stream into a blob and its tree."""
