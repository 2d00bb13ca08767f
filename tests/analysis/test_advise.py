"""`rowcast advise`: its estimates against the exact simulation of known data, its choice, and what it prints."""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rowcast.analysis.advise import advise, read
from rowcast.analysis.advise.advise import AdviseOptions, run_advise
from rowcast.analysis.advise.cost import (
    Demand,
    Rates,
    RowRates,
    cores_need,
    demand,
    least_step,
    probe_planning,
    probe_rows,
)
from rowcast.analysis.advise.read import Observed, followed, group_shares, observe, thinned
from rowcast.analysis.advise.recommend import Advice, Point, cores_text, first_without, knee, parts, sentences
from rowcast.analysis.advise.trials import moved, round_capacities, rounded_up, smallest_capacity, stretches
from rowcast.analysis.scan import StepRows
from rowcast.analysis.show import AnalysisProgress, tell
from rowcast.analysis.simulate.ranks import simulate_ranks
from rowcast.analysis.simulate.simulate import Grid, simulate
from rowcast.command_line.prefetcher import app
from rowcast.job.file import parse_job, with_values
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.planner.first_batches import measure, slots_of
from rowcast.prefetcher.planner.horizon import id_bytes
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.prefetcher.readers.reader import Pending, Reader, open_reader, schedule, stream_columns
from rowcast.protocol.batch import Batch, Kind
from rowcast.protocol.parts import Rank, belonging
from rowcast.runtime.arrays import GOLDEN
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import free_memory
from rowcast.runtime.telemetry.format_numbers import size_text
from tests.support.batches import make_batch, small_job
from tests.support.driver import InProcessRun, Settings
from tests.support.facts import facts
from tests.support.jobs import job_content, write_job

ROWS = 40_000
BATCH = 512
Ids = Callable[[np.random.Generator, int, int], "np.ndarray[tuple[int], np.dtype[np.int64]]"]


# made data: two tables, each with one feature, in two groups of records


def zipf(random: np.random.Generator, step: int, count: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The same popularity at all times; a multiplication spreads neighbours."""
    return (ROWS ** random.random(count)).astype(np.int64) * 7919 % ROWS


def drift(random: np.random.Generator, step: int, count: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """New rows keep coming and old ones are forgotten."""
    return (500 * step + random.geometric(1 / 2000, count)) % ROWS


KINDS: dict[str, Ids] = {"zipf": zipf, "drift": drift}


def made(job: Job, *, kind: str, steps: int, multi_hot: bool = False) -> Callable[[Kind, int], Iterator[Batch]]:
    return partial(made_batches, KINDS[kind], steps, multi_hot)


def made_batches(ids: Ids, steps: int, multi_hot: bool, split: Kind, epoch: int) -> Iterator[Batch]:
    random = np.random.default_rng(epoch if split == "train" else 99)
    for step in range(steps if split == "train" else 3):
        lengths = random.integers(0, 4, 2 * BATCH) if multi_hot else np.ones(2 * BATCH, np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        yield Batch(
            dense=np.zeros((BATCH, 1), np.float32),
            labels=np.zeros(BATCH, np.float32),
            ids=ids(random, step, int(offsets[-1])),
            offsets=offsets if multi_hot else None,
        )


def made_job(kind: str, steps: int = 60, *, multi_hot: bool = False, **sections: Any) -> Job:
    tables = [
        {"name": f"t{dim}", "num_embeddings": ROWS, "embedding_dim": dim, "features": [f"f{dim}"]} for dim in (8, 16)
    ]
    data = {"format": "tests.analysis.test_advise:made", "batch_size": BATCH}
    data |= {"options": {"kind": kind, "steps": steps, "multi_hot": multi_hot}} | sections.pop("data", {})
    model = {"kind": "tests.support.batches:small_model"}
    return parse_job(job_content(Path("unused"), data=data, tables=tables, tables_from=None, model=model, **sections))


def observed(job: Job, share: float) -> Observed:
    reader = open_reader(job, stream_columns(job)[0])
    return observe(job, reader, share, None, 1e9, lambda: None)


def request(share: float = 1.0, **values: Any) -> AdviseOptions:
    """Without a measurement of the tables, which takes a moment."""
    return AdviseOptions(sample=share, **{"gather_gbs": 1.0} | values)


def advise_job(job: Job, options: AdviseOptions) -> Advice:
    return advise.advise_job(job, options, AnalysisProgress())


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data is not followed as a whole."""
    monkeypatch.setattr(read, "LEAST_ROWS", 1000)


# the estimate


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(made_job("zipf"), id="stationary"),
        pytest.param(made_job("drift"), id="drift"),
        pytest.param(made_job("zipf", multi_hot=True), id="multi-hot"),
        pytest.param(made_job("drift", 25, data={"epochs": 3}), id="epochs"),
    ],
)
def test_rows_moved_by_some_rows_stand_for_those_of_all(job: Job) -> None:
    all_rows, some = observed(job, 1.0), observed(job, 0.2)
    assert max(some.shares) < 0.35, "otherwise it is no estimate"
    assert some.unique_rows.tolist() == all_rows.unique_rows.tolist()
    assert sum(some.distinct_rows) == pytest.approx(sum(all_rows.distinct_rows), rel=0.05)
    smallest = max(smallest_capacity(all_rows), smallest_capacity(some))
    for factor in (1, 2, 4):
        exact, estimate = (moved(own, job, factor * smallest, lambda: None) for own in (all_rows, some))
        assert estimate.fetched.sum() == pytest.approx(exact.fetched.sum(), rel=0.06), f"{factor} times the smallest"
        assert estimate.written_back.sum() + estimate.flushed.sum() == pytest.approx(
            exact.written_back.sum() + exact.flushed.sum(), rel=0.06
        )


@pytest.mark.usefixtures("few_rows")
def test_the_margin_covers_the_error_of_most_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    job = made_job("zipf", 40)
    exact = moved(observed(job, 1.0), job, 400_000, lambda: None).fetched.sum()
    covered = 0
    for seed in range(12):
        monkeypatch.setattr(read, "GOLDEN", GOLDEN ^ np.uint64(seed << 20))
        some = observed(job, 0.1)
        estimate = moved(some, job, 400_000, lambda: None)
        margin = 3 * np.sqrt((estimate.fetched_error**2).sum())
        covered += abs(estimate.fetched.sum() - exact) <= margin
        assert 0 < margin < 0.15 * exact
    assert covered >= 11


def test_where_every_row_is_followed_the_numbers_are_those_of_a_simulation() -> None:
    job = made_job("zipf", 15, data={"epochs": 2}, eval={"every": 4}, lookahead={"horizon": "auto", "depth": 2})
    advice = advise_job(job, request())
    for point in (advice.recommended.predicted, *advice.curve[:3]):
        own = with_values(job, {"cache": {"capacity": point.capacity_bytes, "policy": "lookahead"}})
        traffic = point.traffic
        [exact] = simulate(own, Grid(), lambda own: schedule(own, open_reader(own)))
        counts = exact.rows_fetched, exact.rows_flushed, 0
        assert (traffic.rows_fetched, traffic.rows_flushed, traffic.margin) == counts
        assert traffic.hit_ratio == pytest.approx(exact.hit_ratio)
        steps = advice.read.steps + advice.read.eval_steps
        assert traffic.rows_fetched_per_step * steps == pytest.approx(exact.rows_fetched)
        assert traffic.rows_written_back_per_step * steps == pytest.approx(
            (exact.rows_written_back or 0) - (exact.rows_flushed or 0)
        )
    assert (advice.read.steps, advice.read.eval_steps) == (30, 3 * 9)


def test_of_several_ranks_the_first_is_advised_with_the_numbers_of_a_simulation_of_all() -> None:
    job = made_job("zipf", 15, data={"epochs": 2}, ranks={"count": 3, "parts": 6}, lookahead={"horizon": "auto"})
    advice = advise_job(job, request())
    for point in (advice.curve[0], advice.recommended.predicted):
        own = with_values(job, {"cache": {"capacity": point.capacity_bytes}})
        [exact] = simulate_ranks([own], lambda own: schedule(own, open_reader(own)), per_step=True)
        assert exact.skipped is None, "a capacity that holds the batches of every rank"
        assert exact.per_step is not None
        assert point.traffic.rows_fetched == sum(rows[0] for rows in exact.per_step.rows_fetched)
        written = point.traffic.rows_written_back_per_step * len(exact.per_step.step)
        assert written == pytest.approx(sum(rows[0] for rows in exact.per_step.rows_written_back))
    assert any("one of 3 ranks" in note for note in advice.notes)


def test_batches_that_come_again_are_decoded_once() -> None:
    data = {"epochs": 3, "eval_fraction": 0.2, "shuffle": "none", "synthetic": {"samples": 64 * 50}}
    job = parse_job(job_content(Path("unused"), data=data, eval={"every": 7}, cache={"capacity": "100KiB"}))
    reader = CountingReader(open_reader(job))
    seen = observe(job, reader, 1.0, None, 1e9, lambda: None)
    groupers = groupers_of(group_specs(job))
    expected = [
        [grouper.group(grouper.lookups(turn.batch)).keys.tolist() for grouper in groupers]
        for turn in schedule(job, open_reader(job))
    ]
    assert [[rows.keys.tolist() for rows in step.scanned.rows] for step in seen.steps] == expected
    assert [step.scanned.scheduled.step for step in seen.steps] == list(range(len(expected)))
    assert reader.decoded < len(expected) / 3


def test_shuffled_epochs_are_read_anew() -> None:
    data = {"epochs": 2, "shuffle": "full", "synthetic": {"samples": 64 * 40}}
    job = parse_job(job_content(Path("unused"), data=data, cache={"capacity": "100KiB"}))
    steps = observed(job, 1.0).steps
    assert [step.unique_rows for step in steps[:40]] != [step.unique_rows for step in steps[-40:]]


class CountingReader:
    """Counts the batches that are decoded."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self.decoded = reader, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def pending(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Pending]:
        def counted(decode: Pending, rank: Rank) -> Any:
            self.decoded += 1
            return decode(rank)

        return (partial(counted, decode) for decode in self._reader.pending(split, epoch, start))


# which rows are followed


def test_the_followed_share_of_any_keys_is_about_the_share_and_grows_with_it() -> None:
    keys = np.arange(200_000, dtype=np.int64) << 3 | 5 << 48
    few, more = followed(keys, 0.05), followed(keys, 0.2)
    assert len(few) == pytest.approx(10_000, rel=0.05)
    assert len(more) == pytest.approx(40_000, rel=0.05)
    assert np.isin(few, more).all()
    assert len(followed(keys, 1.0)) == len(keys)


def test_small_groups_are_followed_as_a_whole() -> None:
    assert group_shares(0.05, (100, 10_000, 10**6)) == (1.0, 0.5, 0.05)


def test_a_thinned_batch_weighs_as_much_as_the_whole_one() -> None:
    job = made_job("zipf", 3, multi_hot=True)
    for turn in schedule(job, open_reader(job)):
        groupings = [grouper.group(grouper.lookups(turn.batch)) for grouper in groupers_of(group_specs(job))]
        whole = [StepRows.of(grouping) for grouping in groupings]
        thin = [thinned(rows, 0.1) for rows in whole]
        assert id_bytes(groupings, num_levels=1) == id_bytes(whole, num_levels=1) == id_bytes(thin, num_levels=1)
        assert sum(rows.num_unique for rows in thin) < 0.2 * sum(rows.num_unique for rows in whole)


# the choice


def test_capacities_are_round_and_less_than_an_octave_apart() -> None:
    found = round_capacities(1_000_000, 90_000_000)
    assert found[0] > 1_000_000
    assert found[-2] < 90_000_000 <= found[-1]
    assert all(log2(b / a) < 0.6 for a, b in pairwise(found))
    assert [size_text(nbytes) for nbytes in found[:4]] == ["1MiB", "1.5MiB", "2MiB", "3MiB"]
    assert all(parse_bytes(size_text(nbytes)) == nbytes for nbytes in [*round_capacities(0, 2**45), 12345])
    assert [rounded_up(n) for n in (1, 2, 3, 3.5, 1025)] == [2, 2, 3, 4, 1536]


@pytest.mark.parametrize(
    ("savings", "at"),
    [([0.5, 0.3, 0.09, 0.01], 2), ([0.05, 0.2, 0.0], 2), ([0.0, 0.0], 0), ([0.5, 0.5], 1), ([0.01], 0)],
)
def test_the_knee_is_where_no_further_doubling_saves_a_tenth(savings: list[float], at: int) -> None:
    assert knee(savings) == at


def test_the_smallest_capacity_without_stalls_has_none_above_it() -> None:
    assert first_without([True, False, True, False, False]) == 3
    assert first_without([False]) == 0


def test_a_stage_takes_what_its_rows_take_and_a_stretch_their_mean() -> None:
    assert stretches(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [2, 4, 6]
    assert stretches(np.array([1.0, 3.0]), 5).tolist() == [2]
    job = made_job("zipf", 6)
    seen = observed(job, 1.0)
    rows = dict.fromkeys((group.name for group in seen.groups), RowRates(read=1e6, first=1e5, write=1e6))
    rates = Rates(rows=rows, decode_s=0, plan_s=0, plan_bytes=0, link_gbs=1, step_ms=10)
    smallest, everything = (moved(seen, job, capacity, lambda: None) for capacity in (smallest_capacity(seen), 10**8))
    read_s = demand(seen, everything, rates, 1).seconds[0]
    assert read_s == pytest.approx(stretches(seen.first_touches @ seen.record_bytes / 1e5, 2)), "all that comes is new"
    known = float(((smallest.fetched - everything.fetched) @ seen.record_bytes).sum())
    assert known > 0
    more_s = demand(seen, smallest, rates, len(seen)).seconds[0] - demand(seen, everything, rates, len(seen)).seconds[0]
    assert more_s == pytest.approx(known / 1e6 / len(seen)), (
        "one stretch: rows that come again, at the rate of those that were trained"
    )


def test_only_what_a_larger_cache_would_keep_counts_against_a_capacity() -> None:
    own, everything = demand_of([900, 500, 300, 400]), demand_of([900, 200, 300, 100])
    assert least_step(own, everything) == pytest.approx(0.5)
    assert least_step(everything, everything) == 0


def demand_of(stretch_ms: list[int]) -> Demand:
    return Demand(seconds=np.array([stretch_ms, [0] * len(stretch_ms)]) / 1000)


def test_a_short_step_or_slow_tables_ask_for_more_than_the_knee() -> None:
    job = made_job("zipf", 40)
    usual = advise_job(job, request(step_ms=1000.0))
    assert usual.recommended.predicted.capacity_bytes == usual.choice.knee_bytes
    beyond = next(point for point in usual.curve if point.capacity_bytes > usual.choice.knee_bytes)
    assert beyond.least_step_ms > 0
    slow = advise_job(job, request(step_ms=1.01 * beyond.least_step_ms))
    assert slow.choice.no_stall_bytes == slow.recommended.predicted.capacity_bytes == beyond.capacity_bytes
    assert "does not wait" in slow.recommended.reasons["cache.capacity"]
    hopeless = advise_job(job, request(step_ms=1e-6))
    assert hopeless.choice.no_stall_bytes is None
    assert hopeless.recommended.predicted.capacity_bytes == hopeless.choice.knee_bytes
    assert any("at any capacity" in note for note in hopeless.notes)


def test_twice_as_much_saves_what_the_curve_says() -> None:
    curve = advise_job(made_job("drift", 30), request()).curve
    by_capacity = {point.capacity_bytes: point for point in curve}
    doubled = [
        (point, by_capacity[2 * point.capacity_bytes]) for point in curve if 2 * point.capacity_bytes in by_capacity
    ]
    assert len(doubled) > 3
    for point, twice in doubled:
        saved = 1 - twice.traffic.bytes_fetched_per_step / point.traffic.bytes_fetched_per_step
        assert point.doubling_saves == pytest.approx(max(0.0, saved))
    assert curve[-1].doubling_saves == 0


def test_a_budget_for_ids_that_costs_rows_is_raised() -> None:
    job = made_job("zipf", 60, lookahead={"horizon": "auto", "depth": 1, "id_bytes": "150KiB"})
    advice = advise_job(job, request())
    assert advice.recommended.id_bytes == "768KiB"
    assert tomllib.loads(advice.recommended.toml)["lookahead"]["id_bytes"] == "768KiB"
    assert "id_bytes" not in advise_job(made_job("zipf", 60), request()).recommended.toml


# what to paste


def test_the_recommended_sections_train_with_the_rows_that_were_counted() -> None:
    job = small_job("adam", "multi", data={"format": "tests.analysis.test_advise:small_data"}, eval={"every": 5})
    advice = advise_job(job, request())
    chosen = with_values(job, tomllib.loads(advice.recommended.toml))
    assert chosen.cache.capacity == advice.recommended.capacity
    batches = list(schedule(chosen, open_reader(chosen)))
    run = InProcessRun(
        chosen,
        batches,
        Settings(
            slots=slots_of(chosen, group_specs(chosen), measure(group_specs(chosen), batches)), seeded_streams=False
        ),
    ).run()
    assert run.prefetcher.planner.counters.rows_fetched == advice.recommended.predicted.traffic.rows_fetched
    assert len(run.results.losses) == advice.read.steps == 12


def small_data(job: Job) -> Callable[[Kind, int], Iterator[Batch]]:
    def batches(split: Kind, epoch: int) -> Iterator[Batch]:
        random = np.random.default_rng(epoch if split == "train" else 77)
        return (make_batch(job, "multi", 64, random) for _ in range(12 if split == "train" else 2))

    return batches


def test_each_value_has_its_reason_above_it() -> None:
    found = advise_job(made_job("zipf", 20), request()).recommended
    values = {f"{name}.{key}" for name, section in tomllib.loads(found.toml).items() for key in section}
    assert values == set(found.reasons) == {"cache.capacity", "cache.policy", "lookahead.depth", "lookahead.horizon"}
    lines = found.toml.splitlines()
    assert all(
        lines[at - 1].startswith("# ") for at, line in enumerate(lines) if " = " in line and not line.startswith("#")
    )
    assert max(map(len, lines)) <= 80


def test_shares_of_the_job_are_left_out_and_that_is_said() -> None:
    job = made_job("zipf", 10, cache={"capacity": "1GiB", "groups": {"fp32_d8_sgd": "100KiB"}}, optimizer=plain_sgd())
    advice = advise_job(job, request())
    assert any(note.startswith("cache.groups of the job was ignored") for note in advice.notes)
    without = advise_job(made_job("zipf", 10, optimizer=plain_sgd()), request())
    assert [point.traffic for point in advice.curve] == [point.traffic for point in without.curve]


def plain_sgd() -> dict[str, Any]:
    return {"sparse": {"kind": "sgd", "lr": 0.1}, "dense": {"kind": "sgd", "lr": 0.1}}


def test_the_beginning_of_a_run_can_be_asked_about() -> None:
    advice = advise_job(made_job("zipf", 30), request(max_steps=7))
    assert (advice.read.steps, advice.read.eval_steps) == (7, 3)


# the command


def shown(job: Job, width: int, **values: Any) -> list[str]:
    console = Console(width=width, force_terminal=True, color_system=None, highlight=False)
    with console.capture() as text:
        tell(parts(advise_job(job, request(**values))), console)
    return text.get().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_of_80_or_120_columns_holds_every_line(width: int) -> None:
    lines = shown(made_job("zipf", 30, data={"eval_fraction": 0.0}), width)
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("* ") for line in lines) == 1, "the recommended capacity is marked"
    assert "[cache]" in lines
    assert "[lookahead]" in lines
    text = " ".join(lines)
    for part in (
        "Read: ",
        "Diminishing returns: ",
        "No stalls",
        "Limit: ",
        "a step takes 10 ms (--step-ms)",
        "`rowcast check`",
        "Every row was followed",
    ):
        assert part in text


def test_what_was_assumed_is_said_and_what_was_given_is_not_called_assumed() -> None:
    text = " ".join(shown(made_job("zipf", 10), 120, step_ms=3.0, link_gbs=50.0, gather_gbs=2.0))
    assert "a step takes 3 ms, the link moves 50 GB/s each way, tables are read and written at 2 GB/s" in text


def test_the_cores_are_the_sum_of_the_stages_over_a_step() -> None:
    own = Demand(seconds=np.array([[0.002, 0.004], [9.0, 9.0], [9.0, 9.0], [0.001, 0.001]]))
    need = cores_need(own, Rates(rows={}, decode_s=0.005, plan_s=0.007, plan_bytes=0, link_gbs=1, step_ms=4))
    assert [*need.values()] == pytest.approx([5, 7, 3, 1])
    assert "16 ms" in cores_text(need, 4)
    assert "4 cores" in cores_text(need, 4)
    advice = advise_job(made_job("zipf", 10), request(step_ms=3.0))
    assert min(ms for name, ms in advice.cores.items() if name != "writing rows") > 0
    assert any(sentence.startswith("Cores:") for sentence in sentences(advice))


def test_json_is_all_that_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    run_advise(made_job("zipf", 20), AdviseOptions(json=True, gather_gbs=1.0, sample=1.0))
    out, err = capfd.readouterr()
    advice = msgspec.json.decode(out, type=Advice)
    assert set(msgspec.json.decode(out)) == {field.name for field in fields(Advice)}
    assert set(msgspec.json.decode(out)["curve"][0]) == {field.name for field in fields(Point)}
    assert err == ""
    assert advice.read.followed_share == {"fp32_d8_adagrad": 1.0, "fp32_d16_adagrad": 1.0}


def test_the_command_advises_and_refuses(tmp_path: Path) -> None:
    config = write_job(tmp_path / "job.toml", job_content(tmp_path / "run", data={"synthetic": {"samples": 64 * 20}}))
    good = CliRunner().invoke(app, ["advise", "--config", str(config), "--sample", "0.5", "--gather-gbs", "1"])
    assert good.exit_code == 0, good.output
    assert "[lookahead]" in good.output
    bad = CliRunner().invoke(app, ["advise", "--config", str(config), "--step-ms", "0"])
    assert bad.exit_code == ConfigError.exit_code
    assert not (tmp_path / "run").exists(), "nothing is trained"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sample": 0.0}, "--sample 0.0: give a share above 0, at most 1"),
        ({"sample": 1.5}, "--sample 1.5"),
        ({"step_ms": -1.0}, "--step-ms -1.0: give a number above 0"),
        ({"link_gbs": 0.0}, "--link-gbs 0.0"),
        ({"gather_gbs": float("nan")}, "--gather-gbs nan"),
        ({"max_steps": 0}, "the run has no batch"),
    ],
)
def test_impossible_requests_are_refused_with_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_advise(made_job("zipf", 5), AdviseOptions(**options))


def test_followed_rows_that_do_not_fit_into_memory_are_refused() -> None:
    job = made_job("zipf", 50)
    with pytest.raises(
        ConfigError,
        match=facts("--sample 1", "followed rows"),
    ):
        advise.advise_job(job, request(), AnalysisProgress(), 100_000 / free_memory())


def test_rates_are_measured_with_the_store_and_the_planner_of_training() -> None:
    job = made_job("zipf", 10)
    seen = observed(job, 1.0)
    for group in seen.groups:
        rates = probe_rows(group, seed=1)
        assert min(rates.read, rates.first, rates.write) > 0
    seconds, nbytes = probe_planning(seen, belonging(job), 2, tuple(2 * n for n in seen.largest_batch_rows), 1)
    assert seconds > 0
    assert nbytes > 8 * seen.num_lookups / len(seen)


def test_a_job_with_a_memory_tier_is_sent_to_the_simulation_of_its_sizes() -> None:
    tiered = made_job("zipf", 20, store={"kind": "tiered", "memory": "3GiB"})
    text, without = (" ".join(advise_job(job, request()).notes) for job in (tiered, made_job("zipf", 20)))
    command = "`rowcast simulate --config job.toml --store-memory 1.5GiB --store-memory 3GiB --store-memory 6GiB`"
    assert text == f"{without} With these sections in the job file, {command} {text.partition(command + ' ')[2]}"
