"""HTTP as Bootseer speaks it: one client for registries, web servers, collectors and Kubernetes.

`transport` talks to one server, and to wherever it may send us; `ranges` reads files by ranges;
`addresses` has the rule that says where a server may send us.
"""
