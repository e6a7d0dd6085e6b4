"""The programs of a Kubernetes cluster: built once from Debian's source package, then kept.

Debian has the source of Kubernetes 1.20.2 with all its dependencies, but a package of kubectl only.
The other programs are built here, by the Go of the same release, without a network. Nothing is
installed. Safe in parallel processes; a killed build continues from its cache.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from testbed.needs import MissingError
from testbed.packages import Packages
from testbed.waiting import locked

CACHE_VARIABLE = "BOOTSEER_TEST_KUBERNETES"
"""Variable that names the folder in which packages, programs and images are kept between runs."""
PROGRAMS_VARIABLE = "BOOTSEER_TEST_KUBERNETES_PROGRAMS"
"""Variable that names a folder with programs of another release, used instead of those built
here."""

VERSION = "1.20.2"
KEPT = f"bin-{VERSION}-2"
"""Name of the programs' folder in the cache; a new name makes them be built again."""
_BUILT = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet")
_SUITE, _CONTAINERD_SUITE = "bookworm", "trixie"
_PACKAGE = "k8s.io/kubernetes"
_GENERATED = Path("pkg/generated/openapi/zz_generated.openapi.go")
LOCK_S = 3600.0
"""Time to wait for another process, which may build everything."""
_STEP_DEADLINE_S = 3000.0
# Only Docker and the clouds' providers are left out.
_TAGS = "providerless,dockerless"


def cache_folder() -> Path:
    """Return the folder that keeps slow results; its content is made again if it is missing."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "bootseer-kubernetes"


def given_programs() -> Path | None:
    """Return the folder of programs that the environment names, if it names one."""
    chosen = os.environ.get(PROGRAMS_VARIABLE)
    return Path(chosen).absolute() if chosen else None


def release(program: str, search_path: str) -> tuple[int, int]:
    """Return major and minor number of the Kubernetes release of a program."""
    said = _run([program, "--version"], Path("/"), {"PATH": search_path})
    found = re.search(r"v(\d+)\.(\d+)\.", said)
    if found is None:
        raise MissingError(f"{program} does not print its version: {said.strip()}")
    return int(found[1]), int(found[2])


def packages(cache: Path) -> Packages:
    """Return the Debian packages kept for the cluster."""
    return Packages(cache / "packages")


def programs(cache: Path, say: Callable[[str], None]) -> Path:
    """Return a folder with all programs of the cluster. Raises: MissingError."""
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "lock", LOCK_S, MissingError):
        target, given = cache / KEPT, given_programs()
        missing = [
            name
            for name in _BUILT
            if not (target / name).exists() and not (given and (given / name).exists())
        ]
        target.mkdir(exist_ok=True)
        if missing:
            _build(cache, target, missing, say)
        found = packages(cache)
        for suite, package, pattern in (
            (_SUITE, "kubernetes-client", "usr/bin/kubectl"),
            (_SUITE, "etcd-server", "usr/bin/etcd"),
            (_CONTAINERD_SUITE, "containerd", "usr/bin/c*"),
            (_SUITE, "containernetworking-plugins", "usr/lib/cni"),
        ):
            folder = found.unpacked(suite, package)
            for program in folder.glob(pattern):
                link = target / program.name
                link.unlink(missing_ok=True)
                link.symlink_to(program)
        _compile_init(target / "init")
    return target


def _compile_init(target: Path) -> None:
    """Compile the first process of nodes and pods, statically, since images get a copy of it."""
    if not target.exists():
        source = Path(__file__).with_name("init.c")
        _run(["gcc", "-static", "-O1", "-o", str(target), str(source)], source.parent, {})


def _build(cache: Path, target: Path, names: Sequence[str], say: Callable[[str], None]) -> None:
    found = packages(cache)
    go = _go(found)
    say("kubernetes: fetching the source")
    # In a GOPATH: Go from 1.17 on refuses this go.mod, and uses vendor/ without one.
    path = cache / "gopath"
    source = path / "src" / _PACKAGE
    if not source.is_dir():
        source.parent.mkdir(parents=True, exist_ok=True)
        found.source(_SUITE, "kubernetes").rename(source)
    _mend_reflect2(source / "vendor/github.com/modern-go/reflect2")
    environment = {
        "PATH": f"{go}/bin:{os.environ['PATH']}", "GOROOT": str(go), "GOPATH": str(path),
        "GOCACHE": str(cache / "gocache"), "GOPROXY": "off", "GO111MODULE": "off", "GOFLAGS": "",
        "CGO_ENABLED": "0", "PWD": str(source),
    }  # fmt: skip
    if not (source / _GENERATED).exists():
        say("kubernetes: generating the one file that its source lacks")
        _generate(cache, source, environment)
    kept = f"{_PACKAGE}/vendor/k8s.io"
    major, minor, _ = VERSION.split(".")
    values = {
        f"{kept}/component-base/version.gitVersion": f"v{VERSION}",
        f"{kept}/component-base/version.gitMajor": major,
        f"{kept}/component-base/version.gitMinor": minor,
        f"{kept}/client-go/pkg/version.gitVersion": f"v{VERSION}",
    }
    flags = " ".join(["-s -w", *(f"-X {name}={value}" for name, value in values.items())])
    for name in names:
        say(f"kubernetes: building {name}")
        partial = target / f"{name}.partial"
        command = ["nice", "-n", "19", "go", "build", "-trimpath", "-tags", _TAGS]
        command += ["-ldflags", flags, "-o", str(partial), f"./cmd/{name}"]
        _run(command, source, environment)
        partial.rename(target / name)
    for folder in (path, cache / "gocache"):
        shutil.rmtree(folder, onerror=lambda *_: None)


def _mend_reflect2(folder: Path) -> None:
    """Change the bundled reflect2 as its release 1.0.2 does, for Go from 1.18 on.

    Since Go 1.18 the caller owns the iterator over a map. The reflect2 of Kubernetes 1.20 does not
    know that, and an API server that encodes a map, as for each patch of a webhook, dies of
    SIGSEGV.
    """
    link, walk = folder / "unsafe_link.go", folder / "unsafe_map.go"
    text = link.read_text()
    text = text.replace(
        "func mapiterinit(rtype unsafe.Pointer, m unsafe.Pointer) *hiter",
        "func mapiterinit(rtype unsafe.Pointer, m unsafe.Pointer, it *hiter)",
    )
    # The runtime's own iterator, which fills all of it.
    text = text.replace(
        "\t// rest fields are ignored\n",
        "\tt, h, buckets, bptr, overflow, oldoverflow unsafe.Pointer\n\tstartBucket uintptr\n"
        "\toffset, wrapped, b, i uint8\n\tbucket, checkBucket uintptr\n",
    )
    link.write_text(text)
    walk.write_text(
        walk.read_text().replace(
            "\treturn &UnsafeMapIterator{\n"
            "\t\thiter:      mapiterinit(type2.rtype, *(*unsafe.Pointer)(obj)),\n",
            "\tvar it hiter\n\tmapiterinit(type2.rtype, *(*unsafe.Pointer)(obj), &it)\n"
            "\treturn &UnsafeMapIterator{\n\t\thiter:      &it,\n",
        )
    )


def _go(found: Packages) -> Path:
    """Return the root of Go; its standard library is in a package of its own."""
    folder = found.unpacked(_SUITE, "golang-1.19-go", "golang-1.19-src")
    return folder / "usr/lib/go-1.19"


def _generate(cache: Path, source: Path, environment: Mapping[str, str]) -> None:
    generator = cache / "openapi-gen"
    build = ["nice", "-n", "19", "go", "build", "-o", str(generator)]
    _run([*build, "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"], source, environment)
    marked = re.compile(rb"^// *\+k8s:openapi-gen=true", re.MULTILINE)
    skipped = re.compile(r"testdata|/test|_examples|sample-")
    folders = set()
    for top in ("staging/src/k8s.io", "pkg", "cmd"):
        for file in (source / top).rglob("*.go"):
            folder = str(file.parent.relative_to(source))
            if (
                folder not in folders
                and not skipped.search(folder)
                and marked.search(file.read_bytes())
            ):
                folders.add(folder)
    vendored = {folder.replace("staging/src/", "vendor/", 1) for folder in folders}
    command = [str(generator), "--logtostderr", "--output-base", f"{environment['GOPATH']}/src"]
    command += ["--go-header-file", "hack/boilerplate/boilerplate.generatego.txt"]
    command += ["-i", ",".join(f"{_PACKAGE}/{folder}" for folder in sorted(vendored))]
    command += ["-p", f"{_PACKAGE}/{_GENERATED.parent}", "-O", _GENERATED.stem]
    _run([*command, "-r", str(cache / "openapi.report")], source, environment)


def _run(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True,
            timeout=_STEP_DEADLINE_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"cannot build Kubernetes: {error}") from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()[-500:]
        raise MissingError(f"cannot build Kubernetes: {' '.join(command[:6])}: {words}")
    return done.stdout
