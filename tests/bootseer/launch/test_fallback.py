"""A start never fails because Bootseer did: one warning, and the ordinary path."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from testbed.node import Node, attribute
from tests.bootseer.launch.conftest import Image

pytestmark = pytest.mark.needs("mount", "fuse")

# In a mount namespace of its own, where /dev/fuse is something else.
WITHOUT_FUSE = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount --bind /dev/null /dev/fuse && exec "$@"',
    "sh",
)
SHOW = "import os; print(os.getuid(), os.getcwd(), os.environ['FROM_IMAGE'], os.getpid())"


@pytest.mark.parametrize("store", ["hdfs://127.0.0.1:9/store", "ftp://127.0.0.1:9/store"])
def test_a_store_that_cannot_be_used(node: Node, image: Image, store: str) -> None:
    for pulled in (True, False):
        done = node.run(
            "run",
            *("--image", image.source, "--", "python3", "-c", SHOW),
            variables={"BOOTSEER_STORE": store, "BOOTSEER_DEADLINE": "2"},
        )
        assert (done.returncode, done.stdout.split()[:3]) == (0, ["1000", "/job", "yes"])
        assert done.stderr.count("warning:") == 1, done.stderr
        assert done.stderr.count(store) == 1, done.stderr
        assert "not indexed yet" not in done.stderr
        # The second time the node has it.
        assert ("pulling it whole" in done.stderr) is pulled
        assert "Traceback" not in done.stderr
    node.wait_clean()


def test_a_wrong_url_of_a_store_is_said_before_anything_is_pulled(node: Node, image: Image) -> None:
    """Regression: the whole image was pulled first, as "not indexed yet"."""
    done = node.run(
        *("run", "--image", image.source, "--", "true"),
        variables={"BOOTSEER_STORE": "nosuch://host/store"},
    )
    assert done.returncode == 2
    assert done.stderr == "bootseer: cannot open nosuch://host/store: Protocol not known: nosuch\n"


def test_a_store_that_is_silent_is_waited_for_once(
    node: Node, shell_image: Image, silent_url: str
) -> None:
    """A start has one wait for its store, and not one for each stage, and warns once."""
    done = node.run(
        "run",
        *("--image", shell_image.source, "--setup", "echo one > env", "--setup", "echo two >> env"),
        *("--target", "/job", "--", "cat", "env"),
        variables={"BOOTSEER_STORE": silent_url, "BOOTSEER_DEADLINE": "4"},
    )
    assert (done.returncode, done.stdout) == (0, "one\ntwo\n"), done.stderr
    # The others say so at once.
    assert done.stderr.count("no answer within 4 s") == 3, done.stderr
    assert done.stderr.count("no answer within 4 s, in earlier calls") == 2, done.stderr
    assert done.stderr.count("warning:") == 1, done.stderr


def test_a_store_in_which_nothing_can_be_written(node: Node, image: Image, tmp_path: Path) -> None:
    """No image is published; each start is as fast as from a pulled image."""
    (node.base / "file").write_text("")
    store = (node.base / "file/store").as_uri()
    for pulled in (True, False):
        done = node.run(
            "run",
            *("--image", image.source, "--", "python3", "-c", SHOW),
            variables={"BOOTSEER_STORE": store},
        )
        assert (done.returncode, done.stdout.split()[:3]) == (0, ["1000", "/job", "yes"])
        assert ("pulling it whole" in done.stderr) is pulled
        assert done.stderr.count("warning:") == pulled
    node.wait_clean()


def test_a_store_that_is_full(node: Node, image: Image, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=True)
    try:
        done = node.run(
            "run",
            *("--image", image.source, "--", "sh", "-c", "echo fine"),
            variables={"BOOTSEER_STORE": (small / "store").as_uri()},
        )
        assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
        assert "warning" not in done.stderr
        node.wait_clean()
        (log,) = (node.base / "run/logs").glob("image-*.log")
        assert "No space left" in log.read_text()
        # The incomplete files are removed, so that there is space again.
        left = sum(path.stat().st_size for path in small.rglob("*") if path.is_file())
        assert left < 100_000
    finally:
        node.sweep()
        subprocess.run(["umount", "--lazy", str(small)], check=False)


def test_a_named_image_that_nobody_has(node: Node) -> None:
    """A name that only a store can resolve has no ordinary path."""
    done = node.run("run", "--image", "never-indexed:1", "--", "true")
    assert done.returncode == 10
    assert "never-indexed:1" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("what", ["indexes", "images"])
def test_a_catalogue_that_is_damaged(
    node: Node, known_image: Image, tmp_path: Path, what: str
) -> None:
    job = ("--image", known_image.source, "--", "sh", "-c", "echo fine")
    for path in (tmp_path / "store" / what).rglob("*"):
        if path.is_file():
            path.write_bytes(b"rubbish")
    done = node.run("run", *job)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
    assert "Traceback" not in done.stderr
    node.wait_clean()


def fallback(node: Node, *arguments: object, prefix: Sequence[str] = WITHOUT_FUSE) -> str:
    done = node.run("run", *arguments, prefix=prefix)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning:") == 1, done.stderr
    assert "extracted" in done.stderr
    assert attribute(node.spans()["image"], "bootseer.fallback") == "extracted"
    return done.stdout


def test_without_fuse_the_image_is_extracted(node: Node, known_image: Image) -> None:
    job = ("--image", known_image.source, "--", "python3", "-c", SHOW)
    assert fallback(node, *job).split()[:3] == ["1000", "/job", "yes"]
    node.wait_clean()
    extracted = node.base / "cache/extracted"
    (tree,) = [path for path in extracted.iterdir() if not path.name.startswith("container-")]
    # The second one finds the tree, untouched by the first, and removes what that one left.
    for _ in range(2):
        found = fallback(
            node,
            "--image",
            known_image.source,
            "--",
            "sh",
            "-c",
            "ls; cat /etc/passwd; echo x > /tmp/new",
        )
        assert found == (known_image.root / "etc/passwd").read_text()
        assert len(list(extracted.iterdir())) == 2
        assert not (tree / "tmp/new").exists()
        assert not (tree / "work").exists()
    node.wait_clean()


def test_without_fuse_what_is_in_use_stays(node: Node, known_image: Image) -> None:
    code = "open('/tmp/mine', 'w').write('x'); print('up', flush=True); input(); "
    code += "print(open('/tmp/mine').read()); import decimal"
    with node.start(
        "run",
        *("--image", known_image.source, "--", "python3", "-c", code),
        prefix=WITHOUT_FUSE,
        stdin=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        fallback(node, "--image", known_image.source, "--", "sh", "-c", "echo y > /tmp/mine")
        out, err = process.communicate("\n", timeout=30)
        assert (process.returncode, out) == (0, "x\n"), err


def test_without_fuse_a_setup_and_a_failure(node: Node, known_image: Image) -> None:
    setup = ("--setup", "echo from-setup > env", "--target", "/job")
    job = ("--image", known_image.source, *setup, "--", "cat", "env")
    assert fallback(node, *job) == "from-setup\n"
    assert fallback(node, *job) == "from-setup\n"
    done = node.run(
        "run",
        *("--image", known_image.source, "--setup", "exit 9", "--target", "/job", "--", "true"),
        prefix=WITHOUT_FUSE,
    )
    assert done.returncode == 9


def test_without_fuse_a_checkpoint_is_an_error(node: Node, store_url: str) -> None:
    """The job's files can be provided at that path in no other way."""
    done = node.run(
        "run", *("--checkpoint", f"{store_url}:{node.base}/mnt", "--", "true"), prefix=WITHOUT_FUSE
    )
    assert done.returncode != 0
    assert done.stderr.startswith("bootseer: cannot mount")
    assert done.stderr.count("\n") == 1
