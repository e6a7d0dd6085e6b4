"""Which servers keep the replicas of a part, so that any server may be slow. Pure.

Parts are joined by the servers that they share. A slow server's parts are read from their other
replicas, whose servers hand on parts of their own to others, and so on, as far as parts are joined:
where two parts lie on the same two servers, the one that is left reads both. So parts are joined to
as many others as can be: of eight on eight servers, each twice, to one ring.
"""

import random
from collections.abc import Iterable, Mapping

Group = tuple[str, ...]
"""The servers of one part."""


def choose_group(counts: Mapping[str, int], groups: Iterable[Group], size: int) -> Group:
    """`size` of the servers with the fewest parts, at random where several are as good; fewer, if
    there are no more. `counts`: parts by server; `groups`: those of the parts that there are."""
    heads = {server: server for server in counts}

    def head(server: str) -> str:
        while heads.setdefault(server, server) != server:
            heads[server] = server = heads[heads[server]]
        return server

    for first, *others in filter(None, groups):
        for other in others:
            heads[head(other)] = head(first)
    left = random.sample(sorted(counts), len(counts))
    chosen: list[str] = []
    while left and len(chosen) < size:
        joined = set(map(head, chosen))
        best = min(left, key=lambda server: (counts[server], head(server) in joined))
        left.remove(best)
        chosen.append(best)
    return tuple(chosen)
