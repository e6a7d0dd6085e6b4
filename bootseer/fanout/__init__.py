"""Fan-out: the nodes of a job feed each other what all of them need."""
