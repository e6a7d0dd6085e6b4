"""Settings, where they come from, and whether they are believed."""
