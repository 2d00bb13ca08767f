import re

import pytest

from tests.support.facts import facts

SENTENCE = "a.npy, row 30: cache.capacity = 3.5 is too small (No space); set 41 (or more) with --budget"


@pytest.mark.parametrize(
    "found", [(), (41,), ("cache.capacity", 30), ("--budget", "row 30"), ("(No space)", 3.5, "a.npy"), ("(or", 41)]
)
def test_facts_are_found_in_any_order(found: tuple[object, ...]) -> None:
    assert re.search(facts(*found), SENTENCE)
    assert re.search(facts(*reversed(found)), SENTENCE.replace(": ", ":\n"))


@pytest.mark.parametrize("missing", [3, 5, 4, "ro", "budge", "capacity = 3", "a-npy", "row 30."])
def test_a_fact_that_is_missing_or_part_of_a_word_is_not_found(missing: object) -> None:
    assert not re.search(facts("cache.capacity", missing), SENTENCE)
