"""Scripts on several ranks have the bits of the plain loop however their tables are placed.

Tables of one width are a group, and a rank may own none of a group.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.plain_loop import run_plain_loop
from rowcast.job.embedding_tables import Placement
from rowcast.job.tables import group_specs
from tests.support.batches import NUM_DENSE, batches_of_sizes, placed, slots_for, small_job
from tests.support.comparisons import assert_equal_bits
from tests.support.driver import Settings, start_state
from tests.support.jobs import table
from tests.support.repeats import count
from tests.support.script_ranks import ScriptRanks

pytestmark = pytest.mark.usefixtures("one_thread")
PLACEMENTS: tuple[Placement, ...] = ("rows", "table", "columns:2")
WIDTHS = (8, 16, 24)  # also in two pieces they are multiples of 4
SIZES = (8, 4, 8)  # every part of 1, 2 or 4 has samples, and all have as many


def assert_trains_as_the_plain_loop(
    folder: Path, tables: Sequence[tuple[int, Placement]], ranks: int, gradients: str = "fp32"
) -> None:
    """`tables`: width and placement of each."""
    rows = [table(f"t{index}", 90 + index, width) for index, (width, _) in enumerate(tables)]
    plain = small_job("adagrad", "multi", tables=rows, ranks={"gradients": gradients})
    job = placed(plain, [placement for _, placement in tables], ranks, ranks)
    batches = batches_of_sizes(job, "multi", SIZES, eval_at=(1,), seed=ranks)
    settings = Settings(slots=slots_for(group_specs(job), batches, "one batch"), seed=ranks)
    with ScriptRanks(folder, job, batches, settings, ranks) as run:
        run.run()
        assert_equal_bits(run, *run_plain_loop(plain, start_state(plain, NUM_DENSE), batches, ranks))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_table_of_a_width_that_no_other_has_may_be_placed_anyhow(
    placement: Placement, ranks: int, tmp_path: Path
) -> None:
    assert_trains_as_the_plain_loop(tmp_path, [(8, "rows"), (16, placement)], ranks)


@pytest.mark.parametrize("seed", range(count(6, 200)))
def test_any_placements_of_any_widths_on_any_ranks_train_as_the_plain_loop(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    tables = [(chance.choice(WIDTHS), chance.choice(PLACEMENTS)) for _ in range(chance.randint(1, 4))]
    gradients = chance.choice(("fp32", "bf16"))
    assert_trains_as_the_plain_loop(tmp_path, tables, chance.choice((1, 2, 4)), gradients)
