"""`bootseer snapshot`."""
