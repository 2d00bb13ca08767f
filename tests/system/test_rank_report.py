"""What is seen of two ranks as real processes: one report, one summary, one timeline."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rowcast.analysis.simulate.ranks import simulate_ranks
from rowcast.analysis.timeline import read_pairs
from rowcast.command_line.prefetcher import app
from rowcast.job.file import load_job
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.trainer.report.report_json import Report, read_report
from tests.support.jobs import table
from tests.support.processes import Session
from tests.support.timeline_format import check_events

RANKS, STEPS = 2, 150


@dataclass
class SeenRun:
    report: Report
    page: str
    stdout: str
    log: str  # the prefetchers'
    stderr: str
    folder: Path
    config: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SeenRun:
    with Session(tmp_path_factory.mktemp("seen")) as session:
        session.write_job(
            data={"batch_size": 50, "eval_fraction": 0.05, "synthetic": {"samples": 50 * STEPS * 2}},
            eval={"every": 100},
            tables=[table("t", 2000, 4, "cat_0", "cat_1"), table("u", 500, 4, "cat_2", placement="table")],
            ranks={"count": RANKS, "parts": RANKS},
        )
        started = session.start("local", "--timeline", f"--max-steps={STEPS}")
        stdout = started.ended(300).quiet().stdout
        out = CliRunner().invoke(app, ["timeline", f"--run={session.run_dir}"])
        assert out.exit_code == 0, out.output
        return SeenRun(
            report=read_report(session.run_dir / "report.json"),
            page=(session.run_dir / "report.html").read_text(encoding="utf-8"),
            stdout=stdout,
            log=(session.run_dir / "prefetcher.log").read_text(),
            stderr=started.stderr,
            folder=session.run_dir,
            config=session.config,
        )


def test_the_run_has_one_report_of_both_ranks(run: SeenRun) -> None:
    report, (first, second) = run.report, run.report.ranks
    assert (report.steps, report.samples, first.samples, second.samples) == (STEPS, 50 * STEPS, 25 * STEPS, 25 * STEPS)
    assert (first.rank, second.rank) == (0, 1)
    assert first.rows_sent == second.rows_received > 0
    assert second.rows_sent == first.rows_received > 0
    assert (first.bytes_sent, first.bytes_received) == (second.bytes_received, second.bytes_sent)
    assert report.unique_rows == first.rows_owned + second.rows_owned
    assert min(first.waited_for_ranks_s, second.waited_for_ranks_s) > 0
    assert len({pid for own in report.ranks for pid in own.pids.values()}) == 2 * RANKS
    assert report.phase_ms["exchange"] > 0
    assert "<h2>Ranks</h2>" in run.page
    assert sorted(path.name for path in run.folder.rglob("report.*")) == ["report.html", "report.json"]


def test_the_run_counts_what_simulating_its_ranks_counts(run: SeenRun) -> None:
    job, report = load_job(run.config), run.report
    [found] = simulate_ranks([job], lambda own: schedule(own, open_reader(own), STEPS), per_step=True)
    steps = found.per_step
    assert steps is not None
    assert found.owner_rows is not None
    assert (found.steps, found.eval_steps) == (STEPS, report.eval_steps)
    for own in report.ranks:
        for counted, by_step in (
            (own.rows_owned, steps.owner_rows),
            (own.rows_sent, steps.rows_sent),
            (own.rows_received, steps.rows_received),
        ):
            assert counted == sum(rows[own.rank] for rows in by_step)
    assert report.rows_fetched == sum(map(sum, steps.rows_fetched))
    assert report.rows_written_back == sum(map(sum, steps.rows_written_back)) + (found.rows_flushed or 0)
    assert report.rows_flushed == found.rows_flushed
    assert report.rank_imbalance == pytest.approx(found.owner_rows.imbalance)
    rows = (found.row_bytes or 0) * len(steps.step) + (found.gradient_bytes or 0) * STEPS
    vectors = (found.vector_bytes or 0) * len(steps.step) + (found.vector_gradient_bytes or 0) * STEPS
    assert sum(own.vector_bytes_sent for own in report.ranks) == pytest.approx(RANKS * vectors)
    assert sum(own.bytes_sent for own in report.ranks) == pytest.approx(RANKS * (rows + vectors))
    assert min(rows, vectors) > 0


def test_only_rank_0_talks_and_every_log_line_has_its_rank(run: SeenRun) -> None:
    assert run.stdout.count("rowcast: finished after") == 1
    assert run.stdout.count("eval after 100 train steps") == 1
    assert run.stdout.count("rank  samples") == 1
    assert re.search(rf"\n +1 +{25 * STEPS:,} ", run.stdout)
    for process, text in (("trainer", run.stderr), ("prefetcher", run.log)):
        lines = [line for line in text.splitlines() if f"process={process}" in line]
        assert {int(rank) for line in lines for rank in re.findall(r" rank=(\d) ", line)} == set(range(RANKS))
    assert all(" rank=" in line for line in run.stderr.splitlines() if "process=trainer" in line)


def test_all_pairs_are_on_one_timeline_with_their_exchanges(run: SeenRun) -> None:
    for own, pair in zip(run.report.ranks, read_pairs(run.folder), strict=True):
        assert {span.step for span in pair.trainer.named("exchange")} >= set(range(STEPS))
        waits = sum(span.dur or 0.0 for span in pair.trainer.named("wait: ranks")) / 1e6
        assert waits == pytest.approx(own.waited_for_ranks_s, abs=1e-6 + 1e-9 * len(pair.trainer.spans))
    events = check_events(run.folder / "timeline.json")
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.partition(" (")[0] for name in names] == ["prefetcher 0", "trainer 0", "prefetcher 1", "trainer 1"]
