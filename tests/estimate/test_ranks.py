"""A job of several ranks before it runs: what its first rank exchanges and computes, and what follows for the pace."""

from collections.abc import Iterator

import pytest

from rowcast.analysis.estimate import estimate as module
from rowcast.analysis.estimate.estimate import estimate_job, estimated
from rowcast.analysis.estimate.pipeline import Planned
from rowcast.analysis.estimate.planned import plan_job
from rowcast.analysis.estimate.rates_file import DeviceRates, KernelRates
from rowcast.analysis.scan.steps import GroupShares, Sharing
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs, with_placements
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.parts import owner_of
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.made_up_device import PARAMETERS, device, host, job

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


def counts(planned: Planned, kernel: str, count: str) -> list[float]:
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
