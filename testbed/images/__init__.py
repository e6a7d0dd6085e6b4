"""Container images for tests: small, hostile, odd and large ones."""
