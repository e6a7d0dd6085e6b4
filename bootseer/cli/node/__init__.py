"""`bootseer status`, `config` and `doctor`: this node, as it is."""
