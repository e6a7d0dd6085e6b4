"""Names of a storage: lookups, commits in one step, and deletion of replaced parts."""
