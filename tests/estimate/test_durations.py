"""A job's steps from a made-up device: which task takes how long, and what follows for the pace."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from rowcast.analysis.estimate import advised
from rowcast.analysis.estimate import durations as durations_module
from rowcast.analysis.estimate import estimate as estimate_module
from rowcast.analysis.estimate.device_rates import KernelRates, read_rates
from rowcast.analysis.estimate.durations import EstimatedDurations, HostRow
from rowcast.analysis.estimate.estimate import combinations, compare, estimate_jobs, print_compared
from rowcast.analysis.estimate.pipeline import Handover, Pipeline
from rowcast.analysis.estimate.planned import plan_job
from rowcast.analysis.estimate.recorded import RecordedRun
from rowcast.analysis.estimate.schedule import run
from rowcast.analysis.estimate.walk import CHANGEABLE, walk
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.runtime.disk import render, seal
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.made_up_device import FREE, device, job

ROW = HostRow(read=np.array([1e-3]), first=np.array([2e-3]), write=np.array([4e-3]))


def test_rows_are_counted_as_the_planner_moves_them() -> None:
    plan, _ = plan_job(job())
    counted = [own.counted for own in plan if own.counted is not None]
    assert len(counted) == len(plan)
    [group] = group_specs(job())
    fetched = sum(own.counts.groups[0].fetched for own in counted)
    assert 0 < sum(own.first[0] for own in counted) < fetched, "rows come back to so small a cache"
    assert sum(own.first[0] for own in counted) <= group.num_rows
    moved = sum(own.counts.groups[0].written_back + sum(own.flushed) for own in counted)
    assert fetched - 1000 <= moved <= fetched + 1000 * sum(own.barrier for own in plan)
    assert [own.counts.trains for own in counted].count(False) == 300 // 64 + 1


def test_each_task_takes_what_its_counts_and_rates_say() -> None:
    own = job()
    plan, _ = plan_job(own)
    rates = device(per_step=0.5, scatter={"rows": 1.0}, copy_out={"bytes": 2.0}, update_adagrad={"rows": 3.0})
    found = EstimatedDurations(own, plan, rates, ROW)
    [group] = group_specs(own)
    for step, planned in enumerate(plan):
        assert planned.counted is not None
        [counts], [first] = planned.counted.counts.groups, planned.counted.first
        assert found("fill", step) == pytest.approx(counts.fetched)
        assert found("copy out", step) == pytest.approx(2 * counts.written_back * group.record_bytes)
        assert found("step", step) == pytest.approx(0.5 + (3 * counts.rows if planned.counted.counts.trains else 0))
        assert found("fetch", step, 2) == pytest.approx((1e-3 * (counts.fetched - first) + 2e-3 * first) / 2)
        assert found("write back", step) == pytest.approx(4e-3 * counts.written_back)


@pytest.mark.parametrize(
    ("per_step", "row", "bottleneck"),
    [
        (1.0, FREE, "step"),
        (0.0, HostRow(read=np.full(1, 1e-3), first=np.full(1, 1e-3), write=np.zeros(1)), "fetch"),
        (0.0, HostRow(read=np.zeros(1), first=np.zeros(1), write=np.full(1, 1e-2)), "write back"),
    ],
)
def test_the_slowest_task_gives_the_pace(per_step: float, row: HostRow, bottleneck: str) -> None:
    own = job(checkpoint={"every": 0})
    plan, wiring = plan_job(own)
    durations = EstimatedDurations(own, plan, device(per_step), row)
    walked = walk(plan, wiring, durations, {})
    assert walked.bound_by[0][0] == bottleneck
    steady = range(len(plan) // 4, len(plan) - 5)
    assert walked.step_s == pytest.approx(sum(durations(bottleneck, step) for step in steady) / len(steady), rel=0.2)


def test_settings_multiply() -> None:
    found = combinations(["lookahead.depth=1", "cache.capacity=1MiB", "lookahead.depth=2"])
    assert found == [
        (("lookahead.depth", "1"), ("cache.capacity", "1MiB")),
        (("lookahead.depth", "2"), ("cache.capacity", "1MiB")),
    ]
    assert combinations([]) == [()]
    with pytest.raises(ConfigError, match=facts("--vary depth", "lookahead.depth=2")):
        combinations(["depth"])


def test_a_device_twice_as_fast_takes_half_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_module, "measured_rows", lambda job, groups: FREE)
    paths = []
    for per_step in (1.0, 0.5):
        paths.append(tmp_path / f"{per_step}.json")
        paths[-1].write_bytes(render(seal(device(per_step))))

    def load(settings: Sequence[str]) -> Job:
        keys = dict(setting.split("=") for setting in settings)
        return job(lookahead={"depth": int(keys["lookahead.depth"])})

    found = estimate_jobs(load, paths, ["lookahead.depth=1", "lookahead.depth=2"])
    assert [own.settings[0][1] for own in found] == ["1", "1", "2", "2"]
    for slow, fast in (found[:2], found[2:]):
        assert slow.walked.step_s == pytest.approx(1.0, rel=0.1)
        assert fast.walked.step_s == pytest.approx(0.5, rel=0.1)


def test_the_advised_sections_are_estimated_with_what_a_step_takes_to_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that takes a second a step takes one with the recommended sections too, whatever the curve says."""
    monkeypatch.setattr(advised, "measured_rows", lambda job, groups: FREE)
    rates, path = device(per_step=1.0, update_adagrad={"rows": 1e-4}), tmp_path / "rates.json"
    path.write_bytes(render(seal(rates)))
    own = advised.estimate_advised(job(cache={"capacity": "1GiB"}), path, 1000.0, max_steps=40)
    settings = dict(own.settings)
    assert own.steps == 40 + 300 // 64 + 1
    assert settings["cache.policy"] == "lookahead"
    plan, _ = plan_job(job(cache={"capacity": settings["cache.capacity"]}), 40)
    durations = EstimatedDurations(job(), plan, rates, ROW)
    assert own.compute_s == pytest.approx(sum(durations("step", step) for step in range(11, 40)) / 29)
    assert own.walked.step_s == pytest.approx(own.compute_s, rel=0.05)


def test_the_advised_sections_are_estimated_for_the_first_of_several_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advised, "measured_rows", lambda job, groups: FREE)
    rates, path = device(per_step=1.0), tmp_path / "rates.json"
    for kernel, seconds in (("exchange", 0.25), ("dense sums", 0.0)):
        rates.kernels[kernel] = KernelRates(terms={"1": seconds})
    path.write_bytes(render(seal(rates)))
    own = advised.estimate_advised(job(ranks={"count": 2}), path, 1000.0, max_steps=40)
    assert own.walked.step_s == pytest.approx(1.0 + 4 * 0.25, rel=0.05)


def test_a_run_that_took_what_was_estimated_is_off_by_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(durations_module, "measured_rows", lambda job, groups: FREE)
    own = job(checkpoint={"every": 0})
    path = tmp_path / "rates.json"
    path.write_bytes(render(seal(device(per_step=1.0, scatter={"rows": 1e-3}))))
    plan, wiring = plan_job(own)
    durations = EstimatedDurations(own, plan, read_rates(path))
    pipeline = Pipeline(plan, wiring, durations, {})
    run(pipeline.threads)
    recorded = RecordedRun(
        first_step=0,
        seconds={name: {step: durations(name, step) for step in range(len(plan))} for name in CHANGEABLE},
        usual={name: durations(name, 0) for name in get_args(Handover)},
        begins={},
        ended=[task.ended_s for task in pipeline.done],
    )
    monkeypatch.setattr(estimate_module, "read_pairs", lambda run_dir: [None])
    monkeypatch.setattr(estimate_module, "recorded_run", lambda recordings: recorded)
    found = {of.task: of for of in compare(own, path, tmp_path)}
    for name in ("copy in", "fill", "step", "copy out"):
        assert found[name].estimated_s == pytest.approx(found[name].recorded_s, rel=1e-6), name
    whole = found["a step of the run"]  # on the cores that there are
    assert whole.estimated_s == pytest.approx(whole.recorded_s, rel=0.05)
    assert whole.recorded_s > 1.0
    print_compared(list(found.values()))
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"a step of the run +\d+\.\d\d +\d+\.\d\d +[+-]\d%", last)
    recorded.ended.pop()
    with pytest.raises(ConfigError, match=facts(len(plan), tmp_path, len(plan) - 1)):
        compare(own, path, tmp_path)
