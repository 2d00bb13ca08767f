"""Plans the sum of each row's gradients from several sources, as a tree over the sources.

    sources        1 4 | 4 7 | 1 4        ascending; a position counts through all of them: 0 to 5
    sorted         1  1  4  4  4  7       by key, and by source within a row
    order          0  4  1  2  5  3       their positions
    level 1                1<-2           sources 0 and 1 are neighbours; source 2 has none
    level 2        0<-4    1<-5           of nodes 0 and 1
    roots          0       1      3       the first position of each row: additions go to the left

A source s is in node s >> level of a level. Two neighbours of a row are added at the first level at which their sources
share a node, and each goes to the first position of its own node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from rowcast.prefetcher.planner.grouping import sort_pairs
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled, compiled_loop


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedSum:
    """The additions, in place, of rows' gradients from several sources, concatenated."""

    keys: I64  # [U] ascending: every row of any source
    to: I32  # [A] values[to] += values[of], level by level; within a level all positions differ
    of: I32  # [A]
    level_ends: tuple[int, ...]  # additions up to the end of each level
    roots: I32  # [U] position of each row's sum after the last level

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.to.nbytes + self.of.nbytes + self.roots.nbytes


def ordered_sum(sources: Sequence[I64], first: int = 0, count: int = 1) -> tuple[OrderedSum, I32]:
    """`sources`: one or more; the distinct rows with a gradient from each, by ascending key. Their gradients lie as
    `some_first` orders them: `count` sources from `first` on, then the others.

    Returns also the places in `keys` of the rows of every source, as they lie."""
    keys, ends = np.concatenate(sources), np.array(list(accumulate(map(len, sources))))
    order, source_of, levels = np.empty((3, len(keys)), np.int32)
    at, firsts = np.zeros((2, 1 + (len(sources) - 1).bit_length()), np.int64)
    sort_sources(keys, ends, first, count, order, source_of, levels, at)
    level_ends = tuple(at[1:].tolist())
    num_joins = level_ends[-1] if level_ends else 0
    unique, places = np.empty(len(keys) - num_joins, np.int64), np.empty(len(keys), np.int32)
    roots, to, of = np.empty(len(unique), np.int32), *np.empty((2, num_joins), np.int32)
    plan_additions(keys, order, levels, at, firsts, unique, places, roots, to, of)
    return OrderedSum(keys=unique, to=to, of=of, level_ends=level_ends, roots=roots), places


def some_first(first: int, count: int, end: int) -> list[int]:
    """Returns `count` numbers from `first` on, and then the others below `end`, both ascending."""
    return [*range(first, first + count), *range(first), *range(first + count, end)]


@compiled
def sort_sources(
    keys: I64, ends: I64, first: int, count: int, order: I32, source_of: I32, levels: I32, at: I64
) -> None:
    """Sorts `keys`. Fills `order` with where they lie, `source_of` with the source of each that lies there, `levels`
    with the level of each addition, and `at` [1 + levels] with the end of the additions of each level."""
    before = ends[first - 1] if first else 0
    moved, start = ends[first + count - 1] - before, 0
    for source in range(len(ends)):
        lies = moved if source < first else -before if source < first + count else 0
        for i in range(start, ends[source]):
            order[i] = i + lies
            source_of[i + lies] = source
        start = ends[source]
    if len(ends) > 1:
        sort_pairs(keys, order)
    joins = 0
    for i in range(1, len(keys)):
        if keys[i] == keys[i - 1]:
            different, level = source_of[order[i]] ^ source_of[order[i - 1]], 0
            while different:
                different >>= 1
                level += 1
            levels[joins] = level
            at[level] += 1
            joins += 1
    for level in range(1, len(at)):
        at[level] += at[level - 1]


@compiled_loop
def plan_additions(
    keys: I64, order: I32, levels: I32, at: I64, firsts: I64, unique: I64, places: I32, roots: I32, to: I32, of: I32
) -> None:
    """`levels`: of each addition, by row. `at` [1 + levels]: where the additions of the next level begin. `firsts`
    [1 + levels]: of each level, the first position of the row's last node."""
    found = joined = -1
    for i in range(len(keys)):
        position = order[i]
        if i == 0 or keys[i] != keys[i - 1]:
            found += 1
            unique[found], roots[found] = keys[i], position
            level = len(firsts)
        else:
            joined += 1
            level = levels[joined]
            to[at[level - 1]], of[at[level - 1]] = firsts[level - 1], position
            at[level - 1] += 1
        for below in range(level):
            firsts[below] = position
        places[position] = found
