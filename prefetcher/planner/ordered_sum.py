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

import numpy as np

from rowcast.prefetcher.planner.grouping import sort_pairs
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled_loop


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
    keys, lie = np.concatenate(sources), some_first(first, count, len(sources))
    order = np.arange(len(keys), dtype=np.int32)
    before, moved = sum(map(len, sources[:first])), sum(map(len, sources[first : first + count]))
    order[:before] += moved
    order[before : before + moved] -= before
    if len(sources) > 1:
        sort_pairs(keys, order)
    nodes = np.repeat(lie, [len(sources[source]) for source in lie])[order]
    joins = np.flatnonzero(keys[1:] == keys[:-1])
    levels = np.frexp(nodes[joins] ^ nodes[joins + 1])[1]  # bits in which they differ, from the highest on
    at, firsts = np.zeros((2, 1 + (len(sources) - 1).bit_length()), np.int64)
    np.cumsum(np.bincount(levels, minlength=len(at)), out=at)
    level_ends = tuple(at[1:].tolist())
    unique, places = np.empty(len(keys) - len(joins), np.int64), np.empty(len(keys), np.int32)
    roots, to, of = np.empty(len(unique), np.int32), *np.empty((2, len(joins)), np.int32)
    plan_additions(keys, order, levels, at, firsts, unique, places, roots, to, of)
    return OrderedSum(keys=unique, to=to, of=of, level_ends=level_ends, roots=roots), places


def some_first(first: int, count: int, end: int) -> list[int]:
    """Returns `count` numbers from `first` on, and then the others below `end`, both ascending."""
    return [*range(first, first + count), *range(first), *range(first + count, end)]


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
