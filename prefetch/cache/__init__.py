"""The node cache: streams of layers on the node's disk, which bytes are there, and its limit."""
