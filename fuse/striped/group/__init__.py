"""Loading of a DCP checkpoint by many ranks, each byte read by one of them. Needs torch."""
