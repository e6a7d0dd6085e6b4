"""Extraction: a plan, processes that carry it out, and the frames that they share."""
