"""How plans are laid out and cut: each byte and row travels exactly once, aligned, in pieces of at most half a ring."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.tables import aligned, group_specs
from rowcast.protocol.plan import (
    ARRAY_ALIGNMENT,
    Piece,
    barrier_stamp,
    cut,
    make_block,
    plan_stamp,
    step_block,
    step_header,
)
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings

DTYPES = ("f4", "i4", "i8", "u1")
UNWRITTEN = 0xAB

sizes = st.integers(0, 5_000)
groups = st.lists(st.tuples(st.integers(0, 700), st.integers(1, 40).map(lambda n: 16 * n)), max_size=4)
payloads = st.integers(10, 120).map(lambda n: 64 * n)
arrays = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), min_size=1, max_size=2).map(tuple)),
    max_size=6,
)


def covered_bytes(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    return [(piece.arrays.offset, piece.arrays.nbytes) for piece in pieces if piece.arrays is not None]


def covered_rows(pieces: Sequence[Piece], group: int) -> list[tuple[int, int]]:
    return [(span.start, span.count) for piece in pieces for span in piece.rows if span.group == group]


def assert_contiguous(spans: list[tuple[int, int]], total: int) -> None:
    """Spans follow each other without gap, overlap or empty span, from 0 to `total`."""
    ends = [0, *(start + count for start, count in spans)]
    assert [start for start, _ in spans] == ends[:-1]
    assert all(count > 0 for _, count in spans)
    assert ends[-1] == total


def extents(piece: Piece, record_bytes: Sequence[int]) -> list[tuple[int, int]]:
    """Where the parts of a piece begin and end in its payload."""
    parts = [] if piece.arrays is None else [(0, piece.arrays.nbytes)]
    return parts + [(span.offset, span.offset + span.count * record_bytes[span.group]) for span in piece.rows]


@settings(max_examples=300)
@given(sizes, groups, payloads)
def test_pieces_hold_every_byte_and_every_row_once_in_order_aligned_and_end_where_the_next_part_would_not_fit(
    block_bytes: int, rows: list[tuple[int, int]], max_payload: int
) -> None:
    widths = [width for _, width in rows]
    pieces = cut(block_bytes, [n for n, _ in rows], widths, max_payload)
    assert_contiguous(covered_bytes(pieces), block_bytes)
    for group, (total, _) in enumerate(rows):
        assert_contiguous(covered_rows(pieces, group), total)
    order = [span.group for piece in pieces for span in piece.rows]
    assert order == sorted(order), "groups do not follow each other"
    first_rows = next((n for n, piece in enumerate(pieces) if piece.rows), len(pieces))
    assert all(piece.arrays is None for piece in pieces[first_rows + 1 :]), "arrays come after rows"
    for piece in pieces:
        parts = extents(piece, widths)
        assert all(start % ARRAY_ALIGNMENT == 0 for start, _ in parts)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(parts))
        assert piece.nbytes == (parts[-1][1] if parts else 0) <= max_payload
    for piece, following in itertools.pairwise(pieces):
        if following.arrays is not None:
            assert piece.nbytes == max_payload
        else:
            width = widths[following.rows[0].group]
            assert aligned(piece.nbytes, ARRAY_ALIGNMENT) + width > max_payload
    assert all(piece.nbytes for piece in pieces) or len(pieces) == 1


@settings(max_examples=300)
@given(sizes, groups, payloads, st.integers(1, 2000))
def test_the_rows_of_a_piece_fit_staging(
    block_bytes: int, rows: list[tuple[int, int]], max_payload: int, spare: int
) -> None:
    counts, widths = [n for n, _ in rows], [width for _, width in rows]
    staging_bytes = max(widths, default=0) + spare
    pieces = cut(block_bytes, counts, widths, max_payload, staging_bytes)
    for piece in pieces:
        assert piece.nbytes <= max_payload
        if piece.rows:
            assert piece.nbytes - piece.rows[0].offset <= staging_bytes
    spans = [span for piece in pieces for span in piece.rows]
    for group, count in enumerate(counts):
        assert [
            row for span in spans if span.group == group for row in range(span.start, span.start + span.count)
        ] == list(range(count))


def test_a_plan_with_nothing_in_it_is_one_empty_piece() -> None:
    assert cut(0, [0, 0], [64, 32], 640) == [Piece(number=0, count=1, arrays=None, rows=(), nbytes=0)]


def random_arrays(specs: list[tuple[str, tuple[int, ...]]]) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(len(specs))
    return {f"a{i}": rng.integers(0, 100, shape).astype(dtype) for i, (dtype, shape) in enumerate(specs)}


@settings(max_examples=200)
@given(arrays, st.integers(1, 3_000))
def test_a_block_written_in_pieces_gives_back_every_array_and_leaves_the_gaps(
    specs: list[tuple[str, tuple[int, ...]]], piece_bytes: int
) -> None:
    content = random_arrays(specs)
    block = make_block(content)
    out = np.full(block.nbytes, UNWRITTEN, np.uint8)
    for offset in range(0, block.nbytes, piece_bytes):
        block.write(offset, out[offset : offset + piece_bytes])
    in_an_array = np.zeros(block.nbytes, np.bool_)
    for spec, (name, array) in zip(block.specs, content.items(), strict=True):
        assert (spec.name, spec.dtype, spec.shape) == (name, array.dtype.str[1:], array.shape)
        assert spec.offset % ARRAY_ALIGNMENT == 0
        found = out[spec.offset : spec.offset + array.nbytes]
        assert found.tobytes() == array.tobytes()
        in_an_array[spec.offset : spec.offset + array.nbytes] = True
    assert in_an_array.sum() == sum(array.nbytes for array in content.values()), "arrays overlap"
    assert (out[~in_an_array] == UNWRITTEN).all()


def test_a_block_of_an_array_that_is_not_contiguous_holds_its_values_in_order() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    block = make_block({"transposed": array})
    out = np.zeros(block.nbytes, np.uint8)
    block.write(0, out)
    assert out[:48].view(np.int32).reshape(4, 3).tolist() == array.tolist()


def test_the_stamps_of_all_pieces_of_steps_and_barriers_differ() -> None:
    places = [(step, piece) for step in (0, 1, 2, 2**40) for piece in (0, 1, 2**20 - 1)]
    stamps = [stamp(*place) for stamp in (plan_stamp, barrier_stamp) for place in places]
    assert len(set(stamps)) == len(stamps)
    assert max(stamps) < 2**63, "a stamp is an int64"


@pytest.mark.parametrize("bags", ["single", "weighted"])
def test_a_plans_block_holds_its_arrays_and_its_header_their_counts(bags: Any) -> None:
    job = small_job("adagrad", bags, depth=1, horizon=2)
    batches = small_batches(job, bags)
    run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "one batch"))).run()
    assert any(group.num_dirty < len(group.evict_keys) for plan in run.plans for group in plan.groups), (
        "no clean victim"
    )
    for scheduled, plan in zip(batches, run.plans, strict=True):
        block = step_block(scheduled.batch, plan, 0)
        by_name = {spec.name: array for spec, array in zip(block.specs, block.arrays, strict=True)}
        header = step_header(scheduled.batch, plan, block)
        assert header.arrays_bytes == block.nbytes
        assert by_name["dense"].tobytes() == scheduled.batch.dense.tobytes()
        assert by_name["labels"].tobytes() == scheduled.batch.labels.tobytes()
        for index, group in enumerate(plan.groups):
            assert by_name[f"{index}.fetch_slots"].tolist() == group.fetch_slots.tolist()
            assert (f"{index}.weights" in by_name) == (bags == "weighted")
            assert (f"{index}.offsets" in by_name) == (bags == "weighted")
            counts = header.groups[index]
            assert (counts.num_fetch, counts.num_evict, counts.num_dirty) == (
                len(group.fetch_keys),
                len(group.evict_keys),
                group.num_dirty,
            )
