"""Fan-out: its plan simulated, and the real thing between network namespaces."""
