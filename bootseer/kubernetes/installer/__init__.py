"""containerd's own configuration on a node: our lines in it, put in, loaded, and taken out again.

A block at the end of its file, not a file of its own: containerd 1.6 and 1.7 take a plugin's table
of an imported file in place of the whole table of the main one: the node's own settings were lost.
"""
