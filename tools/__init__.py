"""Programs that check the repository."""
