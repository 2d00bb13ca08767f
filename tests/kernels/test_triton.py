"""The kernels for devices have the bits of plain torch operations, but for what only a device can have."""

import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_check.reference import as_on_a_device, reduce_in_chunks
from rowcast.trainer import kernels
from rowcast.trainer.kernels import CHUNK_LOOKUPS, Kernels, torch_ops, triton_ops
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
from tests.support.full_capacity import bits

DIMS = (3, 4, 33, 128)
OURS: Kernels = triton_ops


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few look-ups make a long row."""
    monkeypatch.setattr("rowcast.trainer.kernels.CHUNK_LOOKUPS", 5)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("most", [0, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_lookup_has_the_bits_of_torch(dim: int, dtype: torch.dtype, most: int, weighted: bool) -> None:
    group = random_group(dim, 20, 37, most, weighted)
    divisors = divisors_of(group) if most and not weighted else None
    layout = Layout(dim=dim, kind="rowwise_adagrad", dtype=dtype)
    rows = layout.rows(layout.records(23))
    rows.weight[group.slots[0], 0] = -0.0
    assert torch.equal(bits(OURS.lookup(rows, group, divisors)), bits(torch_ops.lookup(rows, group, divisors)))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("most", "weighted"), [(0, False), (0, True), (3, True), (3, False)])
def test_row_gradients_have_the_bits_of_torch_on_each_chunk(dim: int, most: int, weighted: bool) -> None:
    group = random_group(dim, 20, 37, most, weighted)
    assert 0 < len(group.chunks.long_rows) < len(group.chunks.chunk_rows) - 1
    divisors = divisors_of(group) if most and not weighted else None
    grads = random_gradients(37, dim)
    ours = OURS.reduce(grads, group, divisors)
    assert torch.equal(bits(ours), bits(reduce_in_chunks(grads, group, divisors)))
    torch.testing.assert_close(ours, torch_ops.reduce(grads, group, divisors))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "master"), PRECISIONS)
@pytest.mark.parametrize(("dim", "clip"), [(12, None), (33, 0.01)])
def test_a_step_of_the_rows_has_the_bits_of_torch(
    kind: str, dtype: torch.dtype, master: bool, dim: int, clip: float | None
) -> None:
    layout = Layout(dim=dim, kind=kind, dtype=dtype, master=master)
    records, slots, grads = layout.records(23), torch.randperm(23)[:17].int(), random_gradients(17, dim)
    rule = rule_of(kind, clip)
    ours = trained(layout, records, lambda rows: OURS.apply(rows, slots, grads, rule))
    with as_on_a_device():
        theirs = trained(layout, records, lambda rows: torch_ops.apply(rows, slots, grads, rule))
    assert torch.equal(ours, theirs)
    on_a_cpu = trained(layout, records, lambda rows: torch_ops.apply(rows, slots, grads, rule))
    steps = (layout.rows(after.view(torch.float32)) for after in (ours, on_a_cpu))
    our_rows, cpu_rows = steps
    torch.testing.assert_close(our_rows.weight, cpu_rows.weight)
    torch.testing.assert_close(our_rows.states, cpu_rows.states)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "master"), PRECISIONS)
def test_an_update_has_the_bits_of_its_two_halves(kind: str, dtype: torch.dtype, master: bool) -> None:
    shapes = ((4, 0, False), (33, 2, True), (100, 2, False))
    dim, most, weighted = shapes[(KINDS.index(kind) + PRECISIONS.index((dtype, master))) % 3]
    group = random_group(dim, 12, 37, most, weighted)
    assert len(group.chunks.long_rows)
    divisors = divisors_of(group) if most and not weighted else None
    layout, rule = Layout(dim=dim, kind=kind, dtype=dtype, master=master), rule_of(kind, 0.1 if most else None)
    records, grads = layout.records(15), random_gradients(37, dim)
    row_grads = OURS.reduce(grads, group, divisors)
    halves = trained(layout, records, lambda rows: OURS.apply(rows, group.unique_slots, row_grads, rule))
    whole = trained(layout, records, lambda rows: OURS.update(rows, grads, group, divisors, rule))
    assert torch.equal(whole, halves)
    assert not torch.equal(whole, records.view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_1024_columns_are_looked_up_and_updated(kind: str) -> None:
    group, layout = random_group(1, 4, 9, 2), Layout(dim=1024, kind=kind)
    records, grads = layout.records(7), random_gradients(9, 1024)
    assert torch.equal(
        OURS.lookup(layout.rows(records), group, None), torch_ops.lookup(layout.rows(records), group, None)
    )
    ours = trained(layout, records, lambda rows: OURS.update(rows, grads, group, None, rule_of(kind)))
    with as_on_a_device():
        row_grads = reduce_in_chunks(grads, group, None)
        theirs = trained(
            layout, records, lambda rows: torch_ops.apply(rows, group.unique_slots, row_grads, rule_of(kind))
        )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("num_lookups", [128, 129, 256, 400])
def test_one_row_that_every_lookup_uses_is_summed_in_chunks(num_lookups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rowcast.trainer.kernels.CHUNK_LOOKUPS", CHUNK_LOOKUPS)
    group, layout = random_group(1, 1, num_lookups, 0), Layout(dim=8, kind="adagrad")
    assert len(group.chunks.chunk_rows) == (0 if num_lookups == 128 else -(-num_lookups // 128))
    records, grads = layout.records(4), random_gradients(num_lookups, 8)
    row_grads = OURS.reduce(grads, group, None)
    assert torch.equal(bits(row_grads), bits(reduce_in_chunks(grads, group, None)))
    assert torch.equal(bits(row_grads), bits(torch_ops.reduce(grads, group, None))) == (
        num_lookups <= 129
    )  # a chunk of one is the same addition
    ours = trained(layout, records, lambda rows: OURS.update(rows, grads, group, None, rule_of("adagrad")))
    halves = trained(layout, records, lambda rows: OURS.apply(rows, group.unique_slots, row_grads, rule_of("adagrad")))
    assert torch.equal(ours, halves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "master"), PRECISIONS)
def test_padding_and_other_slots_are_never_changed(kind: str, dtype: torch.dtype, master: bool) -> None:
    group, layout = random_group(2, 6, 21, 3), Layout(dim=5, kind=kind, dtype=dtype, master=master)
    records = layout.records(30)
    after = trained(
        layout, records, lambda rows: OURS.update(rows, random_gradients(21, 5), group, None, rule_of(kind))
    )
    may_change = torch.zeros_like(records)
    rows = layout.rows(may_change)
    slots = group.unique_slots.long()
    for part in (rows.weight, rows.master, *rows.states):
        if part is not None:
            part.view(torch.int16 if part.itemsize == 2 else torch.int32)[slots] = -1
    fixed = ~may_change.view(torch.int32)
    assert torch.equal(after & fixed, records.view(torch.int32) & fixed)
    assert fixed[slots].any()


def test_no_entry_of_the_block_table_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    group, layout = random_group(3, 20, 37, 4), Layout(dim=12, kind="rowwise_adagrad", dtype=torch.float16)
    records, grads = layout.records(23), random_gradients(37, 12)
    found = []
    for rows, chunk, unroll in ((64, 16, 4), (2, 2, 1), (128, 32, 3)):
        monkeypatch.setitem(triton_ops.BLOCK_TABLE, 16, ((rows, 4), (rows, 1), (chunk, 2 * rows, 1), (chunk, 1)))
        for name in ("UNROLL_LOOKUP", "UNROLL_CHUNK", "UNROLL_UPDATE", "UNROLL_JOIN"):
            monkeypatch.setattr(triton_ops, name, unroll)
        for cached in (
            triton_ops.blocks_for,
            triton_ops.lookup_options,
            triton_ops.reduce_options,
            triton_ops.train_options,
        ):
            cached.cache_clear()
        after = trained(
            layout, records, lambda rows: OURS.update(rows, grads, group, None, rule_of("rowwise_adagrad", 0.3))
        )
        found.append(
            (after, OURS.lookup(layout.rows(records), group, divisors_of(group)), OURS.reduce(grads, group, None))
        )
    for cached in (
        triton_ops.blocks_for,
        triton_ops.lookup_options,
        triton_ops.reduce_options,
        triton_ops.train_options,
    ):
        cached.cache_clear()
    for after, pooled, row_grads in found[1:]:
        assert torch.equal(after, found[0][0])
        assert torch.equal(bits(pooled), bits(found[0][1]))
        assert torch.equal(bits(row_grads), bits(found[0][2]))


def test_nothing_is_launched_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def __getitem__(self, grid: Any) -> Any:
            raise AssertionError(f"launched on {grid}")

    for name in ("lookup_kernel", "segments_kernel", "join_kernel", "apply_kernel"):
        monkeypatch.setattr(triton_ops, name, Refused())
    layout = Layout(dim=5, kind="adam")
    records = layout.records(4)
    rows, rule = layout.rows(records), rule_of("adam")
    no_lookups, no_bags = random_group(1, 3, 7, 0), random_group(1, 3, 0, 0)
    empty_bags = replace(no_bags, offsets=torch.zeros(8, dtype=torch.int32))
    with pytest.raises(AssertionError, match=r"launched on \(1,\)"):
        OURS.lookup(rows, no_lookups, None)
    for group, num_bags in ((no_bags, 0), (empty_bags, 7)):
        assert torch.equal(OURS.lookup(rows, group, None), torch.zeros(num_bags, 5))
        assert OURS.reduce(torch.zeros(num_bags, 5), group, None).shape == (0, 5)
        OURS.update(rows, torch.zeros(num_bags, 5), group, None, rule)
    OURS.apply(rows, torch.empty(0, dtype=torch.int32), torch.empty(0, 5), rule)
    assert torch.equal(records, layout.records(4))


def test_pooled_gradients_may_have_any_strides() -> None:
    group, grads = random_group(4, 9, 21, 3), random_gradients(12, 21).T
    assert not grads.is_contiguous()
    assert torch.equal(bits(OURS.reduce(grads, group, None)), bits(reduce_in_chunks(grads.contiguous(), group, None)))
    same = torch.ones(()).expand(21, 12)
    assert torch.equal(bits(OURS.reduce(same, group, None)), bits(reduce_in_chunks(same.contiguous(), group, None)))


def test_slots_may_lie_beyond_2_to_the_31_elements() -> None:
    """Of memory that is promised and, but for a few rows, never touched."""
    layout, slots = Layout(dim=128, kind="adagrad"), torch.tensor([3, 2**23 + 5, 2**23 + 1], dtype=torch.int32)
    with promised((2**23 + 9) * 256) as records:
        rows, same = layout.rows(records), layout.records(3)
        records[slots.long()] = same
        assert rows.weight.stride(0) * int(slots.max()) > 2**31
        group = group_of(np.array([0, 1, 1, 2, 0]), None, None, slots)
        small = replace(
            group,
            slots=torch.tensor([0, 1, 1, 2, 0], dtype=torch.int32),
            unique_slots=torch.arange(3, dtype=torch.int32),
        )
        grads = random_gradients(5, 128)
        assert torch.equal(OURS.lookup(rows, group, None), OURS.lookup(layout.rows(same), small, None))
        OURS.update(rows, grads, group, None, rule_of("adagrad"))
        expected = trained(layout, same, lambda rows: OURS.update(rows, grads, small, None, rule_of("adagrad")))
        assert torch.equal(records[slots.long()].view(torch.int32), expected)


@contextmanager
def promised(num_floats: int) -> Iterator[torch.Tensor]:
    """f32 [num_floats / 256, 256] zeros without memory behind them; skips where the machine promises none."""
    try:
        memory = mmap.mmap(
            -1, 4 * num_floats, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        )
    except OSError as error:
        pytest.skip(f"no room for {4 * num_floats} bytes of addresses: {error}")
    records = torch.frombuffer(memory, dtype=torch.float32).view(-1, 256)
    yield records


def test_no_kernel_adds_in_an_order_of_its_own_or_is_tried_out_while_it_runs() -> None:
    files = sorted(Path(kernels.__file__).parent.rglob("*.py"))
    assert len(files) > 4
    for file in files:
        assert not re.search(r"autotune|atomic", file.read_text().replace("no atomics", "")), file.name
    for file in files:
        waits = r"\.item\(|\.cpu\(|nonzero|\.tolist\(|synchronize"
        assert not (file.name.startswith("triton_") and re.search(waits, file.read_text())), file.name


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts launches, and operators of torch that neither make a view nor allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ("empty", "new_empty"):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def test_look_ups_and_updates_issue_their_launches_and_no_operator_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launched:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, **options: counts.found.update([self._name])

    for name in ("lookup_kernel", "segments_kernel", "join_kernel"):
        monkeypatch.setattr(triton_ops, name, Launched(name))
    group, layout, counts = random_group(1, 20, 37, 4, weighted=True), Layout(dim=5, kind="adam"), Counts()
    rows, divisors, grads = layout.rows(layout.records(23)), divisors_of(group), random_gradients(37, 5)
    with counts:
        OURS.lookup(rows, group, divisors)
        OURS.update(rows, grads, group, divisors, rule_of("adam"))
    assert counts.found == dict.fromkeys(("lookup_kernel", "segments_kernel", "join_kernel"), 1)
