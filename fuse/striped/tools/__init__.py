"""Functions on striped trees without a mount: copying, converting, verifying, checking."""
