"""`rowcast.load` and `rowcast.train`: what a run gives in Python has the bits of the commands."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import feather
from pyarrow import parquet as pq

import rowcast
from rowcast.deploy.score import score
from rowcast.job.section import Section, default_of, keys_of
from rowcast.job.training_identity import NOT_COUNTED, is_only_of_training
from rowcast.runtime.arrays import F32
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.process import Signals
from rowcast.trainer.report.report_json import read_report
from tests.support.data_files import CATS, INTS, click_log, write_tsv
from tests.support.facts import facts
from tests.support.jobs import job_content, table, write_job

ROOT = Path(__file__).parents[2]
NUM_ROWS = 301  # no whole number of batches


def clicks(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    tags = [rng.integers(0, 30, n).tolist() for n in rng.integers(0, 4, NUM_ROWS)]
    return pd.DataFrame(
        {
            "user": [None if number == 7 else f"u{number}" for number in rng.integers(0, 90, NUM_ROWS)],
            "price": rng.random(NUM_ROWS),
            "label": rng.integers(0, 2, NUM_ROWS),
            "item": rng.integers(0, 50, NUM_ROWS),
            "code": rng.integers(0, 10**9, NUM_ROWS),
            "tags": tags,
            "shares": [rng.random(len(own)).tolist() for own in tags],
            "buy": rng.integers(0, 2, NUM_ROWS),
            "stars": rng.integers(1, 6, NUM_ROWS),
            "time": [f"2024-0{number % 9 + 1}-0{number % 7 + 1} {number:02}:59:00+05:30" for number in range(24)] * 12
            + [None] * (NUM_ROWS - 288),
        }
    )


def as_text(frame: pd.DataFrame) -> pd.DataFrame:
    joined = {name: ["|".join(map(str, own)) for own in frame[name]] for name in ("tags", "shares")}
    return frame.assign(**joined)


def write(frame: pd.DataFrame, path: Path) -> None:
    if path.suffix == ".csv":
        as_text(frame).to_csv(path, index=False)
    elif path.suffix == ".tsv":
        write_tsv(frame, path)
    elif path.suffix == ".arrow":
        feather.write_feather(frame, str(path), compression="uncompressed")
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path)


COLUMNS: dict[str, Any] = {"dense": ["price"], "hash": ["user", "code"]}
WEIGHTED = {"lists": {"tags": "|"}, "weights": {"tags": "shares"}}
TABLES = [table("users", 60, 4, "user"), table("items", 50, 4, "item"), table("codes", 900, 4, "code")]
TABLES += [table("all_tags", 30, 4, "tags")]
WIDE = {"kind": "wide-deep", "bottom_mlp": None, "top_mlp": [1]}
OPTIONS = {"num_experts": 2, "expert_mlp": [6, 5], "tower_mlp": [3]}
MMOE = {"kind": "examples.mmoe:build", "options": OPTIONS, "bottom_mlp": None, "top_mlp": None}
KINDS: dict[str, dict[str, Any]] = {
    "csv": {
        "data": {"columns": COLUMNS | WEIGHTED | {"prepare": {"hour": {"of": "time", "clock": "hour"}}}},
        "tables": [own | {"linear": True} for own in [*TABLES, table("hours", 25, 4, "hour")]],
        "model": WIDE,
        "ranks": {"gradients": "bf16"},
    },
    "parquet": {
        "data": {"columns": COLUMNS | {"labels": ["label", "buy"]}},
        "tables": [own | {"dtype": "bf16", "pooling": "mean"} for own in TABLES],
        "model": MMOE,
        "ranks": {"parts": 4},
    },
    "jsonl": {
        "data": {
            "columns": {
                "label": "stars",
                "label_values": "real",
                "dense": ["price", "age"],
                "hash": ["user", "code"],
                "hash_by_value": True,
                "prepare": {
                    "stars": {"at_least": 4.0},
                    "price": {"log1p": True, "standardize": [0.4, 0.2]},
                    "age": {"of": "time", "clock": "days", "since": "2024-01-01", "fill": 0.0},
                    "item": {"buckets": [10.0, 20.0]},
                },
            }
        },
        "tables": [own | {"init": "normal:1"} for own in TABLES],
        "model": {"kind": "dlrm", "bottom_mlp": [4], "top_mlp": [1], "interaction": "fused"}
        | {"task": "regression", "target": [0.4, 0.3], "error": "huber"},
    },
    "tsv": {
        "tables": [table("late", 40, 4, "cat_3", "cat_0"), table("last", 7, 4, "cat_25")],
        "model": {"precision": "bf16"},
        "ranks": {"gradients": "bf16", "parts": 2},
    },
    "arrow": {
        "data": {
            "columns": {"dense": ["price"], "inputs": ["shares", "code"]},
            "of": {"shares": "tags"},
            "negatives": [{"feature": "drawn", "number": 5}],
        },
        "tables": [table("all_tags", 60, 4, "tags", "drawn", pooling="none")],
        "model": {"kind": "tests.support.array_models:tagged", "bottom_mlp": None, "top_mlp": None},
        "ranks": {"gradients": "bf16"},
    },
}
FORMATS = {"tsv": "criteo-tsv"}


class Trained:
    """A run of each kind, what it was trained on, and new samples with what `rowcast score` says of them."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, frame = folder, click_log if kind == "tsv" else clicks
        self.past, self.new = frame(seed=1), frame(seed=2)
        write(self.past, folder / f"clicks.{kind}")
        write(self.new, folder / f"new.{kind}")
        sections = {**KINDS[kind]}
        sections["data"] = {
            **sections.get("data", {}),
            "format": FORMATS.get(kind, kind),
            "path": str(folder / f"clicks.{kind}"),
            "eval_fraction": 0.2,
            "synthetic": None,
        }
        content = job_content(folder / "run", eval={"every": 3}, **sections)
        self.config = write_job(folder / "job.toml", content)
        self.run = rowcast.train(self.config)
        self.scores = self.scored(folder / f"new.{kind}")

    def scored(self, data: Path, *, probability: bool = False) -> F32:
        """As `rowcast score` does, in its two processes."""
        out = self.folder / f"scores{len(list(self.folder.glob('scores*')))}.parquet"
        score(self.folder / "run", data, out, probability=probability, config=self.config)(Signals())
        columns = [column.to_numpy() for column in pq.read_table(out).columns]
        return np.stack(columns, axis=1) if len(columns) > 1 else columns[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    known: dict[str, Trained] = {}

    def of(kind: str) -> Trained:
        if kind not in known:
            known[kind] = Trained(tmp_path_factory.mktemp(kind), kind)
        return known[kind]

    return of


def same(found: F32, expected: F32) -> bool:
    return found.dtype == np.float32 and found.shape == expected.shape and found.tobytes() == expected.tobytes()


FRAMES: dict[str, Callable[[pd.DataFrame], Any]] = {
    "pandas": lambda frame: frame,
    "table": lambda frame: pa.Table.from_pandas(frame),
    "batch": lambda frame: pa.RecordBatch.from_pandas(frame),
    "dict": lambda frame: {name: frame[name].tolist() for name in frame},
    "other order, no labels": lambda frame: frame[
        [name for name in reversed(frame.columns) if name not in ("label", "buy", "stars")]
    ],
    "text": as_text,
}


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prediction_has_the_bits_of_the_score_of_the_file(
    kind: str, frame: str, trained: Callable[[str], Trained]
) -> None:
    own = trained(kind)
    if frame == "text" and kind != "csv":
        pytest.skip("lists are text in CSV only")
    assert same(own.run.predict(FRAMES[frame](own.new)), own.scores)


# keys of the training identity that no kind sets, and why: another test has them, or no forward pass reads them
ELSEWHERE = {
    "data.hash": "of criteo-npy, whose frames tests/readers/test_ids_everywhere.py reads",
    "data.columns.hash": "which features are hashed decides with hash_by_value",
    "optimizer": "decides what is trained, not what is computed with it",
    "model.compile": "an evaluation is not compiled",
    "model.options": "of the model's own",
}


def test_every_key_of_the_training_identity_is_set_in_a_kind_that_is_scored_and_predicted(
    trained: Callable[[str], Trained],
) -> None:
    every, tried = set[str](), set[str]()
    for kind in KINDS:
        job = trained(kind).run.job
        for prefix, section in (
            *(("table.", own) for own in job.tables),
            ("model.", job.model),
            ("data.", job.data),
            ("ranks.", job.ranks),
        ):
            for key, is_set in keys_within(prefix, section):
                every.add(key)
                tried.update([key] if is_set else [])
    of_ranks = {"ranks.parts", "ranks.gradients"}
    left = {key for key in every - tried if not key.startswith(("ranks.", *ELSEWHERE)) or key in of_ranks}
    counted = {key for key in left if not {key, key.rpartition(".")[2]} & NOT_COUNTED}
    assert not {key for key in counted if not is_only_of_training(key)}
    assert {key for key in every if key.startswith("ranks.")} >= of_ranks


def keys_within(prefix: str, section: Section) -> Iterator[tuple[str, bool]]:
    """Each key, and whether it is away from its default."""
    for name, field in keys_of(type(section)).items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from keys_within(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value != default_of(field)


def test_a_frame_of_polars_is_one_too(trained: Callable[[str], Trained]) -> None:
    polars = pytest.importorskip("polars")
    for kind in ("csv", "parquet"):
        own = trained(kind)
        assert same(own.run.predict(polars.from_pandas(own.new)), own.scores)


def test_a_number_hashed_by_its_value_is_one_id_however_it_is_stored(trained: Callable[[str], Trained]) -> None:
    own = trained("jsonl")
    for stored in (float, str, "category"):
        assert same(own.run.predict(own.new.assign(code=own.new["code"].astype(stored))), own.scores)
    missing = own.new.assign(code=own.new["code"].where(own.new.index > 0))  # pandas makes floats of the others
    assert same(own.run.predict(missing)[1:], own.scores[1:])


def test_numbers_hashed_as_text_are_written_as_pandas_does(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    own = trained("csv")
    floats = own.new.assign(code=own.new["code"] + 0.5, user=own.new["item"] > 20)
    write(floats, tmp_path / "floats.csv")
    assert same(own.run.predict(floats), own.scored(tmp_path / "floats.csv"))


def test_a_file_whose_ids_have_another_type_is_not_scored(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    own = trained("parquet")
    write(own.new.assign(user=own.new["item"]), tmp_path / "days.parquet")
    with pytest.raises(DataError, match=facts("days.parquet", "clicks.parquet", "column user", "hash_by_value")):
        own.scored(tmp_path / "days.parquet")


def test_hashes_of_criteo_may_be_digits_or_numbers(trained: Callable[[str], Trained]) -> None:
    own = trained("tsv")
    digits = {name: [None if pd.isna(value) else f"{value:08x}" for value in own.new[name]] for name in CATS}
    assert same(own.run.predict(digits | {name: own.new[name] for name in INTS}), own.scores)


def test_probabilities_are_those_of_the_command(trained: Callable[[str], Trained]) -> None:
    own = trained("parquet")
    assert same(own.run.probabilities(own.new), own.scored(own.folder / "new.parquet", probability=True))


def test_nothing_of_the_process_changes(trained: Callable[[str], Trained]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(before[1] + 1)
    trained("csv").run.predict(trained("csv").new)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (before[1] + 1, before[2])
    torch.set_num_threads(before[1])


def test_losses_and_evaluations_are_those_of_the_report(trained: Callable[[str], Trained]) -> None:
    run = trained("csv").run
    report = read_report(run.folder / "report.json")
    assert same(run.losses, np.fromfile(run.folder / "losses.f32", np.float32))
    assert len(run.losses) == run.train_steps == report.train_steps == 4
    assert [own["train_step"] for own in run.evaluations] == [own.train_step for own in report.evaluations] == [3, 4]
    assert run.evaluations[-1]["auc"] == report.auc
    assert run.job.features == ["user", "item", "code", "tags", "hour"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_predicts_alone_and_can_be_saved(
    kind: str, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    own = trained(kind)
    model = own.run.model().eval()
    one_batch = 64 if kind == "arrow" else NUM_ROWS  # of which ids are drawn
    inputs, scores = own.run.inputs(own.new[:one_batch]), own.scores[:one_batch]
    with torch.no_grad():
        rtol = 1e-5 if own.run.job.model.precision == "fp32" else 1e-2
        np.testing.assert_allclose(model(*inputs).numpy(), scores, rtol=rtol, atol=1e-6)
        torch.save(model, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
        assert torch.equal(again(*inputs), model(*inputs))
    tables = {name: tuple(own.shape) for name, own in model.named_parameters() if name.startswith("table_")}
    assert tables[next(iter(tables))] == {"csv": (60, 5), "tsv": (40, 4)}.get(kind, (60, 4))
    model(*inputs).sum().backward()
    assert all(own.grad is not None for own in model.parameters())


REFUSED = [
    ("csv", lambda own: own.drop(columns="item"), ConfigError, facts("feature item", "the frame", "price")),
    ("csv", lambda own: own.assign(item="abc"), DataError, facts("the frame", "column item", "abc")),
    ("parquet", lambda own: own.assign(item="abc"), DataError, facts("the frame", "column item", "integers")),
    (
        "parquet",
        lambda own: own.assign(code=own["code"].astype(str)),
        DataError,
        facts("the frame", "column code", "text", "clicks.parquet", "integers", "hash_by_value"),
    ),
    ("parquet", lambda own: own.assign(item=99), DataError, facts("the frame, row 0", "column item", "99", "50")),
    ("csv", lambda own: own.assign(price=np.nan), DataError, facts("the frame, row 0", "column price", "finite")),
    ("csv", lambda own: own.assign(price=pd.Timestamp("2024-01-01")), DataError, facts("column price", "numbers")),
    ("csv", lambda own: own.assign(user=pd.Timestamp("2024-01-01")), DataError, facts("column user", "text")),
    ("csv", lambda own: own.assign(user=[1, "a", *[None] * (NUM_ROWS - 2)]), DataError, facts("user", "type")),
    ("csv", lambda own: own.to_numpy(), DataError, facts("ndarray", "pandas", "dict")),
    ("tsv", lambda own: own.assign(cat_0="xyz"), DataError, facts("column cat_0", "8 digits")),
]


@pytest.mark.parametrize(("kind", "wrong", "error", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_a_wrong_frame_is_refused_with_one_sentence(
    kind: str,
    wrong: Callable[[pd.DataFrame], Any],
    error: type[Exception],
    sentence: str,
    trained: Callable[[str], Trained],
) -> None:
    own = trained(kind)
    with pytest.raises(error, match=sentence):
        own.run.predict(wrong(own.new))


def test_an_empty_frame_has_no_predictions(trained: Callable[[str], Trained]) -> None:
    assert trained("csv").run.predict(trained("csv").new[:0]).shape == (0,)
    assert trained("parquet").run.predict(trained("parquet").new[:0]).shape == (0, 2)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=facts(str(tmp_path), "no checkpoint")):
        rowcast.load(tmp_path)


def test_settings_are_keys_of_the_job_and_make_another_run(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    own = trained("csv")
    settings = {"optimizer.sparse.lr": 0.05, "job.run_dir": str(tmp_path / "other")}
    other = rowcast.train(own.run.job, **settings)
    assert (other.folder, other.job.optimizer.sparse.lr) == (tmp_path / "other", 0.05)
    assert other.losses[0] == own.run.losses[0]
    assert other.losses[-1] != own.run.losses[-1]
    with pytest.raises(ConfigError, match=facts("optimizer.sparse", "rate")):
        rowcast.train(own.config, **{"optimizer.sparse.rate": 0.05})
    with pytest.raises(ConfigError, match=facts("finished after 4 train steps", "--fresh", "raise data.epochs")):
        rowcast.train(own.config)
    changed = facts("optimizer.sparse.lr is 0.05, and was 0.1", "--set job.run_dir", "--fresh")
    with pytest.raises(ConfigError, match=changed):
        rowcast.train(own.config, **{"optimizer.sparse.lr": 0.05})


def test_the_error_of_a_child_is_the_packages_own(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    bad = as_text(trained("csv").new).assign(item="abc")
    bad.to_csv(tmp_path / "bad.csv", index=False)
    with pytest.raises(DataError, match=facts("bad.csv", "column item", "abc")):
        rowcast.train(trained("csv").config, **{"data.path": str(tmp_path / "bad.csv"), "job.run_dir": str(tmp_path)})


def test_an_interrupt_stops_both_processes_in_order(tmp_path: Path) -> None:
    config = write_job(tmp_path / "job.toml", job_content(tmp_path / "run"))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    timer = threading.Thread(target=interrupt_when, args=(tmp_path / "run" / "losses.f32",))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        rowcast.train(config)
    timer.join()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    run = rowcast.load(tmp_path / "run")
    assert len(run.losses) == run.train_steps > 0
    assert not list(Path("/dev/shm").glob(f"rowcast-*-{os.getpid()}-*"))


def interrupt_when(path: Path) -> None:
    """Once it has content."""
    while not (path.exists() and path.stat().st_size):
        threading.Event().wait(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def test_every_command_tells_its_version() -> None:
    for command in ("rowcast", "rowcast.prefetcher", "rowcast.trainer"):
        told = subprocess.run([sys.executable, "-m", command, "--version"], capture_output=True, text=True, check=True)
        assert told.stdout == f"rowcast {rowcast.__version__}\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_is_evaluated_as_the_rows_that_the_run_held_out(kind: str, trained: Callable[[str], Trained]) -> None:
    run, frame = trained(kind).run, trained(kind).past
    last = run.evaluations[-1]
    assert run.evaluate(frame[-int(0.2 * len(frame)) :]) == last | {"train_step": run.train_steps}


def test_a_frame_without_labels_or_rows_is_not_evaluated(trained: Callable[[str], Trained]) -> None:
    run, new = trained("csv").run, trained("csv").new
    with pytest.raises(ConfigError, match=r"data\.columns\.label: the frame has no column label"):
        run.evaluate(new.drop(columns="label"))
    with pytest.raises(ConfigError, match="the frame has no row"):
        run.evaluate(new[:0])
