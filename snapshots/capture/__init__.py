"""What a set-up changed: looks before and after, and the snapshot made of the difference."""
