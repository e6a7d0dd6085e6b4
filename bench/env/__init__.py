"""Parts of the environment cases: an environment, ways of restoring it, and a store."""
