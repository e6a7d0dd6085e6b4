"""Parts of the image cases: an image, a registry behind a limited loopback, nodes, and peers."""
