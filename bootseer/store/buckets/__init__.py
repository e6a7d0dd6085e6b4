"""Buckets of S3, Google Cloud Storage and Azure, by obstore: the stores of most clusters."""
