"""A job's steps from a made-up device, on one rank and several: which task takes how long, and what follows for the
pace.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rowcast.analysis.estimate import estimate as module
from rowcast.analysis.estimate.estimate import combinations, estimate_job, estimated, walk, walk_recorded
from rowcast.analysis.estimate.pipeline import HANDOVERS, Pipeline, PlannedStep, run
from rowcast.analysis.estimate.planned import plan_job
from rowcast.analysis.estimate.rates_file import DeviceRates, KernelRates
from rowcast.analysis.estimate.recorded import RecordedRun
from rowcast.analysis.scan import GroupShares, Sharing
from rowcast.command_line.prefetcher import app
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs, with_placements
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.parts import owner_of
from rowcast.runtime import machine
from rowcast.runtime.disk import render, seal
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.made_up_device import PARAMETERS, device, host, job


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_cores", lambda: 64.0)


def rows_of(planned: PlannedStep, task: str, *kernels: str) -> float:
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


ROW_BYTES = 4 * 4  # fp32, as wide as the tables of the made-up job


def exchanging(
    exchange: dict[str, float] | None = None, network: dict[str, float] | None = None, per_step: float = 0.0
) -> DeviceRates:
    own = device(per_step)
    for name, terms in (("exchange", exchange), ("network", network), ("dense sums", {"1": 0.0})):
        if terms is not None:
            own.kernels[name] = KernelRates(terms=terms)
    return own


def simulated(own: Job) -> Iterator[GroupShares]:
    """What `simulate --ranks` counts of each step, all ranks at once."""
    sharing = Sharing(group_specs(own), own.ranks.count, own.ranks.num_parts)
    for scheduled in schedule(own, open_reader(own), None):
        yield from sharing.of(scheduled.batch)


def counts(planned: PlannedStep, kernel: str, count: str) -> list[float]:
    """Of each call of the kernel."""
    return [call.counts[count] for call in planned.calls if call.kernel == kernel and count in call.counts]


def test_the_vectors_of_placed_tables_travel_in_both_directions() -> None:
    own = job(ranks={"count": 4, "parts": 8, "per_host": 4})
    own = with_placements(own, ["table"] * len(own.tables))
    (group,) = group_specs(own)
    owned = sum(owner_of(table, 4) == 0 for table in group.tables)
    of_rank = own.data.batch_size // 4
    longer = max(owned * 3, len(group.tables) - owned) * of_rank * ROW_BYTES
    first, *_ = plan_job(own)[0]
    assert counts(first, "exchange", "bytes") == [0.0, 0.0, longer, longer], "rows and gradients, vectors and theirs"


@pytest.mark.parametrize(("gradients", "gradient_bytes"), [("fp32", ROW_BYTES), ("bf16", ROW_BYTES // 2)])
def test_the_first_rank_exchanges_what_a_simulation_of_all_ranks_counts(gradients: str, gradient_bytes: int) -> None:
    own = job(ranks={"count": 4, "parts": 8, "per_host": 2, "gradients": gradients})
    plan, wiring = plan_job(own)
    assert wiring.num_ranks == 4
    for planned, shares in zip(plan, simulated(own), strict=True):
        looked_up, owned = shares.exchanged[0], shares.exchanged[:, 0]
        rows = shares.part_rows[:2].sum()
        assert counts(planned, "lookup", "rows") == [rows]
        trained = counts(planned, "update adagrad", "rows")
        both_ways = [ROW_BYTES, gradient_bytes] if trained else [ROW_BYTES]
        in_host, across = max(looked_up[1], owned[1]), max(looked_up[2:].sum(), owned[2:].sum())
        sums = [] if trained else [4.0], [] if trained else [4.0 * 2]  # of an evaluation: its losses
        assert counts(planned, "exchange", "bytes") == [in_host * nbytes for nbytes in both_ways] + sums[0]
        assert counts(planned, "network", "bytes") == [across * nbytes for nbytes in both_ways] + sums[1]
        moved = [call.counts["rows"] for call in planned.calls if call.task == "step" and call.kernel == "gather"]
        assert moved[0] == owned.sum()
        if trained:
            assert trained == [shares.owner_rows[0]]
            additions = rows + owned.sum() - looked_up.sum() - shares.owner_rows[0]
            assert moved[1:] == [own for own in (additions, looked_up.sum(), shares.owner_rows[0]) if own]
    assert max(planned.batch for planned in plan) == own.data.batch_size / 4


def test_an_exchange_takes_what_its_bytes_take_in_the_host_and_across() -> None:
    own = job(ranks={"count": 4, "per_host": 2})
    plan, _ = plan_job(own)
    found = estimated(own, plan, exchanging({"1": 1e6, "bytes": 1.0}, {"bytes": 1000.0}), host()).durations
    slice_bytes = 4 * PARAMETERS / 4
    for step, planned in enumerate(plan):
        near, far = (sum(counts(planned, kernel, "bytes")) for kernel in ("exchange", "network"))
        if counts(planned, "update adagrad", "rows"):  # rows, gradients, and the sums in two exchanges
            expected = 4e6 + near + 1000 * far + 2 * (slice_bytes * (1 + 1000 * 2))
        else:
            expected = 2e6 + near + 1000 * far
        assert found("exchange", step) == pytest.approx(expected)


def test_the_slowest_exchange_gives_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "host_rates", lambda job: host())
    [found] = estimate_job(job(ranks={"count": 2}, checkpoint={"every": 0}), [exchanging({"1": 0.25})], "the job")
    assert found.bound_by[0][0] == "exchange"
    assert found.step_s == pytest.approx(4 * 0.25, rel=0.1), "rows, gradients, slices and their sums"


def test_pairs_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a core of its own a pair fetches and computes in turn; on two it does both at once."""
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    monkeypatch.setattr(module, "host_rates", lambda job: host(read=0.1, first=0.1))
    free = {"1": 0.0}

    def pace(per_host: int) -> float:
        own = job(ranks={"count": 2, "per_host": per_host}, checkpoint={"every": 0}, lookahead={"depth": 4})
        [found] = estimate_job(own, [exchanging(free, free, per_step=1.0)], "the job")
        assert ("have 1 of this host's cores: " in capsys.readouterr().out) == (per_host == 2)
        return found.step_s

    assert pace(per_host=2) > 1.5 * pace(per_host=1)


@pytest.mark.parametrize(("free", "margin"), [(2.0, "+-10%"), (0.3, "+-25%")])
def test_the_margin_is_that_of_the_load(
    free: float, margin: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    monkeypatch.setattr(module, "free_cores", lambda: free)
    monkeypatch.setattr(module, "host_rates", lambda job: host())
    estimate_job(job(), [device()], "the job")
    said = capsys.readouterr().out
    assert margin in said
    assert ("other programs leave 0.3 of the 2 cores" in said) == (free < 1)


def test_free_cores_are_idle_or_wait_for_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 0 500 0 0 0 0 0 0\ncpu0 1 2\n")
    monkeypatch.setattr(machine, "STAT", stat)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    later = "cpu  160 5 5 520 10 0 0 0 0 0\n"  # 70 busy, 30 idle
    monkeypatch.setattr(time, "sleep", lambda seconds: stat.write_text(later))
    assert machine.free_cores() == pytest.approx(0.6)
    stat.unlink()
    assert machine.free_cores() == 2


def test_parts_of_one_trainer_are_computed_one_after_the_other() -> None:
    rates = device(model_forward={"1": 100.0, "batch": 1.0})

    def first_s(**ranks: int) -> float:
        """Seconds of the first train step, in which only losses and sums take any."""
        own = job(ranks=ranks)
        plan, wiring = plan_job(own)
        assert wiring.num_ranks == 1
        return estimated(own, plan, rates, host()).durations("step", 0)

    assert first_s() == pytest.approx(100 + 64)
    rates.kernels["dense sums"] = KernelRates(terms={"parts": 1000.0})
    assert first_s(parts=4) == pytest.approx(4 * (100 + 16) + 4000)


@pytest.mark.parametrize(
    ("rates", "per_host", "sentence"),
    [
        (device(), 4, facts("dense sums", "trainer rates --config")),
        (exchanging(), 4, facts("exchange", "trainer rates --config")),
        (exchanging({"1": 0.0}), 2, facts("network", "--network-gbs", "several hosts")),
    ],
)
def test_rates_without_what_carries_the_exchange_are_refused(rates: DeviceRates, per_host: int, sentence: str) -> None:
    own = job(ranks={"count": 4, "per_host": per_host})
    plan, _ = plan_job(own)
    with pytest.raises(ConfigError, match=sentence):
        estimated(own, plan, rates, host())
