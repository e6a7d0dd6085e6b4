"""Observation of starts: `collect` records stages of training processes, `publish` sends them."""
