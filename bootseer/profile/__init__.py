"""Starts observed: `collect` records in training code, `publish` publishes in the attendant."""
