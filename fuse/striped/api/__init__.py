"""A striped tree without a mount: functions, an fsspec file system, copying and checking."""
