"""Backend for every other fsspec URL, and a writer that collects an object before it is stored."""
