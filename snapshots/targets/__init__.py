"""Directories that set-ups change: locked, looked at, and known by what they hold."""
