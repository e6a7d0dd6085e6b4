"""Objects under keys, visible only when whole; leases; notes of what is in use."""
