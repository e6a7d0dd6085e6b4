"""From the name or source of an image to a tree whose bytes can be had."""
