"""Choice of the folders that are kept, their keys, and the variables that are set."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import InvalidInputError
from bootseer.launch.caches import finding
from bootseer.launch.caches.finding import Cache, CacheJob, KeepRequest, find_caches
from bootseer.launch.caches.known import data_cache_path
from bootseer.launch.caches.packages import python_of
from bootseer.linux.root_paths import WorkingDirectory
from bootseer.settings.config import Settings, load_settings


class Host:
    """Root with packages of Python, and a compiler; none of its programs can run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "env/bin"
        self.bin.mkdir(parents=True)
        self.packages = root / "env/lib/python3.12/site-packages"
        self.packages.mkdir(parents=True)
        self.program("python3.12", "")
        (self.bin / "python").symlink_to("python3.12")
        (self.bin / "python3").symlink_to("python3.12")
        self.settings = load_settings(
            {"store_url": (root / "store").as_uri(), "cache_dir": str(root / "cache")}
        )

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def compiler(self, version: str) -> None:
        for name in ("g++", "gcc"):
            self.program(name, f"#!/bin/sh\necho '{name} ({version}) {version}'\n")

    def install(self, name: str, version: str) -> None:
        for old in self.packages.glob(f"{name}-*.dist-info"):
            old.rmdir()
        (self.packages / f"{name}-{version}.dist-info").mkdir()

    def find(
        self,
        *command: str,
        request: KeepRequest = KeepRequest(),  # noqa: B008
        settings: Settings | None = None,
        **environ: str,
    ) -> dict[str, Cache]:
        variables = {"PATH": str(self.bin), "HOME": str(self.root / "home"), **environ}
        job = CacheJob(command or ("python", "train.py"), variables, directory=str(self.root))
        found = find_caches(settings or self.settings, request, job)
        return {cache.name: cache for cache in found}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path)
    made.compiler("13.2.0")
    return made


def test_without_a_framework_there_is_nothing_to_keep(host: Host) -> None:
    assert host.find() == {}


def test_variables_that_nobody_has_set_name_folders_of_ours(host: Host) -> None:
    host.install("torch", "2.6.0")
    host.install("triton", "3.2.0")
    found = host.find()
    assert set(found) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"}
    for cache in found.values():
        assert cache.sets
        assert cache.is_ours
        assert cache.folder.is_relative_to(host.settings.cache_dir / "kept/folders")
        assert cache.path == str(cache.folder)


def test_what_the_user_has_set_is_respected(host: Host) -> None:
    host.install("torch", "2.6.0")
    cache = host.find(TORCHINDUCTOR_CACHE_DIR="inductor")["TORCHINDUCTOR_CACHE_DIR"]
    assert (cache.path, cache.sets, cache.is_ours) == (str(host.root / "inductor"), False, False)


def test_another_variable_that_chooses_the_folder_is_respected(host: Host) -> None:
    host.install("triton", "3.2.0")
    assert "TRITON_CACHE_DIR" not in host.find(TRITON_HOME="/x")


def test_data_that_are_there_stay_where_they_are(host: Host) -> None:
    """A job without a network could not download them again."""
    host.install("datasets", "3.0.0")
    assert "HF_DATASETS_CACHE" in host.find()
    (host.root / "home/.cache/huggingface/datasets/squad").mkdir(parents=True)
    assert "HF_DATASETS_CACHE" not in host.find()


def test_a_cache_that_a_variable_would_switch_on_stays_off(host: Host) -> None:
    host.install("jax", "0.5.0")
    assert "JAX_COMPILATION_CACHE_DIR" not in host.find()
    assert "JAX_COMPILATION_CACHE_DIR" in host.find(JAX_COMPILATION_CACHE_DIR="/jax")


def test_a_folder_that_all_nodes_share_is_left_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bootseer.linux import mount_table

    host.install("torch", "2.6.0")
    shared = [mount_table.MountPoint(b"/", os.stat(host.root).st_dev, b"lustre")]
    monkeypatch.setattr(mount_table, "mount_points", lambda: shared)
    assert "TORCHINDUCTOR_CACHE_DIR" not in host.find(TORCHINDUCTOR_CACHE_DIR="/tmp/x")
    # A folder that an option names is always kept.
    assert str(host.root / "x") in host.find(request=KeepRequest(("x",)))


@pytest.mark.parametrize("word", ["sudo", "/usr/bin/gosu", "docker", "srun"])
def test_behind_a_change_of_user_nothing_is_set(host: Host, word: str) -> None:
    host.install("torch", "2.6.0")
    assert host.find(word, "python", "train.py") == {}
    assert str(host.root / "x") in host.find(word, "python", request=KeepRequest(("x",)))


def test_a_named_directory_is_kept_without_any_framework(host: Host) -> None:
    (cache,) = host.find("sh", request=KeepRequest(("cache",), automatic=False)).values()
    assert (cache.path, cache.is_ours, cache.sets) == (str(host.root / "cache"), False, False)


def test_the_whole_root_is_no_cache(host: Host) -> None:
    with pytest.raises(InvalidInputError, match="whole root"):
        host.find(request=KeepRequest(("/",)))


def test_megatron_names_its_indexes_by_an_option(host: Host) -> None:
    assert data_cache_path(("x", "--data-cache-path=/a")) == "/a"
    assert data_cache_path(("x", "--data-cache-path")) == ""
    assert "/idx" in host.find("python", "pretrain.py", "--data-cache-path", "/idx")


def test_the_key_says_what_decides(host: Host) -> None:
    host.install("torch", "2.6.0")
    parts = {part.name: part.value for part in host.find()["TORCHINDUCTOR_CACHE_DIR"].parts}
    assert parts["package torch"] == "2.6.0"
    assert parts["interpreter"] == "python3.12"
    assert parts["compiler CXX"] == "g++ (13.2.0) 13.2.0"
    assert {"cpu instructions", "machine", "gpu", "driver", "image", "workload"} <= set(parts)


def test_whatever_decides_makes_another_key_and_another_folder(host: Host) -> None:
    host.install("torch", "2.6.0")
    name = "TORCHINDUCTOR_CACHE_DIR"
    seen = [host.find()[name]]
    host.install("torch", "2.7.0")
    seen.append(host.find()[name])
    host.compiler("14.1.0")
    seen.append(host.find()[name])
    host.install("triton", "3.2.0")
    seen.append(host.find()[name])
    seen.append(host.find(BOOTSEER_IMAGE="train:v2")[name])
    seen.append(host.find(settings=replace(host.settings, workload="other"))[name])
    assert len({cache.key for cache in seen}) == len({c.folder for c in seen}) == len(seen)
    assert host.find()[name].key == seen[3].key


def test_the_script_of_an_environment_tells_its_python(host: Host) -> None:
    host.program("torchrun", f"#!{host.bin}/python3\n")
    place = WorkingDirectory(Path("/"), str(host.root))
    found = python_of(place, ("env/bin/torchrun", "train.py"), {"PATH": "/usr/bin"})
    assert found is not None
    assert found.folders == (host.packages,)
    # A shell script will use what is first in PATH.
    host.program("start", "#!/bin/sh\n")
    assert python_of(place, ("env/bin/start",), {"PATH": str(host.bin)}) == found.__class__(
        f"{host.bin}/python3", "python3.12", (host.packages,)
    )


def test_gpus_and_drivers_are_read_from_the_kernel(tmp_path: Path) -> None:
    assert {part.value for part in finding.gpu_parts(tmp_path)} == {"none"}
    for number in range(2):
        gpu = tmp_path / f"proc/driver/nvidia/gpus/{number}"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text("Model: \t\t NVIDIA H100\nIRQ: 1\n")
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22\n"
    )
    parts = finding.gpu_parts(tmp_path)
    assert {part.name: part.value for part in parts} == {
        "gpu": "nvidia NVIDIA H100",
        "driver": "nvidia 550.54.14",
    }
    assert finding.vendors(parts) == {"nvidia"}


def test_only_instructions_count_of_a_processors_flags(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name: x\nflags\t: fpu avx2 ibrs avx512f md_clear\n")
    parts = {part.name: part.value for part in finding.cpu_parts(tmp_path)}
    assert parts["cpu instructions"] == "avx2 avx512f fpu"
