"""Watches starts and publishes what was noted: `collect` in training code, `publish` beside it."""
