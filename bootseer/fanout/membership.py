"""Ordered list of the nodes that a start runs on, and the place of this node in it.

Pure: variables, host names and the text of files in, a `Membership` out. All nodes of a start must
come to the same list by themselves, since nobody hands it round; nodes that come to different lists
have different keys (`keys.py`), and do not talk to each other.

Sources, the first one that says anything: the setting `fanout_hosts`; Slurm; Volcano; pods with a
number in their name behind a headless service (Indexed Jobs, JobSets, StatefulSets, Kubeflow's
jobs). torchrun alone tells a node one host, and no list.

Order: members behind one switch follow each other, so that of a tree over the list few edges leave
a rack. Slurm tells each node its own switches alone (SLURM_TOPOLOGY_ADDR), so those of the others
are read from topology.conf. Elsewhere the order of the list counts: in Kubernetes that of indexes,
which Kueue's topology-aware scheduling makes the order of racks.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.base.display import quoted
from bootseer.errors import InvalidInputError
from bootseer.fanout.hostlist import HOSTS_MAX, TEXT_BYTES_MAX, expand_hosts, is_host

MEMBERS_MIN = 4
"""Least number of nodes for a fan-out, which costs fewer nodes more than it saves the store."""
PORT_FIRST, PORT_COUNT = 27_000, 1_000
"""Range of ports for starts: below the ports of outgoing connections (32768) and of Kubernetes'
services (30000)."""
AUTO = "auto"
"""Value of `fanout_hosts` that takes the list of the scheduler."""


class Member(Struct, frozen=True):
    """A node of the start."""

    name: str
    host: str
    """Name or address at which the others reach it."""
    port: int
    place: tuple[str, ...] = ()
    """Switches above the node, the topmost first; empty if they are unknown."""


class Membership(Struct, frozen=True):
    """The nodes of a start, ordered by topology; no members where they are not known."""

    members: tuple[Member, ...] = ()
    own: int = -1
    """Index of this node in `members`."""
    origin: str = ""
    """Source of the list: "Slurm"."""
    reason: str = ""
    """Reason why there are no members, as a sentence without its end."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of the ordered list: equal on nodes that agree."""
        lines = (f"{one.name} {one.host} {one.port}\n" for one in self.members)
        return hashlib.sha256("".join(lines).encode()).digest()


class StartFacts(Struct, frozen=True, kw_only=True):
    """Information about a start that one of its nodes has."""

    environ: Mapping[str, str]
    names: tuple[str, ...]
    """Names of this host: its own, and those beside it in /etc/hosts."""
    node: str = ""
    """The setting `node`."""
    port: int
    hosts: str = AUTO
    """The setting `fanout_hosts`."""
    hosts_text: str = ""
    """Content of the file that the setting names."""
    topology_text: str = ""
    """Content of Slurm's topology.conf."""
    command: tuple[str, ...] = ()


def find_members(facts: StartFacts) -> Membership:
    """Return the members of the start. Raises: InvalidInputError, where a list cannot be right."""
    for source in (_from_setting, _from_slurm, _from_volcano, _from_pod):
        found = source(facts)
        if isinstance(found, str):
            return Membership(reason=found)
        if found is not None:
            return _checked(found, facts)
    return Membership(reason=_unknown(facts.environ))


def port_of(*start: str) -> int:
    """Return the port of a start, computed from its job, submission and attempt."""
    number = int.from_bytes(hashlib.sha256("\0".join(start).encode()).digest()[:8], "big")
    return PORT_FIRST + number % PORT_COUNT


# ---- sources ----------------------------------------------------------------------------------


class _Found(Struct, frozen=True):
    members: Sequence[Member]
    origin: str
    names: tuple[str, ...] = ()
    """Further names of this node in the list, beside `StartFacts.names`."""


_Answer = _Found | str | None
"""The list of a source; why it has none although it should; None where it says nothing."""


def _from_setting(facts: StartFacts) -> _Answer:
    if facts.hosts == AUTO:
        return None
    if facts.hosts.startswith("/"):
        members = _host_file(facts.hosts_text, f"the file {facts.hosts} (fanout_hosts)", facts.port)
        return _Found(members, facts.hosts)
    hosts = expand_hosts(facts.hosts, "the setting fanout_hosts")
    return _Found(_members(hosts, facts.port), "the setting fanout_hosts")


def _host_file(text: str, what: str, port: int) -> list[Member]:
    """Return the members in a file of lines `HOST[:PORT] [SWITCH[.SWITCH...]]  # COMMENT`."""
    if len(text) > TEXT_BYTES_MAX:
        raise InvalidInputError(f"{what} is longer than {TEXT_BYTES_MAX} characters")
    members = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, has_port, own_port = words[0].partition(":")
        is_port = own_port.isascii() and own_port.isdigit() and 0 < int(own_port[:6]) < 65536
        if len(words) > 2 or not is_host(name) or (has_port and not is_port):
            raise InvalidInputError(
                f"line {number} of {what} is {quoted(line.encode())}; write HOST[:PORT] [SWITCH], "
                "as in node07 spine1.leaf3"
            )
        place = tuple(words[1].split(".")) if len(words) == 2 else ()
        members.append(Member(name, name, int(own_port) if has_port else port, place))
        if len(members) > HOSTS_MAX:
            raise InvalidInputError(f"{what} names more than {HOSTS_MAX} hosts")
    return members


def _from_slurm(facts: StartFacts) -> _Answer:
    environ = facts.environ
    for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if text := environ.get(variable):
            break
    else:
        return None
    hosts = expand_hosts(text, variable)
    places = _switches(facts.topology_text, hosts) if facts.topology_text else {}
    names = tuple(filter(None, [environ.get("SLURMD_NODENAME")]))
    return _Found(_members(hosts, facts.port, places), "Slurm", names)


def _from_volcano(facts: StartFacts) -> _Answer:
    """Volcano's plug-in `svc` gives each pod the names of all tasks' pods, by kind of task."""
    lists = [name for name in facts.environ if name.startswith("VC_") and name.endswith("_HOSTS")]
    if not lists:
        return None
    hosts = [host for name in sorted(lists) for host in expand_hosts(facts.environ[name], name)]
    return _Found(_members(hosts, facts.port), "Volcano")


_NUMBERED = re.compile(r"(.+)-(0|[1-9][0-9]{0,5})")
_KUBEFLOW = re.compile(r"(.+)-(master|worker)-(?:0|[1-9][0-9]{0,5})")


def _from_pod(facts: StartFacts) -> _Answer:
    """Return the pods of one controller: PREFIX-0 to PREFIX-(N-1) behind a headless service."""
    environ = facts.environ
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    full = max(facts.names, key=lambda name: name.count("."), default="")
    name, _, domain = full.partition(".")
    count = node_count(environ, facts.command)
    if count is None:
        return (
            "nobody tells how many pods there are (PET_NNODES, or torchrun's --nnodes): name them "
            "in fanout_hosts"
        )
    if count < MEMBERS_MIN:
        return _too_few(count)
    suffix = f".{domain}" if domain else ""
    # Kubeflow's jobs have a service for each pod, called as the pod is.
    if job := _KUBEFLOW.fullmatch(name):
        names = [f"{job[1]}-master-0", *(f"{job[1]}-worker-{one}" for one in range(count - 1))]
        return _Found(_members([f"{one}{suffix}" for one in names], facts.port), "Kubernetes")
    numbered = _NUMBERED.fullmatch(name)
    if numbered is None:
        return "this pod's name has no number, so that nobody can name the others"
    if not domain:
        return "this pod has no headless service (subdomain), so that the others have no name"
    names = [f"{numbered[1]}-{one}" for one in range(count)]
    if name not in names:
        return f"this pod is number {numbered[2]}, and there are {count}: name all in fanout_hosts"
    return _Found(_members([f"{one}{suffix}" for one in names], facts.port), "Kubernetes")


def node_count(environ: Mapping[str, str], command: Sequence[str]) -> int | None:
    """Return the number of nodes of torchrun; None if it is unknown or may vary."""
    texts = [environ.get(name, "") for name in ("PET_NNODES", "NNODES")]
    for place, word in enumerate(command):
        option, is_joined, value = word.partition("=")
        if option in ("--nnodes", "-nnodes"):
            texts.append(value if is_joined else "".join(command[place + 1 : place + 2]))
    for text in texts:
        first, _, last = text.partition(":")
        if first.isascii() and first.isdigit() and len(first) < 7 and last in ("", first):
            return int(first)
    return None


def _unknown(environ: Mapping[str, str]) -> str:
    host = environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR")
    if host or "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun names one host, and not all: name them in fanout_hosts"
    return "no scheduler names the nodes: name them in fanout_hosts"


# ---- checks and order -------------------------------------------------------------------------


def _members(
    hosts: Iterable[str], port: int, places: Mapping[str, tuple[str, ...]] | None = None
) -> list[Member]:
    found = places or {}
    return [Member(host, host, port, found.get(host, ())) for host in hosts]


def _too_few(count: int) -> str:
    return f"{count} {'node is' if count == 1 else 'nodes are'} fewer than {MEMBERS_MIN}"


def _checked(found: _Found, facts: StartFacts) -> Membership:
    members = found.members
    if len(members) < MEMBERS_MIN:
        return Membership(origin=found.origin, reason=_too_few(len(members)))
    seen: set[str] = set()
    for one in members:
        if one.name in seen:
            raise InvalidInputError(
                f"{found.origin} names the node {quoted(one.name.encode())} twice"
            )
        seen.add(one.name)
    ordered = _by_place(members)
    names = tuple(dict.fromkeys(filter(None, (*found.names, facts.node, *facts.names))))
    own = _own_index(ordered, names)
    if own is None:
        called = ", ".join(names)
        raise InvalidInputError(
            f"{found.origin} does not name this node ({quoted(called.encode())}) among "
            f"{len(members)}; set BOOTSEER_NODE to its name there"
        )
    return Membership(ordered, own, found.origin)


def _own_index(members: Sequence[Member], names: Iterable[str]) -> int | None:
    """Return the index of the member with the first of these names that is in the list.

    A short name matches a full name if only one member has it.
    """
    indexes = {one.name: number for number, one in enumerate(members)}
    short: dict[str, list[int]] = {}
    for number, one in enumerate(members):
        if not one.name.replace(".", "").isdigit():
            short.setdefault(one.name.partition(".")[0], []).append(number)
    for name in names:
        if name in indexes:
            return indexes[name]
        alike = short.get(name.partition(".")[0], ())
        if len(alike) == 1:
            return alike[0]
    return None


def _by_place(members: Sequence[Member]) -> tuple[Member, ...]:
    """Return the members ordered by switch, at each level; else in the given order."""
    first: dict[tuple[str, ...], int] = {}

    def rank(member: Member) -> tuple[int, ...]:
        above = (member.place[:depth] for depth in range(1, len(member.place) + 1))
        return tuple(first[place] for place in above)

    for number, one in enumerate(members):
        for depth in range(1, len(one.place) + 1):
            first.setdefault(one.place[:depth], number)
    return tuple(sorted(members, key=rank))


def topology_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the paths at which Slurm's topology.conf may be on this node.

    Empty if the cluster has no switches, or outside Slurm. SLURM_CONF is set in jobs of clusters
    whose nodes get their configuration from the controller.
    """
    levels = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if levels == ["node"] or levels == [""]:
        return ()
    configured = environ.get("SLURM_CONF", "")
    folders = [Path(configured).parent] if configured.startswith("/") else []
    folders += map(Path, ("/etc/slurm", "/run/slurm/conf", "/var/spool/slurmd/conf-cache"))
    return tuple(folder / "topology.conf" for folder in dict.fromkeys(folders))


_SWITCHES_MAX = 100_000
_LEVELS_MAX = 16


def _switches(text: str, hosts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the switches above each of `hosts`, the topmost first.

    `text`: topology.conf of the plug-ins tree and block. Unreadable lines are ignored, since they
    affect the order alone.
    """
    above: dict[str, str] = {}
    leaf: dict[str, str] = {}
    wanted = set(hosts)
    for line in text[:TEXT_BYTES_MAX].splitlines():
        words = (word.partition("=") for word in line.partition("#")[0].split())
        fields = {name.lower(): value for name, _, value in words}
        switch = fields.get("switchname") or fields.get("blockname")
        if not switch:
            continue
        for below, into in (("switches", above), ("nodes", leaf)):
            names = _quietly(expand_hosts, fields.get(below, ""))
            for name in names:
                if (below == "switches" or name in wanted) and len(into) < _SWITCHES_MAX:
                    into.setdefault(name, switch)
    places = {}
    for host, switch in leaf.items():
        way = [switch]
        while (upper := above.get(way[-1])) and len(way) < _LEVELS_MAX:
            way.append(upper)
        places[host] = tuple(reversed(way))
    return places


def _quietly(expand: Callable[[str, str], tuple[str, ...]], text: str) -> tuple[str, ...]:
    try:
        return expand(text, "topology.conf") if text else ()
    except InvalidInputError:
        return ()
