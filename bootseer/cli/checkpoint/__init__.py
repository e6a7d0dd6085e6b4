"""`bootseer checkpoint`: the striped tree, mounted and not, and the helper of mount(8)."""
