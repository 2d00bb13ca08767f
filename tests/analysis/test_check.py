"""`rowcast check`: every finding is provoked, with what it says to change."""

import io
import json
import math
import os
import re
import resource
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rowcast.analysis.check import data as check_data
from rowcast.analysis.check import machine
from rowcast.analysis.check import memory as check_memory
from rowcast.analysis.check.check import check_file, print_findings
from rowcast.analysis.check.data import Seen
from rowcast.analysis.check.machine import Device, ask_trainer
from rowcast.analysis.show import Finding, about, findings_of, ok, warning
from rowcast.command_line.prefetcher import app
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.job.stores import PASSWORD, StoreWithTier
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.planner.group_planner import planner_bytes
from rowcast.prefetcher.planner.planner import WHILE_FILLING
from rowcast.prefetcher.run.make_keys import make_keys
from rowcast.protocol.batch import Batch
from rowcast.runtime.checkpoint_manifest import Position
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import Machine
from rowcast.runtime.run_directory import RunDirectory
from rowcast.runtime.telemetry.format_numbers import human_bytes
from tests.support.facts import facts
from tests.support.jobs import job_content, table, write_job
from tests.support.redis_server import BOUND, RedisServer, keys_on, needs_redis

ROOT = Path(__file__).parents[2]
TIERED = {"kind": "tiered", "memory": "2000 rows"}
CPU = Device(name="cpu", dense_bytes=256)
GPU = Device(name="cuda:0 (a device of 1 MiB)", free_bytes=2**20, dense_bytes=256)


class Checked:
    """A job file in a folder of its own, and what checking it finds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"

    def content(self, **sections: Any) -> dict[str, Any]:
        data = {"format": "synthetic", "batch_size": 64, "synthetic": {"samples": 5000}}
        return job_content(self.run_dir, **({"data": data} | sections))

    def job(self, **sections: Any) -> Job:
        return parse_job(self.content(**sections))

    def __call__(self, *, whole: bool = False, on: Device = CPU, **sections: Any) -> list[Finding]:
        config = write_job(self.folder / "job.toml", self.content(**sections))
        return list(check_file(config, (), whole=whole, ask=lambda job, num_dense: on))


@pytest.fixture
def check(tmp_path: Path) -> Checked:
    return Checked(tmp_path)


def one(findings: list[Finding], level: str, subject: str) -> str:
    """The sentence of the only such finding, which is one line."""
    found = [finding.sentence for finding in findings if (finding.level, finding.subject) == (level, subject)]
    assert len(found) == 1, findings
    assert "\n" not in found[0]
    return found[0]


def only_fault(findings: list[Finding], level: str, subject: str) -> str:
    """As `one`, where nothing else is wrong."""
    assert [finding.subject for finding in findings if finding.level != "ok"] == [subject]
    return one(findings, level, subject)


def test_a_good_job_is_ok_in_every_respect(check: Checked) -> None:
    findings = check()
    assert {finding.level for finding in findings} == {"ok"}
    subjects = [finding.subject for finding in findings]
    assert subjects[:7] == ["job file", "imports", "versions", "run directory", "ports", "ports", "threads"]
    assert subjects[7:] == [
        "data",
        "ids",
        "labels",
        "capacity",
        "shared memory",
        "device",
        "model",
        "pinning",
        "memory",
        "disk",
    ]
    assert "5,000 samples for training" in one(findings, "ok", "data")
    assert not check.run_dir.exists(), "a check leaves nothing behind"


def test_a_job_file_that_cannot_be_read_is_the_only_finding(check: Checked) -> None:
    (finding,) = check(lookahead={"depth": 0})
    assert (finding.level, finding.subject) == ("error", "job file")
    assert "depth = 0 must be a whole number from 1 to 64" in finding.sentence


# data


def test_data_that_does_not_open_is_an_error_and_the_other_checks_go_on(check: Checked) -> None:
    findings = check(data={"format": "criteo-tsv", "path": str(check.folder / "nowhere.tsv")})
    assert "no such file, folder or glob" in only_fault(findings, "error", "data")
    assert {"ports", "memory", "device"} <= {finding.subject for finding in findings if finding.level == "ok"}
    assert "capacity" not in {finding.subject for finding in findings}


def with_ids(check: Checked, other: int, policy: str = "error", row: int = 19_000) -> dict[str, Any]:
    """A day of 20,000 rows whose ids are 1, but for one, far behind the first batches unless said otherwise."""
    sparse = np.ones((20_000, 26), np.int64)
    sparse[row, 1] = other
    labels = np.arange(20_000) % 2
    for part, array in (("dense", np.zeros((20_000, 2), np.float32)), ("sparse", sparse), ("labels", labels)):
        np.save(check.folder / f"day_0_{part}.npy", array)
    return {"format": "criteo-npy", "path": str(check.folder), "batch_size": 10, "on_invalid_id": policy}


def test_a_sample_reads_a_part_and_says_so(check: Checked) -> None:
    findings = check(data=with_ids(check, 5))
    assert one(findings, "ok", "ids") == "the 2,000 look-ups of 1,000 samples are inside their tables"
    assert one(check(whole=True, data=with_ids(check, 5)), "ok", "ids").startswith(
        "the 40,000 look-ups of all 20,000 samples"
    )


def with_columns(check: Checked, **columns: Any) -> dict[str, Any]:
    rest = {"label": np.arange(200) % 2, "cat_1": np.ones(200, np.int64)}
    pq.write_table(pa.table(rest | columns), check.folder / "data.parquet")
    return {"format": "parquet", "path": str(check.folder / "data.parquet"), "synthetic": None, "batch_size": 10}


def new_folder(folder: Path) -> Path:
    (folder / "arriving").mkdir()
    return folder / "arriving"


def factory(name: str, **options: Any) -> dict[str, Any]:
    return {"format": f"tests.analysis.test_check:{name}", "options": options}


def made(labels: Sequence[Any], num_batches: int = 6) -> list[Batch]:
    """Batches of one sample a label; every look-up is of another row."""
    size = len(labels)
    return [
        Batch(
            dense=np.zeros((size, 1), np.float32),
            labels=np.array(labels, np.float32),
            ids=(np.arange(2 * size) + i * 2 * size) % 2000,
        )
        for i in range(num_batches)
    ]


def labelled(job: Job, labels: list[float]) -> list[Batch]:
    return made(labels)


def several(job: Job, values: list[float]) -> list[Batch]:
    """Labels [2, 3]: values, always 0, unknown."""
    return made([[value, 0, math.nan] for value in values])


def nothing_to_train(job: Job) -> Any:
    class Nothing:
        num_dense = 1

        def num_samples(self, split: str) -> int:
            return 0

        def batches(self, split: str, epoch: int, start: int) -> list[Batch]:
            return []

    return Nothing()


def once(job: Job) -> Iterator[Batch]:
    return iter(made([0, 1]))


def broken(job: Job) -> list[Batch]:
    raise FileNotFoundError("no such bucket")


def growing(job: Job) -> list[Batch]:
    """The last batch of 40 touches as many rows as all others have slots for."""
    return [*made([0, 1], 40), *made([0, 1] * 60, 1)]


@pytest.mark.parametrize(
    ("label_values", "values", "level", "sentence"),
    [
        ("binary", [0, 1], "ok", "click: 50.0 % of 12 are positive"),
        ("real", [-2, 7.5], "ok", "click: 12 labels go from -2 to 7.5"),
        ("real", [4, 4], "warning", "click: every label of 12 samples is 4, so there is nothing to learn"),
    ],
)
def test_each_of_several_labels_is_looked_at(
    check: Checked, label_values: str, values: list[float], level: str, sentence: str
) -> None:
    columns = {"columns": {"labels": ["click", "buy", "stay"], "label_values": label_values}}
    found = check(whole=True, data=factory("several", values=values) | columns, model={"kind": "examples.mmoe:build"})
    of_labels = [(finding.level, finding.sentence) for finding in found if finding.subject == "labels"]
    assert [own for own, _ in of_labels] == [level, "warning", "warning"]
    assert of_labels[0][1].startswith(sentence)
    assert of_labels[1][1].startswith("buy: every label of 12 samples is 0")
    assert of_labels[2][1].startswith("stay: no label is known")


def test_a_factory_that_returns_an_iterator_is_asked_anew_for_every_pass(check: Checked) -> None:
    findings = check(whole=True, data=factory("once"))
    assert {finding.level for finding in findings} == {"ok"}
    assert one(findings, "ok", "ids").startswith("the 24 look-ups of all 12 samples")
    assert "an unknown number of samples for training" in one(findings, "ok", "data")


def test_what_a_factory_raises_is_a_finding_and_the_other_checks_go_on(
    check: Checked, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = check(data=factory("broken"))
    assert "unexpected error: FileNotFoundError: no such bucket; the log has" in only_fault(findings, "error", "data")
    assert findings[-1].subject == "disk"
    assert "Traceback" in "".join(capsys.readouterr())


# capacity


def test_a_capacity_that_just_holds_the_largest_batch_is_a_warning(check: Checked) -> None:
    sentence = only_fault(
        check(whole=True, data=factory("growing"), cache={"capacity": "250 rows"}), "warning", "capacity"
    )
    assert "touches 240 rows" in sentence
    assert "an unread one may not fit" in sentence
    assert {
        finding.level for finding in check(whole=True, data=factory("growing"), cache={"capacity": "270 rows"})
    } == {"ok"}


def criteo_file(check: Checked) -> dict[str, Any]:
    (check.folder / "a.tsv").write_text("\t".join(["1", *["2"] * 13, *["0000000a"] * 26]) + "\n")
    return {"format": "criteo-tsv", "path": str(check.folder / "a.tsv")}


def null_ids(check: Checked, **more: Any) -> dict[str, Any]:
    return with_columns(check, int_0=np.zeros(200), cat_0=pa.array([1, None] * 100)) | more


def finished_run(check: Checked) -> dict[str, Any]:
    check.run_dir.mkdir()
    (check.run_dir / "report.json").write_text("{}")
    return {}


def damaged_run(check: Checked) -> dict[str, Any]:
    folder = check.run_dir / "checkpoints" / "step-000000000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return {}


MANY_ROWS = [{"name": "t", "num_embeddings": 10**9, "embedding_dim": 4, "features": ["cat_0", "cat_1"]}]
OTHER_TABLE = [{"name": "t", "num_embeddings": 9, "embedding_dim": 4, "features": ["cat_26"]}]
HUGE_TABLE = [{"name": "t", "num_embeddings": 2**46, "embedding_dim": 4, "features": ["cat_0"]}]
SMALL_GROUP = {"capacity": "900 rows", "groups": {"fp32_d4_adagrad": "100 rows"}}
REPLACED = "ids of all 20,000 samples, which are missing or outside their tables"
OUTSIDE = "column cat_1: id 2000 is outside table t (num_embeddings = 2000)"
Sections = dict[str, Any] | Callable[[Checked], dict[str, Any]]
ERRORS: list[tuple[str, Sections, str]] = [  # subject, the job's sections, words of the only such sentence
    ("data", {"data": factory("nothing_to_train")}, "leaves no sample for training"),
    ("data", lambda c: {"data": criteo_file(c), "tables": OTHER_TABLE}, "table t: feature cat_26 is not in Criteo TSV"),
    *(("data", lambda c, n=n: {"data": with_ids(c, 2000, row=n)}, f"row {n}, {OUTSIDE}") for n in (0, 25, 19_000)),
    ("data", lambda c: {"data": null_ids(c)}, "row 1, column cat_0: the id is missing; give missing ones"),
    (
        "data",
        lambda c: {"data": with_columns(c, price=np.zeros(200), cat_0=[1] * 200)},
        'data.columns.dense = ["price"]',
    ),
    ("labels", {"data": factory("labelled", labels=[0, 1, -1])}, "a label is -1; binary cross entropy needs labels"),
    ("start", {"cache": {"capacity": "20 rows"}}, 'capacity = "20 rows" is too small: a batch among the first 32'),
    (
        "capacity",
        {"data": factory("growing"), "cache": {"capacity": "100 rows"}},
        "touches 240 rows, and group fp32_d4",
    ),
    (
        "capacity",
        {"data": factory("growing"), "cache": {"capacity": "100 rows"}},
        'cache.capacity = "264 rows" or more',
    ),
    (
        "capacity",
        {"data": factory("growing"), "cache": SMALL_GROUP},
        'cache.groups.fp32_d4_adagrad = "264 rows" or more',
    ),
    ("run directory", damaged_run, "none of 1 checkpoints is whole"),
    ("device", {"model": {"precision": "tf32"}}, 'model.precision = "tf32" needs a CUDA device, and this is'),
    ("start", {"store": TIERED | {"memory": "300 rows"}, "cache": {"capacity": "400 rows"}}, "or lower cache.capacity"),
    ("start", {"store": {"kind": "tiered", "memory": "100MiB"}}, "the process 320 MiB"),
    ("store", {"store": TIERED | {"disk": "100KiB"}}, "need at least 256 KiB; raise store.disk"),
    (
        "data",
        lambda c: {"data": with_columns(c, cat_0=[1] * 200) | {"follow": True, "eval_fraction": 0.0}},
        "data.follow needs a folder",
    ),
    (
        "data",
        lambda c: {
            "data": with_columns(c, cat_0=[1] * 200)
            | {"follow": True, "eval_fraction": 0.0, "path": str(new_folder(c.folder))}
        },
        "holds no file yet",
    ),
]
WARNINGS: list[tuple[str, Sections, str]] = [
    ("ids", lambda c: {"data": with_ids(c, 2000, "modulo")}, f"data.on_invalid_id = 'modulo' replaced 1 {REPLACED}"),
    ("ids", lambda c: {"data": null_ids(c, on_invalid_id="zero")}, "= 'zero' replaced 100 ids of all 200 samples"),
    ("labels", {"data": factory("labelled", labels=[0, 0])}, "every label of 12 samples is 0"),
    ("labels", {"data": factory("labelled", labels=[1, 1])}, "every label of 12 samples is 1"),
    ("run directory", finished_run, "holds the report of an earlier run; add --fresh to replace it"),
    ("store", {"tables": MANY_ROWS, "store": TIERED | {"disk": "300KiB"}}, "may train 10,000 rows of group"),
    (
        "memory",
        {"data": factory("narrow"), "tables": HUGE_TABLE},
        "up to 2880 TiB for tables as their rows are trained",
    ),
]
FAULTS = [("error", *own) for own in ERRORS] + [("warning", *own) for own in WARNINGS]


@pytest.mark.parametrize(("level", "subject", "sections", "words"), FAULTS, ids=range(len(FAULTS)))
def test_each_fault_is_one_finding(level: str, subject: str, sections: Sections, words: str, check: Checked) -> None:
    findings = check(whole=True, **(sections(check) if callable(sections) else sections))
    assert words in one(findings, level, subject)
    assert {finding.subject for finding in findings if finding.level == "error"} <= {subject}


# versions


class Installed:
    """Distributions as importlib.metadata would find them."""

    def __init__(self, requires: list[str], python: str = "<3.14,>=3.11", **versions: str) -> None:
        self.requires, self.version, self.metadata = requires, "0.1.0", {"Requires-Python": python}
        self._versions = versions

    def __call__(self, name: str) -> Any:
        if name == "rowcast":
            return self
        if name not in self._versions:
            raise metadata.PackageNotFoundError(name)
        return type("Distribution", (), {"version": self._versions[name]})


def test_versions_are_those_installed(check: Checked) -> None:
    sentence = one(check(), "ok", "versions")
    for name in ("torch", "numpy", "numba", "pyarrow", "pyzmq"):
        assert f"{name} {metadata.version(name)}" in sentence
    assert f"python {sys.version_info.major}.{sys.version_info.minor}" in sentence


def test_a_package_that_is_too_old_or_missing_is_an_error_with_what_to_install() -> None:
    requires = ["torch>=2.11", "numpy<3,>=1.26", "pyzmq>=26", 'pytest>=8; extra == "dev"']
    good = Installed(requires, torch="2.13.0+cpu", numpy="2.4", pyzmq="26")
    assert [finding.level for finding in machine.check_versions(good)] == ["ok"]
    old = list(machine.check_versions(Installed(requires, torch="2.9.1", numpy="1.25.9")))
    assert [finding.level for finding in old] == ["error"] * 3
    assert [finding.sentence for finding in old] == [
        "torch 2.9.1 is older than 2.11; install 'torch>=2.11'",
        "numpy 1.25.9 is older than 1.26; install 'numpy>=1.26'",
        "pyzmq is not installed; run `pip install 'pyzmq>=26'`",
    ]
    (python,) = machine.check_versions(Installed([], python=">=4.1"))
    assert "is older than 4.1" in python.sentence


def test_a_version_that_was_never_tried_is_said_and_is_no_fault() -> None:
    def sentence(**versions: str) -> str:
        (finding,) = machine.check_versions(Installed(["torch>=2.11"], **versions))
        assert finding.level == "ok"
        return finding.sentence

    assert "tried" not in sentence(torch="2.11.0+cu130", triton="3.6.0")
    assert "triton 3.6.0" in sentence(torch="2.11.0+cu130", triton="3.6.0")
    assert sentence(torch="2.99.1").endswith("torch 2.99.1; torch 2.99.1 was not tried (2.11, 2.13, 2.15 were)")
    assert sentence(torch="2.11.0", triton="3.99").endswith("; triton 3.99 was not tried (3.6, 3.7, 3.9 were)")


def test_the_bounds_of_the_project_are_the_ends_of_what_was_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, newest = machine.TRIED["python"][0], machine.TRIED["python"][-1]
    first, _, minor = newest.partition(".")
    assert project["requires-python"] == f">={oldest},<{first}.{int(minor) + 1}"
    assert f"torch>={machine.TRIED['torch'][0]}" in project["dependencies"]


def test_the_readme_names_the_versions_that_were_tried() -> None:
    (line,) = re.findall(r"^\| tested with .*?\n\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"\d+\.\d+", line)) == {version for tried in machine.TRIED.values() for version in tried}


def test_source_that_is_not_installed_is_a_warning() -> None:
    def nothing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    (finding,) = machine.check_versions(nothing)
    assert finding.level == "warning"
    assert "rowcast is not installed" in finding.sentence


# run directory


def test_looking_at_a_lock_does_not_take_it(check: Checked) -> None:
    with RunDirectory(check.run_dir, "prefetcher"):
        assert f"process id {os.getpid()}" in only_fault(check(), "error", "run directory")
    check()
    with RunDirectory(check.run_dir, "prefetcher"):
        assert (check.run_dir / "prefetcher.lock").exists()


@pytest.mark.parametrize(
    ("sections", "level", "named"),
    [
        ({"trainer": {"threads": 3}}, "ok", (3,)),
        ({"trainer": {"threads": None}, "ranks": {"parts": 2}}, "ok", (1,)),
    ],
)
def test_the_number_of_threads_is_found(
    sections: dict[str, Any], level: str, named: tuple[int, ...], check: Checked
) -> None:
    assert re.search(facts(*named), one(check(**sections), level, "threads"))


def test_another_number_of_threads_than_the_run_has_is_an_error(
    check: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = SimpleNamespace(machine=Machine(threads=2))
    monkeypatch.setattr(machine, "newest_checkpoint", lambda run_dir: run_dir)
    monkeypatch.setattr(machine, "readable", lambda folder: manifest)
    assert "2 threads, as the run" in one(check(trainer={"threads": None}), "ok", "threads")
    found = only_fault(check(trainer={"threads": 3}), "error", "threads")
    assert re.search(facts("trainer.threads", 3, 2, "--fresh"), found)


def test_a_run_directory_that_cannot_be_made_is_an_error(check: Checked) -> None:
    check.run_dir.write_text("a file")
    findings = check(job={"run_dir": str(check.run_dir / "deeper")})
    assert "cannot be made or written" in one(findings, "error", "run directory")


# ports


def test_a_port_in_use_is_an_error(check: Checked) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        findings = check(metrics={"trainer": address})
        assert f"[metrics] trainer = '{address}': the port is in use" in only_fault(findings, "error", "ports")
    assert {finding.level for finding in check(metrics={"trainer": address})} == {"ok"}


def test_one_port_for_both_processes_is_an_error(check: Checked) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert "trainer" in only_fault(check(metrics={"prefetcher": address, "trainer": address}), "error", "ports")


# device, rings, memory


def test_a_device_without_room_for_rows_and_staging_is_an_error(check: Checked) -> None:
    sentence = one(check(on=GPU), "error", "device")
    assert sentence.startswith(
        "cuda:0 (a device of 1 MiB) has 1 MiB free, too little for rows (16 KiB) and staging (0.9998 MiB)"
    )
    assert sentence.endswith("lower cache.capacity or data.batch_size")
    assert one(check(on=Device(name="cuda:0", free_bytes=2**33)), "ok", "device").startswith(
        "cuda:0, 8 GiB free for rows"
    )


def test_the_trainers_own_choice_of_a_device_is_asked_for(check: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": answered_here}))
    answer = ask_trainer(check.job(trainer={"device": "warp"}), None)
    assert answer.refusal == "trainer.device = 'warp' is not a device that torch knows; use auto, cpu or cuda"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("import sys; sys.exit('torch is broken')",), "(torch is broken); repair torch first"),
        (("print('no json')",), "repair torch first"),
        (("print('{\"colour\": 1}')",), "repair torch first"),
        (("import time; time.sleep(60)",), "torch did not say within 0.5 s"),
    ],
)
def test_a_process_that_cannot_answer_is_a_refusal(
    command: tuple[str, ...], sentence: str, check: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "TIMEOUT_S", 0.5 if "sleep" in command[0] else 30.0)
    refusal = ask_trainer(check.job(), 13, (sys.executable, "-c", *command)).refusal
    assert refusal is not None
    assert sentence in refusal
    assert "\n" not in refusal


def test_rings_that_do_not_fit_into_shared_memory_are_an_error(check: Checked) -> None:
    findings = check(transport={"ring": "1TiB"})
    assert "two rings of 1099511627776 bytes need" in one(findings, "error", "shared memory")


def test_a_memlock_limit_below_the_rings_is_a_warning_on_cuda_alone(
    check: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    (check.folder / "proc/self").mkdir(parents=True)

    def found(answer: Device, capabilities: int) -> Finding:
        (check.folder / "proc/self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
        (finding,) = machine.check_memlock(answer, 2**20, check.folder)
        return finding

    limited = found(Device(name="cuda:0", free_bytes=2**33), 0)
    assert limited.level == "warning"
    assert "the memlock limit is 64 KiB and two rings take 2 MiB" in limited.sentence
    assert "raise `ulimit -l` to 2048" in limited.sentence
    assert found(CPU, 0) == ok("not needed: no copies to a CUDA device")
    assert found(Device(name="cuda:0", free_bytes=2**33), 1 << 14).level == "ok"


def seen_of(job: Job) -> Seen:
    seen = Seen(groups=group_specs(job))
    list(check_data.check_opens(job, seen))
    list(check_data.check_samples(job, seen, check_data.ALL))
    return seen


def test_tables_with_more_rows_than_an_index_numbers_are_told_with_the_number(check: Checked) -> None:
    tables = [table("t", 2**48, 4, "cat_0", "cat_1"), *(table(f"t{i}", 2**48, 4) for i in range(25))]
    for store in ({}, {"kind": "tiered", "memory": "1GiB"}):
        job = check.job(tables=tables, store=store)
        unknown = Seen(groups=group_specs(job), count=2)
        (finding,) = check_memory.check_row_numbers(job, unknown)
        assert finding.level == "warning"
        assert (
            f"train {13 * 2**48:,} rows of group fp32_d4_adagrad of each rank, but an index of its " in finding.sentence
        )
        assert "holds at most 8,388,607; lower num_embeddings of its tables" in finding.sentence
    sentence = one(check(tables=tables[:1]), "ok", "tables")
    assert sentence.endswith("; an index of its 281,474,976,710,656 rows holds at most 268,435,455")


def test_memory_is_what_both_processes_hold_and_tables_grow_to(check: Checked) -> None:
    job = check.job(lookahead={"horizon": 8, "depth": 2})
    seen = seen_of(job)
    batch = 64 * (13 * 4 + 4 + 2 * 8)
    assert seen.largest_batch_bytes == batch
    assert check_memory.ahead_bytes(job, seen) == (8 + 8) * 2 * batch
    assert check_memory.trained_rows(seen.groups[0], seen) == 2000
    assert check_memory.likely_horizon(job, seen, (300,)) == 8
    planner = check_memory.planning_bytes(job, seen, (300,))
    assert planner == planner_bytes(300, 9 * seen.largest_rows[0], 1)
    written_over = 2000 * 32  # all rows, during a checkpoint
    fixed = (8 + 8) * 2 * batch + planner + 2 * 2**20 + 5000 + 2 * 4 * 64 + written_over
    tables = 2000 * 32 + 2000 * 4
    for free, level in (
        (fixed + tables, "ok"),
        (fixed + tables - 1, "warning"),
        (fixed, "warning"),
        (fixed - 1, "error"),
    ):
        (finding,) = check_memory.check_memory(job, seen, (300,), free, 2**20, 5000, 256)
        assert finding.level == level
        assert f"the planner {human_bytes(planner)}" in finding.sentence


@pytest.mark.parametrize(("dim", "record_bytes", "stored"), [(4, 16, 16), (128, 528, 576)])
def test_memory_counts_the_trained_rows_of_tables_beyond_memory_and_their_directory(
    check: Checked, dim: int, record_bytes: int, stored: int
) -> None:
    table = {"name": "t", "num_embeddings": 10**12, "embedding_dim": dim, "features": ["cat_0"]}
    kind = "sgd" if dim == 4 else "rowwise_adagrad"
    model = {"kind": "dlrm", "bottom_mlp": [dim], "top_mlp": [1]}
    job = check.job(tables=[table], model=model, optimizer={"sparse": {"kind": kind, "lr": 0.1}})
    [group] = group_specs(job)
    assert group.record_bytes == record_bytes
    assert check_memory.table_bytes(job, group, 1000) == 1000 * (stored + 12 + 1)


def test_memory_counts_a_horizon_that_grows_while_slots_fill_but_not_beyond_its_bytes_and_the_run(
    check: Checked,
) -> None:
    def horizon(num_slots: int, **lookahead: Any) -> int:
        job = check.job(
            lookahead={"horizon": "auto", "depth": 2, **lookahead}, data={"synthetic": {"samples": 64 * 500}}
        )
        return check_memory.likely_horizon(job, seen_of(job), (num_slots,))

    assert horizon(2000) == 2, "every row has a slot"
    half = horizon(1000)
    assert 2 + WHILE_FILLING * 2 <= half < horizon(1900) < 500
    assert 2 < horizon(1900, id_bytes="60KB") < half
    assert check_memory.likely_horizon(check.job(cache={"policy": "lru"}), seen_of(check.job()), (1000,)) == 0


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("dlrm", 4 * ((13 + 1) * 4 + (4 + 3 + 1) * 1)),
        ("nowhere.net:build", "No module named 'nowhere"),
        ("tests.analysis.test_check:no_model", "the factory must return a torch.nn.Module"),
        ("tests.analysis.test_check:broken_model", "cannot be built: ZeroDivisionError"),
    ],
)
def test_the_trainer_builds_the_model_that_its_run_builds(
    kind: str, found: int | str, check: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(found, str):  # one case has a process of its own
        monkeypatch.setattr(machine, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": answered_here}))
    model = {"kind": kind} if ":" in kind else {"kind": kind, "bottom_mlp": [4], "top_mlp": [1]}
    answer = ask_trainer(check.job(model=model, trainer={"device": "cpu"}), 13)
    assert answer.name == "cpu"
    if isinstance(found, int):
        assert (answer.dense_bytes, answer.model_refusal) == (found, None)
    else:
        assert answer.dense_bytes is None
        assert found in (answer.model_refusal or "")
        findings = check(on=answer, model=model)
        assert answer.model_refusal == only_fault(findings, "error", "model")


def answered_here(command: Sequence[str], *, input: bytes, **_: Any) -> "subprocess.CompletedProcess[bytes]":
    """Runs the question of `ask_trainer` without a process."""
    said = io.StringIO()
    with redirect_stdout(said), patch("sys.stdin", io.StringIO(input.decode())):
        exec(command[-1], {})
    return subprocess.CompletedProcess(command, 0, said.getvalue().encode())


def no_model(job: Job, num_dense: int) -> None:
    sys.stdout.write("a factory may print\n")


def broken_model(job: Job, num_dense: int) -> float:
    return num_dense / 0


def test_a_checkpoint_of_another_job_is_refused_as_a_run_would(check: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("the checkpoint is of another job")

    manifest = SimpleNamespace(position=Position(step=3, train_step=3, train_batch=3), train_steps=3)
    monkeypatch.setattr(Checkpoints, "newest_valid", lambda *_: manifest)
    for name in ("in_recorded_order", "with_recorded_rule"):
        monkeypatch.setattr(check_data, name, lambda job, newest: job)
    monkeypatch.setattr(check_data, "check_continues", refuse)
    assert only_fault(check(), "error", "start") == "the checkpoint is of another job"


def test_no_more_rows_can_be_trained_than_an_epoch_looks_up(check: Checked) -> None:
    tables = [
        {"name": "t", "num_embeddings": 10**9, "embedding_dim": 4, "features": ["cat_0", "cat_1"]},
        {"name": "u", "num_embeddings": 7, "embedding_dim": 4, "features": ["cat_2"]},
    ]
    seen = seen_of(check.job(tables=tables))
    assert check_memory.trained_rows(seen.groups[0], seen) == 2 * 5000 + 7


def narrow(job: Job) -> list[Batch]:
    return [Batch(dense=np.zeros((2, 1), np.float32), labels=np.array([0, 1], np.float32), ids=np.array([1, 2]))]


def test_a_disk_without_room_for_a_checkpoint_is_a_warning(check: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 80_000}))
    sentence = only_fault(check(), "warning", "disk")
    assert f"{check.folder} has 78.12 KiB free for checkpoints of up to 234.9 KiB; free space there" in sentence


# the command


def test_an_error_that_a_check_raises_is_a_finding() -> None:
    def check() -> Iterator[Finding]:
        yield ok("first")
        raise ConfigError("second")

    assert [(finding.level, finding.sentence) for finding in findings_of("x", check)] == [
        ("ok", "first"),
        ("error", "second"),
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_findings_are_folded_on_a_terminal_and_one_line_each_elsewhere(width: int) -> None:
    findings = [*about("data", [ok("short")]), *about("memory", [warning("a long sentence of many words [sic] " * 8)])]
    shown = {}
    for terminal in (True, False):
        console = Console(width=width, force_terminal=terminal, no_color=True, highlight=False)
        with console.capture() as captured:
            assert print_findings(findings, console) == findings
        shown[terminal] = captured.get().splitlines()
    assert max(map(len, shown[True])) <= width
    assert len(shown[True]) > 4
    assert [line.split()[:2] for line in shown[False]] == [["ok", "data"], ["warning", "memory"], ["0", "errors,"]]
    assert shown[False][1].count("[sic]") == 8


def command(check: Checked, *options: str, **sections: Any) -> tuple[int, str]:
    config = write_job(check.folder / "job.toml", check.content(**sections))
    result = CliRunner().invoke(app, ["check", "--config", str(config), *options])
    return result.exit_code, result.stdout


def test_the_command_ends_with_2_where_there_is_an_error_and_with_0_otherwise(
    check: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rowcast.analysis.check.check.check_file", partial(check_file, ask=lambda job, num_dense: CPU))
    code, out = command(check, "--json", cache={"capacity": "20 rows"})
    content = json.loads(out)
    assert (code, content["errors"], content["warnings"]) == (2, 1, 0)
    assert [finding["subject"] for finding in content["findings"] if finding["level"] == "error"] == ["start"]
    code, out = command(check)
    assert code == 0
    assert out.splitlines()[-1] == "0 errors, 0 warnings"
    code, out = command(check, "--set", "lookahead.depth=0")
    assert code == 2
    assert out.splitlines()[-1] == "1 error, 0 warnings"


# what a job may ask for beside shared memory and memory


def test_over_tcp_it_looks_at_the_keys_and_not_at_shared_memory(check: Checked, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    transport = {"endpoint": "tcp://127.0.0.1:5555", "keys": str(keys)}
    assert "keys" in only_fault(check(transport=transport), "error", "keys")
    make_keys(keys, [])
    assert "lets no trainer in" in only_fault(check(transport=transport), "error", "keys")
    make_keys(keys, ["anna"])
    findings = check(transport=transport)
    assert one(findings, "ok", "keys").endswith("lets in anna")
    assert "shared memory" not in {finding.subject for finding in findings}


# stores with a memory tier

SECRET = "s3cret-of-the-server"


def test_a_tier_that_fits_says_how_many_rows_are_in_memory_and_what_the_disk_may_hold(check: Checked) -> None:
    findings = check(store=TIERED)
    assert "keeps 2,000 rows in memory" in one(findings, "ok", "store")
    assert "; store.memory covers the tables" in one(findings, "ok", "memory")
    assert any("free for cold rows of up to" in finding.sentence for finding in findings if finding.subject == "disk")


@pytest.mark.parametrize(("free", "level"), [(2**30 - 1, "error"), (2**30, "warning"), (2**30 + 2**28, None)])
def test_a_memory_that_this_machine_has_not_free_is_refused(free: int, level: str | None, check: Checked) -> None:
    job = check.job(store={"kind": "tiered", "memory": "1GiB"})
    assert isinstance(job.store, StoreWithTier)
    found = [finding.level for finding in check_memory.check_budget(job, job.store, free)]
    assert found == ([] if level is None else [level])


def test_a_disk_without_room_for_cold_rows_and_old_copies_is_a_warning(
    check: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 250_000}))
    sentence = only_fault(check(store=TIERED), "warning", "disk")
    assert "free for cold rows of up to" in sentence
    assert sentence.endswith("or set store.disk")
    sentence = only_fault(check(store=TIERED | {"disk": "1GiB"}), "warning", "disk")
    assert sentence.endswith("or lower store.disk")


def said_of_disk(findings: list[Finding]) -> list[str]:
    return [finding.sentence for finding in findings if "store.disk is not set" in finding.sentence]


def test_without_a_disk_size_it_says_what_the_index_and_the_files_may_take(check: Checked) -> None:
    tables = [{"name": "t", "num_embeddings": 10**9, "embedding_dim": 4, "features": ["cat_0", "cat_1"]}]
    store = {"kind": "tiered", "memory": "1GiB"}
    (sentence,) = said_of_disk(check(tables=tables, store=store))
    assert sentence.startswith("store.disk is not set, so 256 MiB of store.memory, at most a quarter, say where up to ")
    rows = 2**28 // 17
    assert f" {rows:,} rows lie" in sentence
    (enough,) = re.findall(r"store.disk = (\d+) is twice the rows of an epoch, and leaves more memory", sentence)
    assert said_of_disk(check(tables=tables, store=store | {"disk": int(enough)})) == []
    assert said_of_disk(check(store=TIERED)) == [], "the memory is given in rows"


def test_tables_that_the_index_has_room_for_need_no_other_disk_size(check: Checked) -> None:
    (sentence,) = said_of_disk(check(store={"kind": "tiered", "memory": "1GiB"}))
    assert "leaves more memory" not in sentence


# rows on a server


@needs_redis
def test_a_server_that_lets_rows_in_is_ok_and_keeps_none(
    check: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD, SECRET)
    with RedisServer(tmp_path / "server", "--requirepass", SECRET, password=SECRET) as server:
        findings = check(store=on_server(server))
        assert keys_on([server]) == set()
        (sentence,) = (finding.sentence for finding in findings if "let rows in" in finding.sentence)
        assert f"{BOUND}:{server.port} " in sentence
        assert {finding.level for finding in findings} == {"ok"}
        with server.client() as client:
            client.config_set("maxmemory", client.info()["used_memory"] + 1000)
        assert "has no memory left for rows" in only_fault(check(store=on_server(server)), "error", "store")
        assert keys_on([server]) == set()
        with server.client() as client:
            client.config_set("maxmemory", client.info()["used_memory"] + 400_000)
        tables = [{"name": "t", "num_embeddings": 20_000, "embedding_dim": 4, "features": ["cat_0", "cat_1"]}]
        assert "raise their maxmemory" in only_fault(check(tables=tables, store=on_server(server)), "warning", "store")
    assert not any(SECRET in finding.sentence for finding in findings)
    assert not check.run_dir.exists()


@needs_redis
@pytest.mark.parametrize("missing", ["hset", "hmget", "hdel", "unlink", "info"])
def test_a_user_without_a_right_that_a_run_needs_is_found_before_it(
    missing: str, check: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD, SECRET)
    rights = [f"+{right}" for right in ("hset", "hmget", "hdel", "unlink", "info") if right != missing]
    with RedisServer(tmp_path / "server", "--user", "rows", "on", f">{SECRET}", "~rowcast:*", *rights) as server:
        url = f"redis://rows@{BOUND}:{server.port}"
        sentence = only_fault(check(store=on_server(server) | {"url": url}), "error", "store")
    assert "refuses this user" in sentence
    assert missing in sentence.lower()
    assert SECRET not in sentence


def on_server(server: RedisServer) -> dict[str, Any]:
    return {"kind": "redis", "memory": "2000 rows", "url": server.url_text, "timeout": "20s"}
