"""A whole run of two real processes under `--timeline`: the merged timeline shows the prefetcher at work for later
steps while the trainer computes earlier ones.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
from typer.testing import CliRunner

from rowcast.analysis.estimate.pipeline import PlannedStep
from rowcast.analysis.estimate.planned import plan_job
from rowcast.analysis.timeline import Pair, StepLife, began, ended, lives, read_pair
from rowcast.command_line.prefetcher import app
from rowcast.job.file import load_job
from rowcast.runtime.telemetry.timeline import MAIN
from rowcast.runtime.telemetry.timeline import TraceEvent as Span
from rowcast.trainer.report.report_json import Report, read_report
from tests.support.made_up_timeline import announced_at, planned_at
from tests.support.processes import Session
from tests.support.timeline_format import Event, check_events

NUM_STEPS = 60
CHECKPOINT_EVERY = 25
ROUNDING = 0.002  # microseconds
WARM_UP = 10  # steps: the first plans are made and fetched before there is anything to compute
AHEAD = {"decode", "read", "plan", "fetch", "send"}
COMPUTE = {"train": {"lookup", "forward", "backward", "update"}, "eval": {"evaluate"}}
IN_PARTS = {"backward", "update"}  # rows are updated amid the backward pass, dense weights behind it
SYNTHETIC: dict[str, Any] = {
    "data": {"batch_size": 2048, "synthetic": {"samples": 2048 * (NUM_STEPS + 20)}, "eval_fraction": 0.05},
    "tables": [
        {
            "name": "t",
            "num_embeddings": 400_000,
            "embedding_dim": 16,
            "features": [f"cat_{index}" for index in range(8)],
        }
    ],
    "model": {"bottom_mlp": [256, 128, 16], "top_mlp": [256, 128, 1]},
    "cache": {"capacity": "30000 rows"},
}


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    pair: Pair
    steps: list[StepLife]
    events: list[Event]
    planned: list[PlannedStep]  # by `rowcast estimate`
    estimated: str  # it said
    report: Report

    def spans(self, step: int) -> dict[str, list[Span]]:
        """Of both processes, by name."""
        found: defaultdict[str, list[Span]] = defaultdict(list)
        for recording in self.pair.both:
            for span in recording.spans:
                if span.step == step and span.cat == "work":
                    found[span.name].append(span)
        return found

    def tracks(self, process: str) -> set[str]:
        (pid,) = (
            event["pid"]
            for event in self.events
            if event["name"] == "process_name" and event["args"]["name"].startswith(process)
        )
        return {
            event["args"]["name"] for event in self.events if event["name"] == "thread_name" and event["pid"] == pid
        }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    with Session(tmp_path_factory.mktemp("recorded")) as session:
        session.write_job(**SYNTHETIC, checkpoint={"every": CHECKPOINT_EVERY})
        session.start("local", "--timeline", f"--max-steps={NUM_STEPS}").ended(timeout_s=150).quiet()
        found = CliRunner().invoke(app, ["timeline", f"--run={session.run_dir}"])
        assert found.exit_code == 0, found.output
        estimated = CliRunner().invoke(
            app,
            [
                *("estimate", f"--config={session.config}", f"--run={session.run_dir}"),
                *(f"--max-steps={NUM_STEPS}", "--change=step=0.1"),
            ],
        )
        assert estimated.exit_code == 0, estimated.output
        pair = read_pair(session.run_dir)
        return RecordedRun(
            pair=pair,
            steps=lives(pair),
            events=check_events(session.run_dir / "timeline.json"),
            planned=plan_job(load_job(session.config), NUM_STEPS)[0],
            estimated=estimated.output,
            report=read_report(session.run_dir / "report.json"),
        )


def test_every_step_has_its_spans_in_both_processes(run: RecordedRun) -> None:
    assert [life.number for life in run.steps] == list(range(run.report.steps + run.report.eval_steps))
    assert [life.step.name for life in run.steps].count("train step") == NUM_STEPS
    for life in run.steps:
        found = run.spans(life.number)
        assert AHEAD | COMPUTE[life.step.name.partition(" ")[0]] | {"copy in", "fill"} <= found.keys(), (
            f"step {life.number}"
        )
        for name in {"plan", "read", *COMPUTE[life.step.name.partition(" ")[0]]} - IN_PARTS:
            assert len(found[name]) == 1, f"{name} of step {life.number}"


def test_an_estimate_plans_the_pieces_and_barriers_that_the_run_had(run: RecordedRun) -> None:
    assert [len(planned.pieces) for planned in run.planned] == [
        len(run.spans(life.number)["copy in"]) for life in run.steps
    ]
    packed = run.pair.trainer.named("pack")  # once a barrier
    assert sum(planned.barrier for planned in run.planned) == len(packed)
    for planned in run.planned:
        if not planned.barrier:  # its rows are copied out too
            pieces = [piece for piece in planned.pieces if piece.back_bytes]
            assert len(run.spans(planned.step)["copy out"]) == len(pieces), f"step {planned.step}"
    assert f"{len(run.steps)} steps" in run.estimated
    assert "with step=0.1:" in run.estimated


def test_rows_are_announced_before_the_step_that_needs_them_begins(run: RecordedRun) -> None:
    for life in run.steps:
        assert planned_at(life) < announced_at(life)
        assert began(life.ahead["send"][-1]) < began(life.step), f"step {life.number}"
        filled = max(ended(span) for span in run.spans(life.number)["fill"])
        assert filled <= began(life.step) + ROUNDING, f"step {life.number} began before its rows were in their slots"


def test_plans_and_fetches_of_later_steps_lie_under_the_compute_of_earlier_ones(run: RecordedRun) -> None:
    steps = run.steps[WARM_UP:-WARM_UP]  # at the end nothing is left to plan
    over = {
        under.number
        for life in steps
        for event in chain.from_iterable(life.ahead.values())
        for under in steps
        if under.number < life.number and began(event) < ended(under.step) and began(under.step) < ended(event)
    }
    assert len(steps) > NUM_STEPS / 2
    assert len(over) > len(steps) / 5  # in turn, none would be; how many depends on free cores


def test_every_stage_has_a_track(run: RecordedRun) -> None:
    assert run.tracks("prefetcher") == {"decoder 0", "planning", "fetcher", "write-back", "checkpoint", "mail"}
    assert run.tracks("trainer") == {MAIN, "sender", "mail"}


def test_checkpoints_and_their_barriers_can_be_seen(run: RecordedRun) -> None:
    for recording, names in zip(
        run.pair.both, ({"write", "write_back"}, {"flush", "pack", "copy out", "send back"}), strict=True
    ):
        assert names <= {span.name for span in recording.spans if span.cat == "work"}
    written = run.pair.prefetcher.track("checkpoint")
    under = [span for span in written for life in run.steps if began(life.step) < began(span) < ended(life.step)]
    assert under, "checkpoints are written while training goes on"


def test_the_waits_are_those_of_the_report(run: RecordedRun) -> None:
    waits = run.pair.trainer.named("wait: rows")
    waited_s = sum(wait.dur or 0.0 for wait in waits) / 1e6
    assert waited_s == pytest.approx(run.report.trainer_wait_s, abs=1e-6 + 1e-9 * len(waits))
    # the fetcher waits for the trainer: for a step to end, or for room in the ring
    assert {span.name for span in run.pair.prefetcher.spans} & {"wait: credit", "wait: ring"}


def test_the_timeline_shows_rings(run: RecordedRun) -> None:
    levels = [event["args"]["bytes"] for event in run.events if (event["ph"], event["name"]) == ("C", "fetch ring")]
    assert max(levels) > 0
