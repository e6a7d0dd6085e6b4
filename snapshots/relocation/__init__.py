"""Makes an environment work at another prefix: planned by `plan`, done by `apply`."""
