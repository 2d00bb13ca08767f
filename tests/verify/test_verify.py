"""`--verify` finds and names every row that is stale, torn or lost on its way, and is silent where nothing is wrong."""

import itertools
from collections.abc import Callable

import pytest
from torch import Tensor

from rowcast.prefetcher.stores.store import RowStore
from rowcast.trainer.device.streams import scatter
from rowcast.trainer.step.barrier import TrainerState
from rowcast.trainer.step.cache import ArrivedStep
from tests.support.batches import OPTIMIZERS
from tests.support.comparisons import assert_equal_bits
from tests.support.driver import InProcessRun
from tests.support.repeats import count
from tests.verify.harm import (
    LosesWrite,
    ReturnsOld,
    Tears,
    flip,
    flip_all,
    flip_byte,
    on_way_home,
    on_way_to_device,
    swap_with_next,
)
from tests.verify.targets import Target, assert_noticed, fetched_again, targets, times_home_before, work

WAYS = [
    pytest.param(optimizer, num_groups, share, seed, id=f"{optimizer}-{num_groups}-{share}-{seed}")
    for (optimizer, num_groups, share), seed in zip(
        itertools.product(OPTIMIZERS, (1, 2), (1.0, 0.05)), itertools.count()
    )
]
every_way = pytest.mark.parametrize(("optimizer", "num_groups", "share", "seed"), WAYS)


def pick(found: list[Target], seed: int) -> Target:
    """Another one for each seed; never of step 0, whose pieces carry a checksum of their own in the ring."""
    found = [target for target in found if target.step > 0]
    assert found, "no row to do harm to"
    return found[seed * 7 % len(found)]


def only(group: int, harm: Callable[[RowStore], RowStore], num_groups: int) -> Callable[[RowStore], RowStore]:
    """`harm` for the group's store, and every other as it is. Stores are made in the order of their groups."""
    number = itertools.count()
    return lambda store: harm(store) if next(number) % num_groups == group else store


@pytest.mark.parametrize("first", range(0, count(20, 200), 20))
def test_nothing_is_reported_where_nothing_is_wrong(first: int) -> None:
    for seed in range(first, first + 20):
        own = work(OPTIMIZERS[seed % 4], 1 + seed // 2 % 2)
        run = own.run(seed, share := (1.0, 0.05)[seed // 4 % 2], mirrored=seed % 5 == 0).run()
        assert_equal_bits(run, own.losses, own.end)
        verified = run.prefetcher.counters.rows_verified
        if share == 1.0:
            moves = [group for plan in run.plans for group in plan.groups]
            assert verified["given"] == verified["filled"] == sum(len(group.fetch_keys) for group in moves)
            assert verified["dropped"] == sum(len(group.evict_keys) - group.num_dirty for group in moves)
            assert verified["returned"] == run.prefetcher.counters.total("rows_written_back")
            assert verified["kept"] > 0
        assert sum(verified.values()) > 0


@every_way
def test_a_write_that_the_store_loses_is_noticed_when_the_row_is_read_again(
    optimizer: str, num_groups: int, share: float, seed: int
) -> None:
    own = work(optimizer, num_groups)
    plans = own.plans(seed % 2)
    target = pick([t for t in targets(plans, share, "dirty") if fetched_again(plans, t) is not None], seed)
    harm = only(target.group, lambda store: LosesWrite(store, target.key, times_home_before(plans, target)), num_groups)
    again = fetched_again(plans, target)
    sentence = (
        f"^{target.name(own.job)} is stale.*gives other bytes at step {again} than it took after step {target.step} "
    )
    assert_noticed(own.run(seed, share, harm), sentence)


@every_way
def test_a_lost_write_is_noticed_at_the_end_where_its_row_is_not_read_again(
    optimizer: str, num_groups: int, share: float, seed: int
) -> None:
    own = work(optimizer, num_groups)
    plans = own.plans(seed % 2)
    target = pick([t for t in targets(plans, share, "dirty") if fetched_again(plans, t) is None], seed)
    harm = only(target.group, lambda store: LosesWrite(store, target.key, times_home_before(plans, target)), num_groups)
    sentence = (
        f"^{target.name(own.job)} is stale.*at the barrier at step {plans[-1].step} than it took "
        f"after step {target.step} "
    )
    assert_noticed(own.run(seed, share, harm), sentence)


@every_way
@pytest.mark.parametrize("kind", [ReturnsOld, Tears])
def test_a_row_that_the_store_gives_old_or_torn_is_noticed(
    kind: type[ReturnsOld | Tears], optimizer: str, num_groups: int, share: float, seed: int
) -> None:
    own = work(optimizer, num_groups)
    plans = own.plans(seed % 2)
    again = [t for t in targets(plans, share, "dirty") if fetched_again(plans, t) is not None]
    target = pick([t for t in again if times_home_before(plans, t)] or again, seed)
    harm = only(target.group, lambda store: kind(store, target.key), num_groups)
    assert_noticed(
        own.run(seed, share, harm), f"^{target.name(own.job)} is stale, torn or lost: the store gives other bytes at"
    )


@every_way
@pytest.mark.parametrize("seeded", [True, False])
def test_a_row_that_changes_on_its_way_to_the_device_is_noticed(
    seeded: bool, optimizer: str, num_groups: int, share: float, seed: int
) -> None:
    own = work(optimizer, num_groups)
    target = pick(list(targets(own.plans(seed % 2), share, "fetch")), seed)
    run = own.run(seed, share, seeded_streams=seeded)
    on_way_to_device(run, target, flip_byte)
    assert_noticed(
        run, f"^{target.name(own.job)} is stale or torn: its slot at step {target.step} does not hold .*.1 of "
    )


@every_way
def test_two_rows_that_change_places_are_noticed(optimizer: str, num_groups: int, share: float, seed: int) -> None:
    own = work(optimizer, num_groups)
    target = pick(list(targets(own.plans(seed % 2), share, "fetch")), seed)
    run = own.run(seed, share)
    on_way_to_device(run, target, swap_with_next)
    assert_noticed(run, f"is stale or torn: its slot at step {target.step} does not hold ")


@every_way
def test_rows_that_are_filled_into_wrong_slots_are_noticed(
    optimizer: str, num_groups: int, share: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = work(optimizer, num_groups).run(seed, share)
    fill = run.streams.fill

    def misplaced(source: Tensor, slots: Tensor, rows: Tensor) -> None:
        fill.run(lambda: scatter(source, slots.roll(1), rows))

    monkeypatch.setattr(fill, "scatter", misplaced)
    assert_noticed(run, "is stale or torn: its slot at step 0 does not hold ")


@every_way
def test_a_clean_row_whose_slot_was_overwritten_is_noticed_when_it_leaves(
    optimizer: str, num_groups: int, share: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = work(optimizer, num_groups)
    target = pick(list(targets(own.plans(seed % 2), share, "clean")), seed)
    run = own.run(seed, share)
    overwrite_after_use(run, monkeypatch, target)
    assert_noticed(run, f"^{target.name(own.job)} was not trained, but its slot at step {target.step} does not hold ")


def overwrite_after_use(run: InProcessRun, monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    """Flips a bit of the target's slot behind the last step that uses it."""
    train, evaluate = run.runner.train, run.runner.evaluate

    def overwrite(step: ArrivedStep) -> None:
        if step.step == target.after:
            flip(run.records[target.group], target.slot)

    def harmful_train(step: ArrivedStep, loss: Tensor) -> None:
        train(step, loss)
        overwrite(step)

    def harmful_evaluate(step: ArrivedStep) -> None:
        evaluate(step)
        overwrite(step)

    monkeypatch.setattr(run.runner, "train", harmful_train)
    monkeypatch.setattr(run.runner, "evaluate", harmful_evaluate)


@every_way
def test_a_victim_whose_bytes_change_on_the_way_home_is_noticed(
    optimizer: str, num_groups: int, share: float, seed: int
) -> None:
    own = work(optimizer, num_groups)
    target = pick(list(targets(own.plans(seed % 2), share, "dirty")), seed)
    run = own.run(seed, share)
    on_way_home(run, target, flip_byte)
    assert_noticed(
        run,
        f"^{target.name(own.job)} is torn or lost: other bytes came home at step {target.step} than were in its slot",
    )


@every_way
def test_rows_of_a_barrier_that_change_on_the_way_home_are_noticed(
    optimizer: str, num_groups: int, share: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = work(optimizer, num_groups)
    last = own.plans(seed % 2)[-1].step
    run = own.run(seed, share)
    fill, gather = run.streams.fill, run.streams.fill.gather

    def harmful(rows: Tensor, slots: Tensor, out: Tensor) -> None:
        gather(rows, slots, out)
        if run.trainer.barrier.state is TrainerState.GATHERING:
            fill.run(lambda: flip_all(out))

    monkeypatch.setattr(fill, "gather", harmful)
    assert_noticed(
        run,
        f"^row [0-9]+ of table [a-z_]+ is torn or lost: other bytes came home at step {last} than were in its slot",
    )


def test_rows_outside_the_share_are_not_followed() -> None:
    own = work("sgd", 2)
    plans = own.plans(0)
    followed = {target.key for target in targets(plans, 0.05, "dirty")}
    lost = next(
        t for t in targets(plans, 1.0, "dirty") if t.key not in followed and fetched_again(plans, t) is not None
    )
    harm = only(lost.group, lambda store: LosesWrite(store, lost.key, times_home_before(plans, lost)), 2)
    assert own.run(0, 0.05, harm).run().trainer.finished
