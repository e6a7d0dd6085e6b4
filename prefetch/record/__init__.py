"""What starts read: traces, hints, and the hot set merged from them."""
