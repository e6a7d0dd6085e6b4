"""`oci://`: a store beside an image in a registry."""
