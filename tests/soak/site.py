"""Site of the soak: an image in a registry, wheels, and users with a store and a node each.

Each user has a mount namespace that lives as long as the site, so that jobs of one user share their
node, and no mount is left on the machine at the end.
"""

import contextlib
import io
import os
import random
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from testbed.cgroups import Freezer, freezers
from testbed.hdfs.cluster import MiniHdfs
from testbed.images.building import LayoutBuilder
from testbed.images.rootfs import python_root
from testbed.needs import MissingError
from testbed.node import MARK, Node
from testbed.servers.registry import Registry, running_registry
from testbed.users import as_user
from testbed.wheels import make_wheel

USER_IDS = (0, 65534, 1)
"""Root, nobody and daemon; fusermount3 refuses users without a name."""
CACHE_BYTES = 96 << 20
"""Size of the root user's cache, which is a small file system that can be filled."""
VERSIONS = ("1", "2", "3")
_FILE_COUNT = 300
_PACKAGE_FILE_COUNT = 150
_NEEDED = ("unshare", "nsenter", "setpriv", "mount", "fusermount3", "skopeo", "docker-registry")

# Prints `right` if each file has the content that follows from its name.
CHECK_IMAGE = """
import random, sys
root, seed = sys.argv[1], sys.argv[2]
names = [line.strip() for line in open(root + "/data/NAMES")]
for name in random.Random(seed).sample(names, 120):
    content = open(f"{root}/data/{name}", "rb").read()
    wanted = random.Random(name).randbytes(random.Random(name + "size").randrange(200_000))
    if content != wanted:
        sys.exit(f"WRONG BYTES in {name}")
print("right", flush=True)
"""

# Ordinary users need a /dev/fuse that they may open.
_HOLD = """
mount --make-rprivate / &&
mount -t tmpfs -o dev tmpfs /mnt && mknod -m 666 /mnt/fuse c 10 229 &&
mount --bind /mnt/fuse /dev/fuse && umount -l /mnt &&
if [ "$1" = 0 ]; then mount -t tmpfs -o size="$3",mode=700 cache "$2/cache"; fi &&
echo ready && exec sleep infinity
"""


@dataclass
class User:
    """User with a node, a store and a process that holds the mount namespace."""

    uid: int
    node: Node
    store: Path
    holder: "subprocess.Popen[str]"
    saved: dict[str, set[str]] = field(default_factory=dict)
    """Names of the saved checkpoints by URL; none of them may be lost."""

    def command(self, *words: object) -> list[str]:
        """Return a command line that this user runs on its node."""
        enter = ["nsenter", f"--mount=/proc/{self.holder.pid}/ns/mnt", "--"]
        if self.uid:
            enter += as_user(self.uid, reading_all=True)
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(self.node.base), *map(str, words)]

    def bootseer(self, *words: object) -> list[str]:
        """Return a command line of Bootseer for this user."""
        return self.command(sys.executable, "-m", "bootseer", *words)

    def mounts(self) -> list[str]:
        """Return the mount points below this node's folder, except the cache itself."""
        lines = Path(f"/proc/{self.holder.pid}/mountinfo").read_text().splitlines()
        points = [line.split(" ")[4] for line in lines]
        below = f"{self.node.base}/"
        return [one for one in points if one.startswith(below) and one != f"{below}cache"]


@dataclass
class SoakSite:
    """Users, image, servers and wheels of the jobs."""

    folder: Path
    users: Sequence[User]
    image: Path
    """OCI layout with the tag `train`."""
    registry: Registry
    registry_pid: int
    wheels: Path
    hdfs: MiniHdfs | None
    freezers: Sequence[Freezer]
    hdfs_is_free: threading.Lock = field(default_factory=threading.Lock)

    def checkpoint_urls(self, user: User) -> list[str]:
        """Return the folders for a user's checkpoints."""
        urls = [(user.store.parent / "checkpoints").as_uri()]
        return urls + ([f"{self.hdfs.url}/soak/{user.uid}"] if self.hdfs else [])


def missing_tools() -> list[str]:
    """Return the programs and privileges for a soak that this machine lacks."""
    missing = [name for name in _NEEDED if not shutil.which(name)]
    if os.geteuid() != 0:
        missing.append("root")
    if not Path("/dev/fuse").exists():
        missing.append("/dev/fuse")
    return missing


@contextlib.contextmanager
def open_site(folder: Path) -> Iterator[SoakSite]:
    """Yield the site, reusing files of an earlier soak; end all its processes afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    image, wheels = folder / "image", folder / "wheels"
    if not (folder / "made").exists():
        shutil.rmtree(image, ignore_errors=True)
        _make_image(folder / "root", image)
        _make_wheels(wheels)
        (folder / "made").touch()
    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(running_registry(folder / "registry"))
        registry.push_layout(image, "train", "soak/train:v1")
        users = [stack.enter_context(_user(folder, uid)) for uid in USER_IDS]
        pid, hdfs, freezing = _pid_of(registry), _hdfs(folder), freezers()
        if hdfs:
            stack.callback(hdfs.stop)
        if not freezing:
            print("left out: cgroups cannot be frozen on this machine")
        yield SoakSite(folder, users, image, registry, pid, wheels, hdfs, freezing)


def _hdfs(folder: Path) -> MiniHdfs | None:
    """Start an HDFS with two replicas, so that the death of one DataNode loses nothing."""
    try:
        return MiniHdfs(folder / "hdfs", conf={"dfs.replication": "2"}).start()
    except MissingError as error:
        print(f"left out: no HDFS here: {error}")
        return None


def _pid_of(registry: Registry) -> int:
    wanted = os.fsencode(str(registry.root / "config.yml"))
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                return int(path.parent.name)
    raise AssertionError("the registry has no process")


def _make_image(root: Path, layout: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    python_root(root)
    data = root / "data"
    data.mkdir()
    names = [f"file-{number:04}" for number in range(_FILE_COUNT)]
    for name in names:
        size = random.Random(name + "size").randrange(200_000)
        (data / name).write_bytes(random.Random(name).randbytes(size))
    (data / "NAMES").write_text("\n".join(names) + "\n")
    (data / "check.py").write_text(CHECK_IMAGE)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(root, ".")
    path = "/usr/local/bin:/usr/bin:/bin"
    LayoutBuilder(layout).add_image(
        [buffer.getvalue()], tag="train", compression="zstd", run={"Env": [f"PATH={path}"]}
    )


def _make_wheels(folder: Path) -> None:
    for version in VERSIONS:
        files = {
            f"soaked/part_{number:03}.py": f"VERSION = {version!r}\nTEXT = {'x' * 3000!r}\n"
            for number in range(_PACKAGE_FILE_COUNT)
        }
        make_wheel(folder, "soaked", version, {"soaked/__init__.py": "", **files})


@contextlib.contextmanager
def _user(folder: Path, uid: int) -> Iterator[User]:
    base = folder / f"user-{uid}"
    store = base / "store"
    node = Node(base / "node", store.as_uri())
    for path in (base, node.base, node.base / "cache"):
        path.mkdir(parents=True, exist_ok=True)
        os.chown(path, uid, uid)
    holder = subprocess.Popen(
        [*("unshare", "--mount", "sh", "-c", _HOLD, "sh"), str(uid), node.base, str(CACHE_BYTES)],
        env={name: value for name, value in os.environ.items() if name != MARK},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n", "the namespace of a user cannot be made"
        yield User(uid, node, store, holder)
    finally:
        node.sweep()
        holder.kill()
        holder.wait(30)
