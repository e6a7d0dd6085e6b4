"""Backend for a store beside an image in a registry (`oci://`)."""
