"""Fan-out: the nodes of a job send each other the objects that all of them read.

Hides the trees, the choice of sources, the protocol, keys and membership. Public: `local`
(`SharedReads`, `decline`), `membership`, `keys`, `hostlist`, `host.HostPlan`. Imports `base`,
`linux`, `served`, `settings`, `store`, `timeline` and `transfer`.
"""
