"""`rowcast verify` says of every checkpoint whether it is whole, and what is damaged."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from rowcast.command_line.prefetcher import app
from rowcast.runtime.checkpoint_manifest import MANIFEST_NAME
from rowcast.runtime.errors import DataError
from tests.checkpoints.fake_run import FakeRun, small_job


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(small_job(tmp_path / "run"), keep=3)
    for row in range(3):
        run.train({0: list(range(row, 40)) if row == 0 else [row], 1: [row]}, steps=50)
        run.checkpoint()
    return run


def verify(run_dir: Path, *arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["verify", "--run", str(run_dir), *arguments])
    return result.exit_code, result.stdout.splitlines()


def test_whole_checkpoints_are_a_line_each_newest_first(run: FakeRun) -> None:
    code, lines = verify(run.job.run_dir)
    assert code == 0
    assert [line.split()[0] for line in lines] == [
        "checkpoint",
        "step-000000000150",
        "step-000000000100",
        "step-000000000050",
    ]
    assert [line.split()[-1] for line in lines[1:]] == ["whole"] * 3
    assert lines[1].split()[1:5] == ["149", "150", "1", "3"]


def test_a_damaged_file_damages_every_checkpoint_that_names_it_and_is_named(run: FakeRun) -> None:
    delta = run.checkpoints.load("step-000000000100").layers[1].files[0].file
    (run.checkpoints.root / delta).write_bytes(b"")
    code, lines = verify(run.job.run_dir)
    assert code == 4
    assert [line.split()[-1] for line in lines[1:4]] == ["damaged", "damaged", "whole"]
    assert sum(delta in line for line in lines[4:]) == 2


def test_a_damaged_manifest_is_a_line_too(run: FakeRun) -> None:
    path = run.checkpoints.root / "step-000000000150" / MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"epoch": 0', b'"epoch": 1'))
    code, lines = verify(run.job.run_dir)
    assert code == 4
    assert [line.split()[-1] for line in lines[1:4]] == ["damaged", "whole", "whole"]
    assert any(str(path) in line and "it was changed after it was written" in line for line in lines)


def test_one_checkpoint_can_be_chosen(run: FakeRun) -> None:
    (run.checkpoints.root / "step-000000000150" / MANIFEST_NAME).write_bytes(b"")
    code, lines = verify(run.job.run_dir, "--checkpoint", "step-000000000050")
    assert (code, len(lines)) == (0, 2)
    assert verify(run.job.run_dir, "--checkpoint", "step-000000000150")[0] == 4


@pytest.mark.parametrize("arguments", [[], ["--checkpoint", "step-000000000050"]])
def test_without_any_checkpoint_there_is_nothing_to_verify(arguments: list[str], tmp_path: Path) -> None:
    assert verify(tmp_path, *arguments)[0] == 2


def test_a_checkpoint_that_is_not_there_is_refused(run: FakeRun) -> None:
    assert verify(run.job.run_dir, "--checkpoint", "../checkpoints/step-000000000050")[0] == 2


def test_a_checkpoint_with_a_row_that_is_not_finite_is_not_whole_and_a_restart_takes_an_older_one(
    run: FakeRun,
) -> None:
    run.stores[0].rows[5] = np.full(run.groups[0].record_floats, np.nan, np.float32).tobytes()
    run.stores[0].changed.add(5)
    run.step += 50
    newest = run.checkpoint()
    code, lines = verify(run.job.run_dir)
    assert code == 4
    assert [line.split()[-1] for line in lines[1:4]] == ["damaged", "whole", "whole"]
    assert any("row 5 of table narrow_a: weight[0] is nan" in line for line in lines[4:])
    found = run.checkpoints.newest_valid()
    assert found is not None
    assert (found.step, newest.step) == (149, 199)


def test_a_manifest_without_a_job_is_a_sentence(run: FakeRun) -> None:
    manifest = replace(run.checkpoints.load("step-000000000150"), job={})
    with pytest.raises(DataError, match=r"manifest\.json: "):
        run.checkpoints.verify(manifest)
