"""What is mounted on this node: served trees, overlays over them, their servers' begin and end."""
