"""The compiled kernels have the bits of plain torch operations, and where they should not, those serve instead."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from rowcast.job.tables import group_specs
from rowcast.runtime.stages import ThreadPool, cuts
from rowcast.trainer.device.cuda import warm_up_sqrt
from rowcast.trainer.kernels import GroupLookup, Kernels, RecordViews, Rule, all_groups, compiled_ops, torch_ops
from rowcast.trainer.kernels.choose import choose_kernels, difference
from rowcast.trainer.kernels.compiled_ops import CompiledOps, updates
from tests.kernels.lookups import (
    KINDS,
    PRECISIONS,
    Layout,
    divisors_of,
    group_of,
    random_gradients,
    random_group,
    rule_of,
    trained,
)
from tests.support.full_capacity import bits, make_job

DIMS = (1, 5, 16, 33, 128)
STEPS = 3
# most look-ups, weighted, mean
SHAPES = ((0, False, False), (0, True, False), (3, False, False), (3, True, False), (3, False, True))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work so small that tests have it is shared out, in several blocks."""
    monkeypatch.setattr("rowcast.trainer.kernels.compiled_ops.MIN_FLOATS", 1)
    monkeypatch.setattr("rowcast.trainer.kernels.compiled_ops.BLOCK_FLOATS", 700)
    warm_up_sqrt()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2, 3], ids=lambda threads: f"{threads}-threads")
def ours(request: pytest.FixtureRequest) -> Kernels:
    return CompiledOps(request.param)


def stepped_by(kernels: Kernels, rows: RecordViews, **step: Any) -> None:
    kernels.update(rows, **step)


def assert_equal_steps(
    ours: Kernels, layout: Layout, group: GroupLookup, grads: Tensor, divisors: Tensor | None, rule: Rule
) -> None:
    """Look-ups, row gradients and records, over a few steps."""
    records = layout.records(33)
    for step in range(STEPS):
        rows, stepped = layout.rows(records), replace(rule, step=rule.step + step)
        assert torch.equal(bits(ours.lookup(rows, group, divisors)), bits(torch_ops.lookup(rows, group, divisors)))
        assert torch.equal(bits(ours.reduce(grads, group, divisors)), bits(torch_ops.reduce(grads, group, divisors)))
        step_of = partial(stepped_by, pooled_grad=grads, group=group, divisors=divisors, rule=stepped)
        expected, found = (trained(layout, records, partial(step_of, using)) for using in (torch_ops, ours))
        assert torch.equal(found, expected)
        assert not torch.equal(found, bits(records)), "nothing was trained"
        records = found.view(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("most", "weighted", "mean"), SHAPES)
def test_steps_have_the_bits_of_torch(
    ours: Kernels, kind: str, dim: int, most: int, weighted: bool, mean: bool
) -> None:
    group = random_group(dim, 30, 61, most, weighted)
    num_bags = len(group.slots) if group.offsets is None else len(group.offsets) - 1
    divisors = divisors_of(group) if mean else None
    assert_equal_steps(
        ours, Layout(dim=dim, kind=kind), group, random_gradients(num_bags, dim), divisors, rule_of(kind)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_any_groups_in_one_call_have_the_bits_of_torch_group_by_group(ours: Kernels, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    layouts, records, lookups, divisors, grads = [], [], [], [], []
    for number in range(int(rng.integers(1, 9))):
        dim, (dtype, master) = int(rng.integers(1, 40)), PRECISIONS[max(0, int(rng.integers(-6, len(PRECISIONS))))]
        most, num_bags = int(rng.integers(0, 4)), int(rng.integers(0, 70))
        group = random_group(100 * seed + number, 30, num_bags, most, bool(rng.integers(2)))
        layouts.append(Layout(dim=dim, kind=kind, dtype=dtype, master=master))
        records.append(layouts[-1].records(33, number))
        lookups.append(group)
        divisors.append(divisors_of(group) if most and rng.integers(2) else None)
        grads.append(random_gradients(num_bags, dim, number))
    found = []
    for kernels in map(all_groups, (ours, torch_ops)):
        after = [own.clone() for own in records]
        rows = [layout.rows(own) for layout, own in zip(layouts, after, strict=True)]
        groups = list(zip(rows, lookups, divisors, strict=True))
        pooled = kernels.lookup_all(groups)
        kernels.update_all(groups, grads, rule_of(kind, 0.01 if seed == 5 else None))
        found.append([*map(bits, pooled), *map(bits, after)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", range(4, 131, 9))
def test_every_width_has_the_bits_of_torch(kind: str, dim: int) -> None:
    group = random_group(dim, 30, 40, 0)
    assert_equal_steps(
        CompiledOps(1), Layout(dim=dim, kind=kind), group, random_gradients(40, dim), None, rule_of(kind)
    )


@pytest.mark.parametrize(("dtype", "master"), PRECISIONS[1:])
def test_rows_of_16_bits_are_trained_as_torch_trains_them(dtype: torch.dtype, master: bool) -> None:
    layout = Layout(dim=12, kind="adagrad", dtype=dtype, master=master)
    assert_equal_steps(
        CompiledOps(2), layout, random_group(1, 30, 61, 3), random_gradients(61, 12), None, rule_of("adagrad")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_clipped_rows_are_trained_as_torch_trains_them(kind: str) -> None:
    group = random_group(2, 30, 61, 3)
    assert_equal_steps(
        CompiledOps(2), Layout(dim=12, kind=kind), group, random_gradients(61, 12), None, rule_of(kind, clip=0.01)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf"), 1e-40, 1e-45, 3e38, -0.0])
def test_strange_gradients_make_what_torch_makes_of_them(ours: Kernels, kind: str, strange: float) -> None:
    group, layout = random_group(3, 30, 61, 0), Layout(dim=33, kind=kind)
    grads = random_gradients(61, 33)
    grads[::5, ::2], grads[1::5] = strange, -0.0
    records = layout.records(33)
    step_of = partial(stepped_by, pooled_grad=grads, group=group, divisors=None, rule=rule_of(kind))
    expected, found = (
        trained(layout, records, partial(step_of, using)).view(torch.float32) for using in (torch_ops, ours)
    )
    assert torch.equal(found.isnan(), expected.isnan()), "which bits a NaN has is up to the processor"
    assert torch.equal(bits(found.nan_to_num(9.0)), bits(expected.nan_to_num(9.0)))


def test_zeros_of_either_sign_are_looked_up_as_torch_does() -> None:
    layout = Layout(dim=5)
    records = layout.records(33)
    records[::2] = -0.0
    for most, weighted in ((0, False), (0, True), (2, False), (2, True)):
        group = random_group(4, 30, 61, most, weighted)
        rows = layout.rows(records)
        assert torch.equal(bits(CompiledOps().lookup(rows, group, None)), bits(torch_ops.lookup(rows, group, None)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [None, np.zeros(4, np.int64)], ids=["no bags", "empty bags"])
def test_a_step_without_look_ups_changes_nothing(
    ours: Kernels, kind: str, counts: "np.typing.NDArray[np.int64] | None"
) -> None:
    layout = Layout(dim=5, kind=kind)
    group = group_of(np.zeros(0, np.int64), counts, None, torch.arange(3, dtype=torch.int32))
    records = layout.records(3)
    num_bags = 0 if counts is None else len(counts)
    assert torch.equal(ours.lookup(layout.rows(records), group, None), torch.zeros(num_bags, 5))
    after = trained(layout, records, lambda own: ours.update(own, torch.zeros(num_bags, 5), group, None, rule_of(kind)))
    assert torch.equal(after, bits(records))


def test_gradients_that_are_not_contiguous_are_read_right() -> None:
    group, layout = random_group(5, 30, 61, 0), Layout(dim=12)
    wide = random_gradients(61, 24)
    assert_equal_steps(CompiledOps(2), layout, group, wide[:, ::2], None, rule_of("sgd"))
    assert_equal_steps(CompiledOps(2), layout, group, torch.ones(1).expand(61, 12), None, rule_of("sgd"))


def test_shares_cover_all_items_and_hold_about_as_many_parts() -> None:
    starts = np.array([0, 100, 101, 102, 103, 104, 200], np.int32)
    assert cuts(0, 6, 2, starts) == [0, 1, 6]
    assert cuts(3, 11, 3, None) == [3, 5, 8, 11]
    seen: list[tuple[int, int]] = []
    ThreadPool(3).share(lambda first, end: seen.append((first, end)), 2, 50, 4)
    assert sorted(seen)[0][0] == 2
    assert sorted(seen)[-1][1] == 50
    assert all(end == first for (_, end), (first, _) in zip(sorted(seen), sorted(seen)[1:], strict=False))
    assert len(seen) == 3


def test_an_error_in_a_thread_is_raised_for_the_caller() -> None:
    def work(first: int, end: int) -> None:
        if first:
            raise ValueError("in a thread")

    with pytest.raises(ValueError, match="in a thread"):
        ThreadPool(2).share(work, 0, 100, 4)


TABLES = [
    {"name": "a", "num_embeddings": 7, "embedding_dim": 16, "features": ["a"], "pooling": "mean"},
    {"name": "wide", "num_embeddings": 90, "embedding_dim": 33, "features": ["w", "v"], "pooling": "sum"},
    {"name": "b", "num_embeddings": 400, "embedding_dim": 16, "features": ["b"], "pooling": "sum"},
]
MODEL = {"kind": "tests.support.full_capacity:Concatenated"}


class Wrong(CompiledOps):
    """Changes the last bit of look-ups, or trains at another rate."""

    def __init__(self, num_threads: int, *, in_lookup: bool) -> None:
        super().__init__(num_threads)
        self._in_lookup = in_lookup

    def lookup(self, rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        pooled = super().lookup(rows, group, divisors)
        return pooled * (1 + 2**-23) if self._in_lookup else pooled

    def update(
        self, rows: RecordViews, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule
    ) -> None:
        super().update(
            rows, pooled_grad, group, divisors, rule if self._in_lookup else replace(rule, lr=rule.lr * (1 + 2**-22))
        )


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_are_right_pass_the_check(kind: str) -> None:
    job = make_job(TABLES, kind, MODEL)
    assert difference(CompiledOps(2), group_specs(job)) is None
    with capture_logs() as logs:
        assert isinstance(choose_kernels(torch.device("cpu"), job), CompiledOps)
    assert not [entry for entry in logs if entry["log_level"] == "warning"]


@pytest.mark.parametrize(
    ("in_lookup", "said"), [(True, "look-ups of single look-ups in"), (False, "updates by single look-ups in")]
)
def test_kernels_with_other_bits_are_found_and_torch_serves(
    in_lookup: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_ops, "CompiledOps", partial(Wrong, in_lookup=in_lookup))
    with capture_logs() as logs:
        assert choose_kernels(torch.device("cpu"), make_job(TABLES, "adagrad", MODEL)) is torch_ops
    (warning,) = logs
    assert warning["log_level"] == "warning"
    assert warning["differ"].startswith(said)


def test_the_check_leaves_torchs_random_numbers_alone() -> None:
    job = make_job(TABLES, "sgd", MODEL)
    before = torch.get_rng_state()
    difference(CompiledOps(), group_specs(job))
    assert torch.equal(torch.get_rng_state(), before)


def test_each_row_optimizer_with_a_compiled_update_is_known_whichever_file_is_imported_first() -> None:
    """It imports these loops, and they know it by its name."""
    assert {*updates()} == {"sgd", "adagrad", "rowwise_adagrad"}
