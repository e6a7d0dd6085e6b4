"""What the image cases share: an image, a registry behind a shaped line, cold nodes, and peers."""
