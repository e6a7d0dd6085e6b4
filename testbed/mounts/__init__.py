"""FUSE servers for tests, mounts of images and snapshots, and their removal after a test."""
