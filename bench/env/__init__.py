"""What the environment cases share: an environment, ways of putting it in place, a store."""
