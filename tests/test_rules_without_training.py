"""The rules that stand beside trained models in docs/sequences.md and docs/language-models.md, on small examples."""

import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.next_item import Rule, pair_counts, rules
from benchmarks.ngram_counts import BEFORE, bits_a_byte


def test_pairs_are_counted_once_and_popularity_decides_between_equal_scores() -> None:
    pairs = pair_counts([[0, 1, 2], [1, 2]], [[1, 2, 3], [1]], 5)  # of the second window only the last item is counted
    assert {(a, b): n for (a, b), n in np.ndenumerate(pairs) if n} == {(0, 1): 1, (1, 2): 1, (2, 3): 1, (2, 1): 1}
    order = {
        name: np.argsort(-rule([4, 1, 2, 4], []), kind="stable").tolist() for name, rule in rules_of(pairs).items()
    }
    assert order["most popular"] == [0, 1, 2, 3, 4]
    assert order["own newest first"] == [4, 2, 1, 0, 3]
    assert order["last item again"][0] == 4
    by_pairs = rules_of(pairs)['pairs "a, then b"']([0, 2], [])
    assert np.argsort(-by_pairs, kind="stable").tolist() == [1, 3, 0, 2, 4]


def rules_of(pairs: npt.NDArray[np.int64]) -> dict[str, Rule]:
    return rules(np.array([9, 7, 5, 3, 1]), pairs, with_times=False)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_bits_a_byte_are_those_of_witten_bell_byte_by_byte(order: int) -> None:
    rng = np.random.default_rng(order)
    counted, held_out = (rng.integers(97, 101, (rows, BEFORE + 30), np.uint8) for rows in (6, 4))
    followers: dict[bytes, Counter[int]] = {}
    for row in counted:
        for at in range(BEFORE, len(row)):
            for length in range(order):
                followers.setdefault(row[at - length : at].tobytes(), Counter())[int(row[at])] += 1

    def chance(context: bytes, byte: int) -> float:
        shorter = chance(context[1:], byte) if context else 1 / 256
        seen = followers.get(context)
        return shorter if seen is None else (seen[byte] + len(seen) * shorter) / (seen.total() + len(seen))

    asked = [(row[at - order + 1 : at].tobytes(), int(row[at])) for row in held_out for at in range(BEFORE, len(row))]
    expected = -sum(math.log2(chance(*own)) for own in asked) / len(asked)
    assert bits_a_byte(counted, held_out, order) == pytest.approx(expected, rel=1e-12)
