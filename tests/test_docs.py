"""What the documents repeat from the code, and the examples that they name."""

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rowcast.prefetcher.pipeline.barrier
import rowcast.trainer.step.barrier
from benchmarks.job_page import page
from rowcast.job.file import load_job
from rowcast.runtime.stages import StateTable
from tests.support.batches import slots_for
from tests.support.diagrams import barrier, conversation
from tests.support.driver import InProcessRun, Settings

ROOT = Path(__file__).parent.parent


def test_the_architecture_page_shows_the_conversation_as_it_is() -> None:
    assert conversation().strip() in (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("table", [rowcast.prefetcher.pipeline.barrier.TABLE, rowcast.trainer.step.barrier.TABLE])
def test_the_architecture_page_shows_the_states_of_a_barrier_as_they_are(table: StateTable[Any, Any]) -> None:
    assert barrier(table).strip() in (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("job_file", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_every_example_job_file_is_valid(job_file: Path) -> None:
    assert load_job(job_file).tables


def test_the_page_of_the_job_file_is_that_of_the_schema() -> None:
    assert (ROOT / "docs" / "job-file.md").read_text(encoding="utf-8") == page(), (
        "run: python -m benchmarks.job_page > docs/job-file.md"
    )


def test_the_page_of_the_job_file_has_every_key_of_a_whole_job() -> None:
    job = load_job(ROOT / "examples" / "demo.toml")
    sections = {
        section: fields(getattr(job, section))
        for section in fields(job)
        if hasattr(getattr(job, section), "__struct_fields__")
    }
    text = page()
    for section, keys in sections.items():
        _, _, rest = text.partition(f"## `[{section}")
        for key in keys:
            assert f"| `{key}` |" in rest or f"[{section}.{key}]" in text, f"{section}.{key} is not on the page"


def fields(struct: object) -> tuple[str, ...]:
    return tuple(getattr(struct, "__struct_fields__", ()))


def test_the_custom_examples_train_together() -> None:
    from rowcast.job.tables import group_specs
    from rowcast.prefetcher.readers.reader import open_reader, schedule

    overrides = (
        "data.format=examples.custom_data:open_batches",
        "data.options={num_batches = 20}",
        "data.batch_size=64",
        "tables_from.cardinalities=[50, 3000]",
        "model.kind=examples.custom_model:build",
        "model.options={hidden = 8}",
        "optimizer.dense.lr=0.5",
    )
    job = load_job(ROOT / "examples" / "demo.toml", overrides)
    batches = list(schedule(job, open_reader(job)))
    run = InProcessRun(
        job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"), seeded_streams=False)
    ).run()
    losses = run.results.losses
    assert len(losses) == 20
    assert np.mean(losses[-5:]) < np.mean(losses[:5]), "the label is the first id's parity, which its row can learn"
    assert len(run.results.evaluations) == 1


def test_the_readme_stays_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 7_000


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], ids=lambda path: path.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)[)#]", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


OF_OTHERS = {"examples/adopt/patches/README.md"}  # whose commits are those of other projects
A_RUN = "0123456789ab"  # stands for the name of one
PAGES = [path for path in sorted(ROOT.glob("**/*.md")) if not {".venv", ".venv-bench", "node_modules"} & {*path.parts}]


def test_the_page_of_nine_files_names_files_that_are_in_their_rooms() -> None:
    table = (ROOT / "docs" / "nine-files.md").read_text(encoding="utf-8").partition("## Around the nine")[2]
    rows = [row.split("|")[1:-1] for row in re.findall(r"^\| `.*", table, re.MULTILINE)]
    assert len(rows) > 10
    for rooms, _, names in rows:
        folders = [ROOT / room for room in re.findall(r"`([\w/]+)`", rooms)]
        for name in re.findall(r"`([\w./]+)`", names):
            assert any((folder / name.removeprefix(f"{folder.name}/")).exists() for folder in folders), name


def git(*command: str, given: str = "") -> str:
    return subprocess.run(["git", *command], cwd=ROOT, input=given, capture_output=True, text=True, check=False).stdout


def test_every_commit_that_a_page_or_a_sentence_names_exists() -> None:
    """Where there is the history: a shallow copy has the newest commits only."""
    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("this copy has no history")
    pages = [path for path in PAGES if str(path.relative_to(ROOT)) not in OF_OTHERS]
    named = {
        found: path.name
        for path in [*pages, ROOT / "job" / "section.py"]
        for found in re.findall(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,12}\b", path.read_text(encoding="utf-8"))
    }
    assert "4c36c62" in named
    answers = git("cat-file", "--batch-check", given="".join(f"{name}^{{commit}}\n" for name in named)).splitlines()
    gone = [name for name, answer in zip(named, answers, strict=True) if " commit " not in answer and name != A_RUN]
    assert not gone, {name: named[name] for name in gone}
