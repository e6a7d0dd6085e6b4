"""The nodes of a start: host lists, schedulers, files, order, and refused input."""

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import InvalidInputError
from bootseer.fanout.hostlist import HOSTS_MAX, expand_hosts
from bootseer.fanout.membership import (
    PORT_COUNT,
    PORT_FIRST,
    Membership,
    StartFacts,
    find_members,
    port_of,
    topology_files,
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[009-010,2],gpu7.example.com", ["n009", "n010", "n2", "gpu7.example.com"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("tux[3-4]-ib[0,2].cluster", ["tux3-ib0.cluster", "tux3-ib2.cluster",
                                      "tux4-ib0.cluster", "tux4-ib2.cluster"]),
        ("[1-2]n", ["1n", "2n"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
    ],
)  # fmt: skip
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text, "the list") == tuple(hosts)


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "a b", "a\nb", "a/b", "../a", "-a", "a-", "n[", "n]", "n[]"),
        *("n[1-2", "n[2-1]", "n[1-]", "n[-1]", "n[1,]", "n[a-b]", "n[0-[1-2]]", "n[[1]]", "n[1]]"),
        *(
            "n[1-2-3]",
            "n[\u0661-\u0663]",
            "\xfc[1-2]",
            "n[1-99999999999999999999]",
            "n[0-65536]",
            "a" * 254,
        ),
        *("n[0-999][0-999]", "a" * 250 + "[0-9999]", "n[1:3]", "n{1..3}", "$(id)", "n\0"),
    ],
)
def test_what_is_no_host_list(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"\Athe list ") as raised:
        expand_hosts(text, "the list")
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 400


def test_a_wide_list_is_counted_before_it_is_made() -> None:
    assert len(expand_hosts(f"n[1-{HOSTS_MAX}]", "it")) == HOSTS_MAX
    for text in ("n[0-999999999999999999]", "n" + "[0-9]" * 5000, "n[0-9999]," * 10 + "n"):
        with pytest.raises(InvalidInputError):
            expand_hosts(text, "it")


_NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}[a-z]", fullmatch=True)


@given(st.lists(st.tuples(_NAMES, st.integers(0, 999), st.integers(0, 20), st.integers(1, 4))))
def test_a_list_that_was_folded_unfolds(
    entries: list[tuple[str, int, int, int]],
) -> None:
    text, hosts = [], []
    for name, first, more, width in entries:
        text.append(f"{name}[{first:0{width}}-{first + more}]")
        wide = len(f"{first:0{width}}")
        hosts += [f"{name}{number:0{wide}}" for number in range(first, first + more + 1)]
    if text:
        assert expand_hosts(",".join(text), "it") == tuple(hosts)


@given(st.text(alphabet="n0129,-[].\x00 ", max_size=40))
def test_any_text_is_names_or_one_error(text: str) -> None:
    try:
        hosts = expand_hosts(text, "it")
    except InvalidInputError:
        return
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,253}", host) for host in hosts)


# ---- who takes part ---------------------------------------------------------------------------


def _found(environ: dict[str, str], *names: str, **told: Any) -> Membership:
    own: dict[str, Any] = {"names": names or ("n1",), "port": 27001, **told}
    return find_members(StartFacts(environ=environ, **own))


def _hosts(found: Membership) -> list[str]:
    return [one.host for one in found.members]


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def test_slurm_tells_the_nodes_of_a_job() -> None:
    found = _found(SLURM, "n3.cluster.example")
    assert (_hosts(found), found.own, found.origin) == (["n1", "n2", "n3", "n4"], 2, "Slurm")
    assert {one.port for one in found.members} == {27001}


def test_a_step_has_its_own_nodes_and_slurms_name_of_the_node_counts() -> None:
    environ = {**SLURM, "SLURM_JOB_NODELIST": "n[1-9]", "SLURM_STEP_NODELIST": "n[5-8]"}
    found = _found({**environ, "SLURMD_NODENAME": "n6"}, "host-of-another-name")
    assert (_hosts(found), found.own) == (["n5", "n6", "n7", "n8"], 1)


TREE = """
# two racks, and a third that the job has nothing in
SwitchName=leaf1 Nodes=n[1,3,5]
SwitchName=leaf2 Nodes=n[2,4,6] LinkSpeed=100
switchname=leaf3 nodes=other[1-100]
SwitchName=spine Switches=leaf[1-3]
"""


def test_nodes_of_a_rack_follow_each_other() -> None:
    environ = {**SLURM, "SLURM_JOB_NODELIST": "n[1-6]"}
    found = _found(environ, "n4", topology_text=TREE)
    assert _hosts(found) == ["n1", "n3", "n5", "n2", "n4", "n6"]
    assert found.own == 4
    assert found.members[4].place == ("spine", "leaf2")
    blocks = "BlockName=b2 Nodes=n[2,6]\nBlockName=b1 Nodes=n[1,4]\nBlockSizes=2\nnonsense\n"
    assert _hosts(_found(environ, topology_text=blocks)) == ["n3", "n5", "n1", "n4", "n2", "n6"]


@pytest.mark.parametrize(
    "text", ["", "SwitchName=a Switches=a\nSwitchName=a Nodes=n[1-4]", "SwitchName=a Nodes=n[4-1]"]
)
def test_a_topology_that_says_nothing_leaves_the_order(text: str) -> None:
    assert _hosts(_found(SLURM, topology_text=text)) == ["n1", "n2", "n3", "n4"]


@given(st.permutations(range(12)), st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_each_switch_has_one_stretch_of_the_list(order: list[int], racks: list[int]) -> None:
    lines = [f"n{one} s{racks[one] % 2}.r{racks[one]}" for one in order]
    found = _found({}, "n0", hosts="/hosts", hosts_text="\n".join(lines))
    assert sorted(_hosts(found)) == sorted(f"n{one}" for one in order)
    for depth in (1, 2):
        stretches = [key for key, _ in itertools.groupby(m.place[:depth] for m in found.members)]
        assert len(stretches) == len(set(stretches))
    assert found.members[found.own].name == "n0"


def test_where_slurm_keeps_its_topology() -> None:
    assert not topology_files({"SLURM_TOPOLOGY_ADDR_PATTERN": "node"})
    assert not topology_files({})
    environ = {"SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node", "SLURM_CONF": "/x/slurm.conf"}
    assert str(topology_files(environ)[0]) == "/x/topology.conf"


@pytest.mark.parametrize(
    ("environ", "name", "command", "hosts", "own"),
    [
        # An Indexed Job with a headless service.
        ({"PET_NNODES": "4"}, "train-2.train.ns.svc.cluster.local", "",
         [f"train-{n}.train.ns.svc.cluster.local" for n in range(4)], 2),
        # Trainer's, a JobSet of one Job.
        ({"PET_NNODES": "4", "PET_NODE_RANK": "0"}, "job-node-0-0.job.ns.svc", "",
         [f"job-node-0-{n}.job.ns.svc" for n in range(4)], 0),
        ({}, "db-1.db.ns.svc", "torchrun --nnodes 4 x.py",
         [f"db-{n}.db.ns.svc" for n in range(4)], 1),
        ({}, "db-1.db.ns.svc", "torchrun --nnodes=4:4 x.py",
         [f"db-{n}.db.ns.svc" for n in range(4)], 1),
        # A PyTorchJob of Kubeflow: a service for each pod.
        ({"PET_NNODES": "4"}, "llm-worker-1", "",
         ["llm-master-0", "llm-worker-0", "llm-worker-1", "llm-worker-2"], 2),
        ({"VC_WORKER_HOSTS": "v-worker-0.v,v-worker-1.v,v-worker-2.v",
          "VC_MASTER_HOSTS": "v-master-0.v"},
         "v-worker-1", "", ["v-master-0.v", "v-worker-0.v", "v-worker-1.v", "v-worker-2.v"], 2),
    ],
)  # fmt: skip
def test_pods(environ: dict[str, str], name: str, command: str, hosts: list[str], own: int) -> None:
    names = (name.partition(".")[0], name)
    found = _found({**KUBERNETES, **environ}, *names, command=tuple(command.split()))
    assert (_hosts(found), found.own) == (hosts, own)


@pytest.mark.parametrize(
    ("environ", "name", "reason"),
    [
        ({}, "n1", "no scheduler"),
        ({"MASTER_ADDR": "n1", "WORLD_SIZE": "64", "RANK": "3"}, "n1", "torchrun names one host"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "n1", "torchrun names one host"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-3]"}, "n1", "3 nodes are fewer than 4"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n1"}, "n1", "1 node is fewer than 4"),
        (KUBERNETES, "train-1.train", "how many pods"),
        ({**KUBERNETES, "PET_NNODES": "2:8"}, "train-1.train", "how many pods"),
        ({**KUBERNETES, "PET_NNODES": "2"}, "train-1.train", "2 nodes are fewer"),
        ({**KUBERNETES, "PET_NNODES": "8"}, "train-1", "no headless service"),
        ({**KUBERNETES, "PET_NNODES": "8"}, "train.x", "no number"),
        ({**KUBERNETES, "PET_NNODES": "8"}, "train-abcde-8.x", "number 8, and there are 8"),
    ],
)
def test_where_nobody_knows_the_nodes_a_reason_is_told(
    environ: dict[str, str], name: str, reason: str
) -> None:
    found = _found(environ, name)
    assert not found.members
    assert reason in found.reason


@pytest.mark.parametrize(
    ("environ", "told", "message"),
    [
        (SLURM, {"names": ("n9", "n9.x")}, "Slurm does not name this node ('n9, n9.x')"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-4],n2"}, {}, "names the node 'n2' twice"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-"}, {}, "SLURM_JOB_NODELIST cannot be read"),
        ({}, {"hosts": "a,b,c,d"}, "the setting fanout_hosts does not name this node"),
        ({}, {"hosts": "/h", "hosts_text": "n1\nn2 a b\n"}, "line 2 of the file /h (fanout_hosts)"),
        ({}, {"hosts": "/h", "hosts_text": "n1:0"}, "line 1 of"),
        ({}, {"hosts": "/h", "hosts_text": "n1:99999"}, "line 1 of"),
        ({}, {"hosts": "/h", "hosts_text": "n1;id"}, "line 1 of"),
        ({}, {"hosts": "/h", "hosts_text": "n\n" * 70000}, "names more than 65536 hosts"),
    ],
)
def test_a_list_that_cannot_be_right_is_one_error(
    environ: dict[str, str], told: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        _found(environ, **told)


def test_a_file_of_hosts() -> None:
    text = "# ours\nn1:4000 r1\n\nn2 r2  # the other rack\nn3 r1\n127.0.0.4\n"
    found = _found(SLURM, "n3", hosts="/h", hosts_text=text)
    assert [(one.name, one.port) for one in found.members] == [
        *(("127.0.0.4", 27001), ("n1", 4000), ("n3", 27001), ("n2", 27001)),
    ]
    assert (found.own, found.origin) == (2, "/h")


def test_lists_that_differ_have_different_digests() -> None:
    lists = ["a,b,c,n1", "b,a,c,n1", "a,b,c,d,n1"]
    found = {_found({}, hosts=one).digest for one in lists}
    assert len(found) == 3
    assert _found({}, "a", hosts=lists[0]).digest in found


def test_the_port_of_a_start_is_the_same_on_all_its_nodes() -> None:
    assert port_of("job", "7", "0") == port_of("job", "7", "0")
    ports = {port_of("job", str(number), "0") for number in range(50)}
    assert len(ports) > 40
    assert all(PORT_FIRST <= port < PORT_FIRST + PORT_COUNT for port in ports)
