"""What is stored under which name: listings, commits in one step, and what was replaced."""
