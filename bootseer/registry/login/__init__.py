"""Logins at registries: credentials, challenges, tokens."""
