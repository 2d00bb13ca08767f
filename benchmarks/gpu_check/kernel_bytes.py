"""How many bytes our kernels must move, at least: each input that they use read once, each result written once.

A row that several look-ups share counts once in a look-up. Gradients count for each look-up. Chunks of long rows are
written and read again.
"""

from torch import Tensor

from rowcast.trainer.kernels import GroupLookup, RecordViews

F32 = 4


def lookup_bytes(rows: RecordViews, group: GroupLookup) -> int:
    num_bags = len(group.slots) if group.offsets is None else len(group.offsets) - 1
    return (
        num_bags * rows.weight.shape[1] * F32
        + len(group.unique_slots) * row_bytes(rows.weight)
        + sum(map(nbytes, (group.slots, group.offsets, group.weights)))
    )


def sums_bytes(dim: int, group: GroupLookup) -> int:
    """Sums of the gradients of each row, without what becomes of them."""
    chunk_sums = 2 * len(group.chunks.chunk_rows) * dim * F32
    arrays = (group.bag_order, group.lookup_order, group.segment_offsets, group.weights, *group.chunks)
    return len(group.slots) * dim * F32 + chunk_sums + sum(map(nbytes, arrays))


def reduce_bytes(dim: int, group: GroupLookup) -> int:
    return sums_bytes(dim, group) + len(group.unique_slots) * dim * F32


def update_bytes(rows: RecordViews, group: GroupLookup) -> int:
    """Every field of a trained row is read and written."""
    fields = [rows.weight, *(() if rows.master is None else (rows.master,)), *rows.states]
    trained = 2 * len(group.unique_slots) * sum(map(row_bytes, fields))
    return sums_bytes(rows.weight.shape[1], group) + trained + nbytes(group.unique_slots)


def moved_bytes(records: Tensor, slots: Tensor) -> int:
    """Records gathered from slots, or scattered to them."""
    return 2 * len(slots) * row_bytes(records) + nbytes(slots)


def row_bytes(values: Tensor) -> int:
    return values[0].numel() * values.element_size()


def nbytes(array: Tensor | None) -> int:
    return 0 if array is None else array.nbytes
