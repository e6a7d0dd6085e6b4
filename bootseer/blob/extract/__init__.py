"""Extraction of a tree to disk: the plan, the worker processes, and the frames that they share."""
