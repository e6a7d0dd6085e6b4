"""Generated starts of jobs, and nodes in namespaces that run them."""
