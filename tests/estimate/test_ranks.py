"""A job of several ranks before it runs: what its first rank exchanges and computes, and what follows for the pace."""

from collections.abc import Iterator

import numpy as np
import pytest

from rowcast.analysis.estimate import estimate as estimate_module
from rowcast.analysis.estimate.device_rates import DeviceRates, KernelRates
from rowcast.analysis.estimate.durations import EstimatedDurations, HostRow
from rowcast.analysis.estimate.estimate import estimate_job, print_estimates
from rowcast.analysis.estimate.planned import plan_job
from rowcast.analysis.estimate.walk import walk
from rowcast.analysis.scan.shares import GroupShares, Sharing, part_groupings
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.protocol.parts import parts_of
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.made_up_device import FREE, PARAMETERS, device, job

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
    [group], ranks = group_specs(own), own.ranks
    groupers, sharing = groupers_of((group,)), Sharing(group, ranks.count, ranks.num_parts)
    for scheduled in schedule(own, open_reader(own), None):
        [groupings] = part_groupings(groupers, parts_of(scheduled.batch, ranks.num_parts, ()))
        yield sharing.of(groupings, scheduled.batch.size)


def test_the_first_rank_exchanges_what_a_simulation_of_all_ranks_counts() -> None:
    own = job(ranks={"count": 4, "parts": 8, "per_host": 2})
    plan, wiring = plan_job(own)
    assert wiring.num_ranks == 4
    for planned, shares in zip(plan, simulated(own), strict=True):
        assert planned.counted is not None
        counts, [group] = planned.counted.counts, planned.counted.counts.groups
        assert counts.parts == 2
        assert group.exchange is not None
        looked_up, owned = shares.exchanged[0], shares.exchanged[:, 0]
        assert (group.exchange.received, group.exchange.sent) == (looked_up.sum(), owned.sum())
        assert group.exchange.in_host == max(looked_up[1], owned[1])
        assert group.exchange.across == max(looked_up[2:].sum(), owned[2:].sum())
        assert group.rows == shares.part_rows[:2].sum()
        if counts.trains:
            assert group.exchange.trained == shares.owner_rows[0]
            assert group.exchange.additions == group.rows + owned.sum() - looked_up.sum() - shares.owner_rows[0]
    whole = max(planned.counted.counts.batch for planned in plan if planned.counted is not None)
    assert whole == own.data.batch_size / 4


def test_an_exchange_takes_what_its_bytes_take_in_the_host_and_across() -> None:
    own = job(ranks={"count": 4, "per_host": 2})
    plan, _ = plan_job(own)
    found = EstimatedDurations(own, plan, exchanging({"1": 1e6, "bytes": 1.0}, {"bytes": 1000.0}), FREE)
    slice_bytes = 4 * PARAMETERS / 4
    for step, planned in enumerate(plan):
        assert planned.counted is not None
        [group] = planned.counted.counts.groups
        assert group.exchange is not None
        near, far = group.exchange.in_host * ROW_BYTES, group.exchange.across * ROW_BYTES
        if planned.counted.counts.trains:  # rows, gradients, and the sums in two exchanges
            expected = 4e6 + 2 * (near + 1000 * far) + 2 * (slice_bytes * (1 + 1000 * 2))
        else:
            expected = 2e6 + near + 1000 * far + 4 * (1 + 1000 * 2)
        assert found("exchange", step) == pytest.approx(expected)


def test_the_slowest_exchange_gives_the_pace() -> None:
    own = job(ranks={"count": 2}, checkpoint={"every": 0})
    plan, wiring = plan_job(own)
    walked = walk(plan, wiring, EstimatedDurations(own, plan, exchanging({"1": 0.25}), FREE), {})
    assert walked.bound_by[0][0] == "exchange"
    [found] = estimate_job(own, [exchanging({"1": 0.25})], FREE)
    assert found.ranks == 2
    assert found.walked.step_s == pytest.approx(4 * 0.25, rel=0.1), "rows, gradients, slices and their sums"


def test_pairs_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a core of its own a pair fetches and computes in turn; on two it does both at once."""
    monkeypatch.setattr(estimate_module, "usable_cores", lambda: 2)
    free = {"1": 0.0}

    def pace(per_host: int) -> float:
        own = job(ranks={"count": 2, "per_host": per_host}, checkpoint={"every": 0}, lookahead={"depth": 4})
        rates = exchanging(free, free, per_step=1.0)
        fetch = HostRow(read=np.full(1, 0.1), first=np.full(1, 0.1), write=np.zeros(1))
        [found] = estimate_job(own, [rates], fetch)
        print_estimates([found])
        assert ("have 1 of this host's cores: " in capsys.readouterr().out) == (per_host == 2)
        return found.walked.step_s

    assert pace(per_host=2) > 1.5 * pace(per_host=1)


def test_parts_of_one_trainer_are_computed_one_after_the_other() -> None:
    rates = device(model_forward={"1": 100.0, "batch": 1.0})

    def first_s(**ranks: int) -> float:
        """Seconds of the first train step, in which only losses and sums take any."""
        own = job(ranks=ranks)
        plan, wiring = plan_job(own)
        assert wiring.num_ranks == 1
        return EstimatedDurations(own, plan, rates, FREE)("step", 0)

    assert first_s() == pytest.approx(100 + 64)
    rates.kernels["dense sums"] = KernelRates(terms={"parts": 1000.0})
    assert first_s(parts=4) == pytest.approx(4 * (100 + 16) + 4000)


@pytest.mark.parametrize(
    ("rates", "per_host", "sentence"),
    [
        (device(), 4, facts("dense sums", "trainer rates --config")),
        (exchanging(), 4, facts("exchange", "trainer rates --config")),
        (exchanging({"1": 0.0}), 2, facts("network", "hosts", "trainer rates --network-gbs")),
    ],
)
def test_rates_without_what_carries_the_exchange_are_refused(rates: DeviceRates, per_host: int, sentence: str) -> None:
    own = job(ranks={"count": 4, "per_host": per_host})
    plan, _ = plan_job(own)
    with pytest.raises(ConfigError, match=sentence):
        EstimatedDurations(own, plan, rates, FREE)
