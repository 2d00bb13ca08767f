"""A job's steps from a made-up device: which task takes how long, and what follows for the pace."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rowcast.analysis.estimate import estimate as module
from rowcast.analysis.estimate.estimate import combinations, estimate_job, estimated, walk_recorded
from rowcast.analysis.estimate.pipeline import HANDOVERS, Pipeline, Planned, run
from rowcast.analysis.estimate.planned import plan_job
from rowcast.analysis.estimate.rates_file import KernelRates
from rowcast.analysis.estimate.recorded import RecordedRun
from rowcast.analysis.estimate.walk import walk
from rowcast.command_line.prefetcher import app
from rowcast.job.tables import group_specs
from rowcast.runtime.disk import render, seal
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.made_up_device import device, host, job


def rows_of(planned: Planned, task: str, *kernels: str) -> float:
    return sum(call.counts["rows"] for call in planned.calls if call.task == task and call.kernel.startswith(kernels))


def test_rows_are_counted_as_the_planner_moves_them() -> None:
    plan, _ = plan_job(job())
    [group] = group_specs(job())
    first = sum(rows_of(own, "fetch", "first") for own in plan)
    fetched = first + sum(rows_of(own, "fetch", "read") for own in plan)
    assert 0 < first < fetched, "rows come back to so small a cache"
    assert first <= group.num_rows
    moved = sum(rows_of(own, "write back", "write") + rows_of(own, "barrier", "write") for own in plan)
    assert fetched - 1000 <= moved <= fetched + 1000 * sum(own.barrier for own in plan)
    updated = [any(call.kernel.startswith("update") for call in own.calls) for own in plan]
    assert updated.count(False) == 300 // 64 + 1, "evaluation steps"


def test_each_task_takes_what_its_counts_and_rates_say() -> None:
    own = job()
    plan, _ = plan_job(own)
    rates = device(per_step=0.5, scatter={"rows": 1.0}, copy_out={"bytes": 2.0}, update_adagrad={"rows": 3.0})
    found = estimated(own, plan, rates, host(read=1e-3, first=2e-3, write=4e-3)).durations
    [group] = group_specs(own)
    for step, planned in enumerate(plan):
        first, again, back = (
            rows_of(planned, *which) for which in (("fetch", "first"), ("fetch", "read"), ("write back", "write"))
        )
        assert found("fill", step) == pytest.approx(first + again)
        assert found("copy out", step) == pytest.approx(2 * back * group.record_bytes)
        assert found("step", step) == pytest.approx(0.5 + 3 * rows_of(planned, "step", "update"))
        assert found("fetch", step) == pytest.approx(1e-3 * again + 2e-3 * first)
        assert found("write back", step) == pytest.approx(4e-3 * back)
        assert found("rows sent", step) == 2e-4


@pytest.mark.parametrize(
    ("per_step", "rows", "bottleneck"),
    [
        (1.0, {}, "step"),
        (0.0, {"read": 1e-3, "first": 1e-3}, "fetch"),
        (0.0, {"write": 1e-2}, "write back"),
    ],
)
def test_the_slowest_task_gives_the_pace(per_step: float, rows: dict[str, float], bottleneck: str) -> None:
    own = job(checkpoint={"every": 0})
    plan, wiring = plan_job(own)
    durations = estimated(own, plan, device(per_step), host(**rows)).durations
    walked = walk(plan, wiring, durations, {})
    assert walked.bound_by[0][0] == bottleneck
    steady = range(len(plan) // 4, len(plan) - 5)
    assert walked.step_s == pytest.approx(sum(durations(bottleneck, step) for step in steady) / len(steady), rel=0.2)


def test_a_step_calls_each_kernel_as_often_as_its_job_has_it() -> None:
    plan, _ = plan_job(job())
    calls = max((own.calls for own in plan), key=len)
    assert [(call.task, call.kernel) for call in calls if call.task not in module.OF_HOST] == [
        ("copy in", "copy in"),
        ("copy in", "copy in"),
        ("fill", "gather"),
        ("copy out", "copy out"),
        ("fill", "scatter"),
        ("step", "lookup"),
        ("step", "update adagrad"),
        ("step", "model forward"),
        ("step", "model backward"),
        ("step", "model update"),
    ]


def test_settings_multiply() -> None:
    found = combinations(["lookahead.depth=1", "cache.capacity=1MiB", "lookahead.depth=2"])
    assert found == [("lookahead.depth=1", "cache.capacity=1MiB"), ("lookahead.depth=2", "cache.capacity=1MiB")]
    assert combinations([]) == [()]
    with pytest.raises(ConfigError, match=facts("--vary depth", "lookahead.depth=2")):
        combinations(["depth"])


def test_each_device_and_setting_has_a_line_with_its_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "host_rates", lambda job: host())
    monkeypatch.setattr(
        module, "load_job", lambda path, settings: job(lookahead={"depth": int(settings[-1].partition("=")[2])})
    )
    arguments = ["estimate", "--config=unused", "--vary=lookahead.depth=1", "--vary=lookahead.depth=2"]
    for per_step in (1.0, 0.5):
        path = tmp_path / f"{per_step}.json"
        path.write_bytes(render(seal(device(per_step))))
        arguments.append(f"--rates={path}")
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    lines = [line.split() for line in found.output.splitlines() if " ms a step" in line]
    assert [line[0] for line in lines] == 2 * ["lookahead.depth=1"] + 2 * ["lookahead.depth=2"]
    assert [float(line[3]) for line in lines] == pytest.approx([1000, 500, 1000, 500], rel=0.1)
    assert found.output.count("  ms: ") == 4


def test_a_run_that_took_what_was_estimated_has_its_pace_and_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, rates = job(checkpoint={"every": 0}, lookahead={"bundle": 1}), device(per_step=1.0, scatter={"rows": 1e-3})
    plan, wiring = plan_job(own)
    durations = estimated(own, plan, rates, host()).durations
    pipeline = Pipeline(plan, wiring, durations, {})
    run(pipeline.threads)
    recorded = RecordedRun(
        first_step=0,
        seconds={name: {step: durations(name, step) for step in range(len(plan))} for name in module.TASKS},
        usual={name: durations(name, 0) for name in HANDOVERS},
        begins={},
        ended=[task.ended_s for task in pipeline.done],
    )
    monkeypatch.setattr(module, "host_rates", lambda job: host())
    monkeypatch.setattr(module, "read_pairs", lambda run_dir: [None])
    monkeypatch.setattr(module, "recorded_run", lambda recordings: recorded)
    [found] = estimate_job(own, [rates], "the job")
    walk_recorded(own, tmp_path, ["step=0.5"])
    lines = capsys.readouterr().out.splitlines()
    [of_rates, of_run] = [line for line in lines if line.startswith("  ms: ")]
    tasks = [line.partition("copy in")[2] for line in (of_rates, of_run)]  # planning is measured anew
    assert tasks[0] == tasks[1]
    assert float(lines[2].split(" ms a step")[0].split()[-1]) == pytest.approx(1e3 * found.step_s, rel=0.05)
    assert "walked again" in lines[3]
    assert lines[-1].startswith("with step=0.5: ")
    recorded.ended.pop()
    with pytest.raises(ConfigError, match=facts(len(plan), tmp_path, len(plan) - 1)):
        walk_recorded(own, tmp_path, [])


def test_rates_of_another_job_are_refused_and_a_kernel_that_is_missing_is_named() -> None:
    other = job(model={"bottom_mlp": [8, 4]})
    with pytest.raises(ConfigError, match=facts("another job's model", "trainer rates --config")):
        estimated(other, [], device(), host())
    with pytest.raises(ConfigError, match=facts("update sgd", "trainer rates --config")):
        device().seconds("update sgd", rows=1.0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], facts("--rates FILE", "--run DIR")),
        (["--rates=a", "--run=b"], facts("--rates FILE", "--run DIR")),
        (["--rates=a", "--change=step=1"], facts("--vary", "--change")),
        (["--run=b", "--vary=a=1"], facts("--vary", "--change")),
        (["--rates=a", "--advised"], facts("--advised", "rowcast advise")),
        (["--rates=a", "--compare=b"], facts("--compare", "--run")),
    ],
)
def test_options_that_do_not_go_together_and_those_that_left_are_refused(arguments: list[str], sentence: str) -> None:
    found = CliRunner().invoke(app, ["estimate", "--config=examples/demo.toml", *arguments])
    assert found.exit_code == 2
    assert re.search(sentence, " ".join(found.output.split()))


def test_a_model_that_takes_long_is_outside_what_was_measured_and_its_error_is_the_margin() -> None:
    own = job()
    plan, _ = plan_job(own)
    rates = device(model_forward={"1": 1.0})
    kernel = KernelRates(terms={"1": 1.0}, measured={"batch": (1.0, 10.0)}, error=0.3)
    rates.kernels["model forward"] = kernel
    found = estimated(own, plan, rates, host())
    assert found.outside == ["model forward"]
    assert found.margin == pytest.approx(0.6)
