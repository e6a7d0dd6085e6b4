"""`bootseer mount`, `unmount`, and mount(8)'s helper."""
