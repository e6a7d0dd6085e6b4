"""Programs that check this repository."""
