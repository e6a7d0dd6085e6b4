"""Snapshots in the store: manifests, names, verification, comparison, export and import."""
