"""The process that serves a tree: its plan, its worker, what it does on the side, its figures."""
