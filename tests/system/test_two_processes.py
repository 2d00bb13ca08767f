"""E1 with two real processes, on the retail log where ROWCAST_RETAIL names its folder, else on the synthetic stream."""

import os
from pathlib import Path

import pytest

from benchmarks.exact import FACTORS, Way, compare, cover, pairwise_cover
from tests.support.driver import start_state
from tests.support.repeats import count

LOG = Path(os.environ["ROWCAST_RETAIL"]).absolute() if "ROWCAST_RETAIL" in os.environ else None
WAYS = cover(LOG, batch_size=("256",))[: count(3, 20)]  # `make exact` and `make soak` have all
NUM_STEPS = 6


@pytest.mark.parametrize("way", WAYS, ids=["-".join(way.values()).replace(" ", "_") for way in WAYS])
def test_two_processes_give_the_bits_of_the_plain_loop(way: Way, tmp_path: Path) -> None:
    print("data:", LOG or "synthetic, because ROWCAST_RETAIL is not set")  # noqa: T201
    outcome = compare(way, LOG, tmp_path, NUM_STEPS, start_state)
    assert outcome.differences == []
    assert outcome.report.steps == NUM_STEPS
    assert outcome.report.rows_evicted > 0 or way["capacity"] != "one batch"


def test_every_pair_of_settings_meets_in_some_way_of_the_cover() -> None:
    ways = pairwise_cover(FACTORS)
    assert len(ways) <= 20
    for a, b in [(a, b) for a in FACTORS for b in FACTORS if a < b]:
        met = {(way[a], way[b]) for way in ways}
        assert met == {(x, y) for x in FACTORS[a] for y in FACTORS[b]}
