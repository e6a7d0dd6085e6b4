"""Container images: built, odd, nasty, large."""
