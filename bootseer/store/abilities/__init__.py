"""What some backends can do besides, and how it is asked for."""
