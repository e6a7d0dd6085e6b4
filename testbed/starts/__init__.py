"""Generated starts of jobs, and real starts on nodes in namespaces."""
