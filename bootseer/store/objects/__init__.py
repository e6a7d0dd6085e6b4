"""Key-value store on a backend: atomic objects, leases, records of use, links between objects."""
