"""Code that a file names is not run by opening the file; every place that imports by a text is known."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import pandas as pd
import pytest

import rowcast
from rowcast.job import formats, optimizers, schema, stores
from rowcast.job.file import parse_manifest_job
from rowcast.job.models import BUILT_IN_MODELS, NO_MODEL
from rowcast.job.named_code import CODE, JobFromFile, code_of, import_code, trusted
from rowcast.job.schema import Job
from rowcast.job.section import sections_of
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.runtime.checkpoint_manifest import MANIFEST_NAME, read_manifest
from rowcast.runtime.disk import render, seal
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models import build_model
from tests.support import jobs
from tests.support.facts import facts
from tests.support.jobs import job_content, table, write_job

ROOT = Path(__file__).parent.parent
PRODUCT = ("runtime", "job", "protocol", "prefetcher", "trainer", "serving", "analysis", "deploy", "rowcast")
BY_A_TEXT = {"import_module", "__import__", "spec_from_file_location", "run_path", "run_module", "resolve_name"}
SECTION = re.compile(r"## Code that a file names\n(.*?)\n## ", re.DOTALL)


def imports_by_a_text(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_A_TEXT:
            yield ast.unparse(node.args[0])


def test_security_md_lists_every_place_that_imports_by_a_text() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        if any(imports_by_a_text(path.read_text()))
    }
    [section] = SECTION.findall((ROOT / "SECURITY.md").read_text())
    assert set(re.findall(r"^\| `([a-z_/]+\.py)` \|", section, re.MULTILINE)) == found
    assert "job/named_code.py" in found
    assert list(imports_by_a_text("importlib.import_module(name)\nx = __import__(y)")) == ["name", "y"]


def test_every_registry_names_rowcasts_modules_and_every_kind_of_the_users_is_known() -> None:
    registries: list[dict[str, Any]] = [formats.FORMATS, stores.STORES, optimizers.ROW_OPTIMIZERS]
    named = [entry.module for registry in registries for entry in registry.values()]
    named += [model.factory for model in BUILT_IN_MODELS.values()]
    named += [policy.factory for policy in schema.EVICTION_POLICIES.values()]
    assert all(name.startswith("rowcast.") for name in named)
    takes_code = {
        f"{path}.{section.kinds.key}"
        for path, section in sections_of(Job, "")
        if section.kinds is not None and section.kinds.custom is not None
    }
    assert takes_code == set(CODE)


# jobs


def with_code(key: str, name: str, **sections: Any) -> Job:
    section, _, field = key.partition(".")
    return jobs.job(**{section: {field: name}}, **sections)


def build(job: Job) -> Any:
    return build_model(job, 2)


IMPORTERS: dict[str, Callable[[Job], Any]] = {"model.kind": build, "data.format": open_reader}
WORKS = {"model.kind": "tests.support.batches:small_model", "data.format": "tests.readers.factories:function"}


@pytest.mark.parametrize("key", CODE)
def test_a_name_from_a_file_is_refused_until_the_caller_gives_it(key: str) -> None:
    given = with_code(key, WORKS[key])
    if key == "data.format":
        given = jobs.job(data={"format": WORKS[key], "options": {"num_batches": 2}}, model={"kind": "dlrm", **MLPS})
    read = parse_manifest_job(given.content(), "a manifest")
    assert isinstance(read, JobFromFile)
    assert read.content() == given.content()
    for again in (read, msgspec.structs.replace(read, job=read.job)):
        with pytest.raises(ConfigError, match=facts(key, WORKS[key])):
            IMPORTERS[key](again)
    with pytest.raises(ConfigError, match=facts(key, "type this", WORKS[key])):
        trusted(read, ["another:one"], lambda names: f"type this {names}")
    assert import_code(trusted(read, [WORKS[key]], str), key).__module__ == WORKS[key].partition(":")[0]


MLPS = {"bottom_mlp": [4], "top_mlp": [1]}


def test_a_job_that_names_no_code_needs_nothing() -> None:
    for kind in ({"kind": "dlrm", **MLPS}, {"kind": NO_MODEL}):
        job = parse_manifest_job(jobs.job(model=kind).content(), "a manifest")
        assert not code_of(job)
        assert type(job) is Job
        assert trusted(job, (), str) is job


@pytest.mark.parametrize("key", CODE)
@pytest.mark.parametrize("name", ["payload", "inner.payload", "package", "linked"])
def test_nothing_below_the_run_directory_is_imported(
    key: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by its owner's job file: as a module, in a namespace, as a package, and behind a link."""
    run = tmp_path / f"run_{name.replace('.', '_')}_{key.partition('.')[0]}"
    (run / "inner").mkdir(parents=True)
    (run / "package").mkdir()
    (tmp_path / "beside").symlink_to(run)
    for file in ("payload.py", "inner/payload.py", "package/__init__.py", "linked.py"):
        (run / file).write_text("open('ran', 'w')\ndef f(*a, **k): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    top = "beside" if name == "linked" else run.name
    job = with_code(key, f"{top}.{name}:f", job={"run_dir": str(run)})
    with pytest.raises(ConfigError, match=facts(key, job.run_dir, "below")):
        IMPORTERS[key](job)
    monkeypatch.chdir(run)
    for path in ([*sys.path], [*sys.path, str(run)]):
        monkeypatch.setattr(sys, "path", path)
        with pytest.raises(ConfigError, match=facts(key)):
            IMPORTERS[key](with_code(key, f"{name}:f", job={"run_dir": str(run)}))
        assert sys.path == path
        assert not [*tmp_path.rglob("ran")]


# a run of somebody else


@dataclass
class Strangers:
    folder: Path  # the shell's
    run: Path
    new: Path  # samples to score

    def command(self, name: str, *options: str, here: Path | None = None) -> "subprocess.CompletedProcess[str]":
        given = {"score": ["--data", str(self.new), "--out", str(self.folder / "scores.csv")]}
        given |= {"export": ["--out", str(self.folder / "x.safetensors")], "publish": ["--to", str(self.folder / "v")]}
        run = os.path.relpath(self.run, here or self.folder)
        return subprocess.run(
            [sys.executable, "-m", "rowcast", name, "--run", run, *given.get(name, []), *options],
            cwd=here or self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def ran(self) -> list[str]:
        return [path.name for path in self.folder.rglob("ran*")]

    def name_code(self, content: dict[str, Any]) -> None:
        """Writes manifests with right checksums, as anybody can."""
        for path in (self.run / "checkpoints").glob(f"step-*/{MANIFEST_NAME}"):
            manifest = read_manifest(path.parent)
            job = jobs.laid_over(json.loads(json.dumps(manifest.job)), content)
            path.write_bytes(render(seal(msgspec.structs.replace(manifest, job=job))))


MODEL = """
import pathlib
pathlib.Path(__file__).with_name("ran own").touch()
from rowcast.trainer.models import built_in_factory
from rowcast.job.models import BUILT_IN_MODELS
from msgspec.structs import replace
from rowcast.job.models import DLRMSettings
def build(job, num_dense):
    model = DLRMSettings(kind="dlrm", bottom_mlp=[4], top_mlp=[1])
    return built_in_factory(BUILT_IN_MODELS["dlrm"])(replace(job, model=model), num_dense)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with a built-in model."""
    folder = tmp_path_factory.mktemp("named")
    frame = pd.DataFrame({"label": [0, 1] * 40, "price": [0.5] * 80, "item": [*range(80)]})
    frame.to_csv(folder / "clicks.csv", index=False)
    data = {"format": "csv", "path": str(folder / "clicks.csv"), "columns": {"dense": ["price"]}, "synthetic": None}
    content = job_content(folder / "run", data=data, tables=[table("items", 80, 4, "item")], model=dict(MLPS))
    rowcast.train(write_job(folder / "job.toml", content))
    return folder


@pytest.fixture
def strangers(trained: Path, tmp_path: Path) -> Strangers:
    copytree(trained / "run", tmp_path / "shared_run")
    return Strangers(tmp_path, tmp_path / "shared_run", trained / "clicks.csv")


CUSTOM: dict[str, Any] = {"options": {}, "bottom_mlp": None, "top_mlp": None, "interaction": None}


@pytest.mark.timeout(600)
def test_a_strangers_run_runs_nothing_of_its_own(strangers: Strangers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that opens a run, from beside it and from within it, where it has modules of well-known names."""
    evil = "import pathlib\npathlib.Path('{0}').with_name('ran').touch()\ndef factory(*a, **k): raise SystemExit(9)\n"
    for name in ("payload", "numpy", "torch", "typer", "json", "rowcast_trainer", "sitecustomize", "msgspec"):
        (strangers.run / f"{name}.py").write_text(evil.format(strangers.run))
    kind = "shared_run.payload:factory"
    strangers.name_code({"model": {"kind": kind, **CUSTOM}})
    for here in (strangers.folder, strangers.run):
        for name, code in (("export", 0), ("verify", 0), ("publish", 0), ("score", 2)):
            ended = strangers.command(name, here=here)
            assert ended.returncode == code, ended.stderr
        assert re.search(facts(kind, f"--trust={kind}"), ended.stderr)
        assert kind in strangers.command("check", here=here).stdout
        assert not strangers.ran
    line = strangers.command("score").stderr.strip().splitlines()[-1].rpartition(": ")[2]
    assert line.startswith("rowcast score --run shared_run --data ")
    for options, here in (
        (f"--trust={kind}", strangers.folder),
        ("--trust=payload:factory", strangers.run),
        (f"--set=model.kind={kind}", strangers.run),
    ):
        assert strangers.command("score", options, here=here).returncode != 0
        assert not strangers.ran
    monkeypatch.chdir(strangers.folder)
    run = rowcast.load("shared_run")
    assert run.losses.size
    assert run.job.model.kind == kind
    frame = pd.read_csv(strangers.new)
    for ask in (run.model, lambda: run.predict(frame), lambda: rowcast.train(run.job)):
        with pytest.raises(ConfigError, match=facts("rowcast.load('shared_run', trust=", kind)):
            ask()
    with pytest.raises(ConfigError, match=facts(kind, "below")):
        rowcast.load("shared_run", trust=[kind]).model()
    assert not strangers.ran


def test_what_the_caller_names_scores(strangers: Strangers, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By --trust, by the job file and by --set; a run with a built-in model by nothing."""
    scores = strangers.folder / "scores.csv"
    assert strangers.command("score").returncode == 0
    expected = scores.read_text()
    (strangers.folder / "their_model.py").write_text(MODEL)
    kind = "their_model:build"
    strangers.name_code({"model": {"kind": kind, **CUSTOM}})
    config = strangers.folder / "job.toml"
    config.write_text((trained / "job.toml").read_text().replace('kind = "dlrm"', f'kind = "{kind}"'))
    assert kind in config.read_text()
    for options in ([f"--trust={kind}"], ["--config", str(config)], [f"--set=model.kind={kind}"]):
        scores.unlink()
        ended = strangers.command("score", *options)
        assert ended.returncode == 0, ended.stderr
        assert scores.read_text() == expected
    assert strangers.ran == ["ran own"]
    monkeypatch.chdir(strangers.folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert rowcast.load("shared_run", trust=[kind]).model()
    assert re.search(facts(f"--trust={kind}", strangers.folder / "their_model.py"), strangers.command("check").stdout)
