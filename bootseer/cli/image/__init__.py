"""`bootseer image` and `bootseer snapshotter`."""
