"""Rule that finds the newest checkpoint."""

import os
from pathlib import Path

import pytest

from bootseer.fuse.striped.mounted.newest import (
    newest_files,
    read_newest,
    step_series,
    tracked_name,
)
from bootseer.fuse.striped.mounted.status import mount_status
from bootseer.fuse.striped.tools.copy import copy_in, open_storage
from tests.fuse.striped.support.harness import UNIT, Driver, storage_on
from tests.fuse.striped.support.mounting import MIB, checkpoints, settings_in, shell

NAMES = ["iter_0000900", "iter_0001000", "step-20", "final"]


@pytest.mark.parametrize(
    ("trackers", "expected"),
    [
        ({}, None),
        ({"latest": "final\n"}, "final"),
        ({"latest": "/somewhere/else/step-20/"}, "step-20"),
        ({"latest_checkpointed_iteration.txt": "1000"}, "iter_0001000"),
        ({"latest_checkpointed_iteration.txt": "release"}, None),
        ({"latest": "gone", "latest_checkpointed_iteration.txt": "900"}, "iter_0000900"),
        ({"latest": ""}, None),
    ],
)
def test_trackers_are_followed(trackers: dict[str, str], expected: str | None) -> None:
    assert tracked_name(trackers, NAMES) == expected


def test_without_a_tracker_the_newest_is_taken(tmp_path: Path) -> None:
    driver = Driver(storage_on(tmp_path))
    driver.mkdir("a")
    driver.write("a/1", b"x")
    driver.mkdir("b")
    driver.mkdir("b/deep")
    driver.write("b/deep/2", b"x" * 100_000)
    assert [info.path for info in newest_files(driver.storage)] == ["b/deep/2"]
    driver.write("c", b"x")
    assert [info.path for info in newest_files(driver.storage)] == ["c"]
    driver.write("latest", b"a")
    assert [info.path for info in newest_files(driver.storage)] == ["a/1"]
    driver.storage.close()


# Files in the order of saving (trackers with their content), and the newest whole checkpoint.
TREES = {
    "megatron": (
        "iter_0000500/mp_rank_00/model_optim_rng.pt iter_0000500/mp_rank_01/model_optim_rng.pt "
        "latest_checkpointed_iteration.txt=500 iter_0001000/mp_rank_00/model_optim_rng.pt",
        "iter_0000500",
    ),
    "megatron, distributed": (
        "iter_0000500/.metadata iter_0000500/__0_0.distcp iter_0000500/common.pt "
        "iter_0000500/metadata.json iter_0001000/.metadata iter_0001000/__0_0.distcp "
        "latest_checkpointed_iteration.txt=1000",
        "iter_0001000",
    ),
    "megatron, a release": (
        "release/mp_rank_00/model.pt iter_0000500/mp_rank_00/model.pt "
        "latest_checkpointed_iteration.txt=release",
        "release",
    ),
    "megatron, the tracker's own is gone": (
        "latest_checkpointed_iteration.txt=700 iter_0000500/mp_rank_00/model_optim_rng.pt",
        "iter_0000500",
    ),
    "deepspeed": (
        "global_step100/mp_rank_00_model_states.pt global_step100/zero_pp_rank_0_optim_states.pt "
        "latest=global_step100 zero_to_fp32.py global_step200/mp_rank_00_model_states.pt",
        "global_step100",
    ),
    "hugging face": (
        "checkpoint-500/model.safetensors checkpoint-500/optimizer.pt "
        "checkpoint-500/trainer_state.json checkpoint-1000/config.json "
        "checkpoint-1000/model.safetensors checkpoint-1000/trainer_state.json "
        "checkpoint-1500/config.json checkpoint-1500/model-00001-of-00002.safetensors "
        "runs/events.out.tfevents.1",
        "checkpoint-1000",
    ),
    "hugging face, a final model beside its steps": (
        "checkpoint-500/trainer_state.json checkpoint-500/model.safetensors config.json "
        "model.safetensors",
        "checkpoint-500",
    ),
    "hugging face, shards are missing": (
        "checkpoint-9/model.safetensors checkpoint-9/trainer_state.json "
        "checkpoint-10/model-00001-of-00003.safetensors checkpoint-10/trainer_state.json "
        "checkpoint-10/model-00003-of-00003.safetensors",
        "checkpoint-9",
    ),
    "a model by itself": (
        "config.json model-00001-of-00002.safetensors model-00002-of-00002.safetensors "
        "model.safetensors.index.json",
        "",
    ),
    "torch.distributed.checkpoint": (
        "step-10/__0_0.distcp step-10/__1_0.distcp step-10/.metadata step-9/__0_0.distcp "
        "step-9/.metadata step-11/__0_0.distcp step-11/__1_0.distcp step-11/.metadata.tmp",
        "step-10",
    ),
    "torch.distributed.checkpoint, without collectives": (
        "step-1/__0_0.distcp step-1/__0.metadata step-2/__0_0.distcp",
        "step-1",
    ),
    "one step, by its own URL": ("__0_0.distcp __1_0.distcp .metadata", ""),
    "lightning": (
        "lightning_logs/version_0/checkpoints/epoch=0-step=100.ckpt "
        "lightning_logs/version_1/hparams.yaml "
        "lightning_logs/version_1/checkpoints/epoch=0-step=100.ckpt "
        "lightning_logs/version_1/checkpoints/epoch=1-step=200.ckpt",
        "lightning_logs/version_1/checkpoints/epoch=1-step=200.ckpt",
    ),
    "nemo": ("a-step=10/common.pt a-step=20/common.pt a-step=20-unfinished", "a-step=10"),
    "accelerate": (
        "checkpoint_0/model.safetensors checkpoint_0/random_states_0.pkl "
        "checkpoint_1/model.safetensors checkpoint_1/random_states_0.pkl",
        "checkpoint_1",
    ),
    "runs of one job": (
        "run_1/step_900/.metadata run_1/step_900/__0_0.distcp run_2/step_100/.metadata "
        "run_2/step_100/__0_0.distcp run_2/step_200/__0_0.distcp run_2/train.log",
        "run_2/step_100",
    ),
    "names that do not tell": (
        "step_10/model.pt step_10/optimizer.pt step_20/model.pt step_20/optimizer.pt "
        "step_30/model.pt",
        "step_20",
    ),
    "folders in a step": (
        "step_10/model/.metadata step_10/optim/.metadata step_20/model/.metadata "
        "step_20/optim/.metadata",
        "step_20",
    ),
    "files": ("model_9.pt model_10.pt model_11.pt.tmp train.log", "model_10.pt"),
    "files without numbers": ("best.pt last.pt config.yaml", "last.pt"),
    "epochs after steps": ("step_1000.pt epoch_1.pt", "epoch_1.pt"),
    "half of the first": ("step-1/__0_0.distcp", None),
}


@pytest.mark.parametrize("name", TREES)
def test_what_is_chosen(tmp_path: Path, name: str) -> None:
    text, chosen = TREES[name]
    paths = []
    for number, item in enumerate(text.split()):
        path, is_tracker, content = item.partition("=")
        if not path.startswith("latest"):
            path, is_tracker, content = item, "", "x" * (number + 1)
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        times = (1_000_000 + number, 1_000_000 + number)
        for changed in (file, *file.parents):
            if changed.is_relative_to(tmp_path):
                os.utime(changed, times)
        if not is_tracker:
            paths.append(path)
    wanted = [
        p for p in paths if chosen is not None and (f"{p}/".startswith(f"{chosen}/") or not chosen)
    ]
    with storage_on(tmp_path) as storage:
        found = [info.path for info in newest_files(storage)]
        assert sorted(found) == sorted(wanted)
        # A file that describes the others comes first.
        kinds = [path.endswith((".json", ".metadata", "common.pt")) for path in found]
        assert kinds == sorted(kinds, reverse=True)
        assert read_newest(storage, 10**6) == sum((tmp_path / p).stat().st_size for p in wanted)


def test_series_of_steps() -> None:
    names = ["step_9", "step_10", "epoch=1-step=200.ckpt", "epoch=0-step=300.ckpt", "mp_rank_00"]
    assert step_series(names) == [
        ["epoch=0-step=300.ckpt", "epoch=1-step=200.ckpt"],
        ["step_10", "step_9"],
    ]


def test_no_more_than_the_budget_is_read(tmp_path: Path) -> None:
    with storage_on(tmp_path) as storage:
        driver = Driver(storage)
        for number in range(3):
            driver.write(f"model_{number}.pt", bytes(10 * UNIT))
        assert read_newest(storage, 3 * UNIT) <= 3 * UNIT
        assert storage.reader.fetched_bytes <= 4 * UNIT
        assert read_newest(storage, 3 * UNIT, lambda: True) == 0


@pytest.mark.needs("fuse")
def test_a_mount_reads_the_newest_step_before_anybody_asks(
    tmp_path: Path, mountpoint: Path
) -> None:
    url = (tmp_path / "stored").as_uri()
    half = tmp_path / "half"
    half.write_bytes(bytes(range(256)) * (3 * MIB // 256))
    with open_storage(settings_in(tmp_path), url, stripe_unit_bytes=MIB) as storage:
        for path in ("step-1/__0_0.distcp", "step-1/.metadata", "step-2/__0_0.distcp"):
            copy_in(storage, half, path)
    with checkpoints(tmp_path, mountpoint, url, read_newest=True, stripe_unit_bytes=MIB):
        fetched = 0
        while fetched < 6 * MIB:
            status = mount_status(settings_in(tmp_path).run_dir, mountpoint)
            fetched = status["statistics"]["fetched_bytes"]
        shell("cmp {m}/step-1/__0_0.distcp {h}; cmp {m}/step-1/.metadata {h}", m=mountpoint, h=half)
        status = mount_status(settings_in(tmp_path).run_dir, mountpoint)
        assert status["statistics"]["served_bytes"] == 6 * MIB
        assert status["statistics"]["fetched_bytes"] == fetched == 6 * MIB


def test_nothing_to_warm(tmp_path: Path) -> None:
    tmp_path.joinpath("empty").mkdir()
    storage = storage_on(tmp_path / "empty")
    assert list(newest_files(storage)) == []
    storage.close()
