"""The examples of docs/checkpoints.md run."""

from pathlib import Path

from tests.fuse.formats.host import TorchHost


def test_the_guides_programs_run(torch_host: TorchHost, tmp_path: Path) -> None:
    (count,) = torch_host.check("guide_programs:run_all", tmp_path)
    assert count >= 5
