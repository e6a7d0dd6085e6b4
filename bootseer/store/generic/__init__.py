"""Any other fsspec URL as a backend."""
