"""A real Kubernetes of two nodes on this machine."""
