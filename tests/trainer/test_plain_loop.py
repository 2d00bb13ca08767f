"""Training over slots has the bits of the plain loop: losses, tables, row state and dense weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.plain_loop import main, run_plain_loop
from rowcast.job.file import load_job
from rowcast.prefetcher.readers.reader import open_reader, schedule
from tests.support.full_capacity import assert_equal_to_plain_loop, make_job, random_start, table

CONCATENATED = {"kind": "tests.support.full_capacity:Concatenated"}
JOB_FILE = """
[job]
run_dir = "unused"
[data]
format = "synthetic"
batch_size = 8
eval_fraction = 0.5
[data.synthetic]
samples = 100
[tables_from]
cardinalities = [30, 5]
embedding_dim = 4
[model]
bottom_mlp = [4]
top_mlp = [1]
[optimizer]
sparse = { kind = "adagrad", lr = 0.1 }
dense = { kind = "adam", lr = 0.1 }
[cache]
capacity = "1MiB"
[trainer]
threads = 1
"""
pytestmark = pytest.mark.usefixtures("threads")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def test_a_fused_interaction_equals_the_plain_loop() -> None:
    tables = [table("a", 7, 8, ["a"]), table("b", 400, 8, ["b", "c"], "mean")]
    model = {"bottom_mlp": [6, 8], "top_mlp": [8, 1], "interaction": "fused"}
    assert_equal_to_plain_loop(make_job(tables, "adagrad", model), lengths=(0, 4))


# tables of a width, the look-ups of a bag, and what the job says beside them


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_feature_that_the_model_ignores_has_zero_gradients(optimizer: str) -> None:
    tables = [table("a", 7, 4, ["a"]), table("ignored", 40, 4, ["i"]), table("wide", 40, 6, ["j"])]
    model = {**CONCATENATED, "options": {"ignore": ["i", "j"]}}
    assert_equal_to_plain_loop(make_job(tables, optimizer, model), lengths=(0, 3))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_model_with_a_loss_of_its_own(optimizer: str) -> None:
    assert_equal_to_plain_loop(
        make_job([table("a", 7, 4, ["a"])], optimizer, {"kind": "tests.support.full_capacity:Regression"})
    )


def test_a_table_without_any_look_up_in_a_batch_is_left_alone() -> None:
    assert_equal_to_plain_loop(make_job([table("a", 7, 4, ["a"])], "adam"), lengths=(0, 0))


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_a_batch_of_realistic_size_equals_the_plain_loop() -> None:
    tables = [table(f"t{i}", rows, 16, [f"f{i}"]) for i, rows in enumerate((3, 50, 20_000))]
    assert_equal_to_plain_loop(make_job(tables, "adagrad"), size=2048)


def test_the_command_trains_a_job_file_and_writes_the_end_and_the_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, start_file, end_file, losses_file = (tmp_path / name for name in ("job.toml", "start", "end", "losses.f32"))
    config.write_text(JOB_FILE, encoding="utf-8")
    job = load_job(config)
    reader = open_reader(job)
    start = random_start(job, len(reader.dense_names))
    save_file(start, start_file)
    arguments = [
        "--config",
        config,
        "--start",
        start_file,
        "--out",
        end_file,
        "--max-steps",
        4,
        "--losses",
        losses_file,
    ]
    monkeypatch.setattr("sys.argv", ["plain_loop", *(str(argument) for argument in arguments)])
    main()
    losses, end = run_plain_loop(job, start, schedule(job, reader, 4))
    assert np.fromfile(losses_file, np.float32).tolist() == losses
    assert len(losses) == 4
    written = load_file(end_file)
    assert written.keys() == end.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in end.items())


@pytest.mark.parametrize(("parts", "of_job", "threads"), [(1, 1, 3), (4, 1, 1), (4, 4, 1)])
def test_the_program_computes_parts_with_the_threads_of_a_run(
    parts: int, of_job: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, start_file = tmp_path / "job.toml", tmp_path / "start.safetensors"
    config.write_text(JOB_FILE.replace("threads = 1", f'threads = "auto"\n[ranks]\nparts = {of_job}'))
    save_file({}, start_file)
    given = ["--config", config, "--start", start_file, "--out", tmp_path / "end", "--parts", parts]
    monkeypatch.setattr("sys.argv", ["plain_loop", *map(str, given)])
    monkeypatch.setattr("examples.plain_loop.usable_cores", lambda: 3)
    monkeypatch.setattr("examples.plain_loop.run_plain_loop", lambda *_: ([], {}))
    main()
    assert torch.get_num_threads() == threads


def test_no_batches_leave_the_start_as_it_is() -> None:
    start = random_start(make_job([table("a", 7, 4, ["a"])]))
    losses, end = run_plain_loop(make_job([table("a", 7, 4, ["a"])]), start, [])
    assert losses == []
    assert all(torch.equal(end[name], tensor) for name, tensor in start.items())
