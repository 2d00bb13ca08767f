"""Where one rank owns a table and pools it for all, training has the bits of the plain loop, as it has by rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from examples.plain_loop import run_plain_loop
from rowcast.job.embedding_tables import Placement
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.first_batches import counted
from rowcast.protocol.batch import ScheduledBatch
from tests.support.batches import NUM_DENSE, PLACED, Bags, batches_of_sizes, placed, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits
from tests.support.driver import Settings, start_state
from tests.support.jobs import table
from tests.support.ranked_run import RankedRun

pytestmark = pytest.mark.usefixtures("one_thread", "collected")
WHOLE: Sequence[Placement] = ("table", "table", "table", "table")
PARTS = 8
CASES: Mapping[str, Mapping[str, Any]] = {
    "rounded rows": {"dtypes": ("fp32", "bf16", "fp16", "bf16")},
    "master rows": {"dtypes": ("bf16", "bf16", "fp16", "bf16"), "master": True},
    "dropout": {"model": {"kind": "tests.system.odd_models:dropout_model"}},
    "tables that the model ignores": {"model": {"kind": "tests.system.odd_models:dense_only_model"}},
    "linear weights": {
        "tables": [
            *(table("a", 60, 4, "a0", "a1", linear=True, pooling="mean"), table("b", 400, 4, linear=True)),
            *(table("c", 50, 5), table("d", 90, 7, linear=True, dtype="bf16")),
        ],
        "model": {"kind": "wide-deep", "top_mlp": [6, 1]},
    },
    "clipped": {"optimizer": {"sparse": {"kind": "adagrad", "lr": 0.05, "clip_rows": 1e-3}}},
    "bf16 gradients": {"ranks": {"gradients": "bf16"}},
}


def run_placed(
    job: Job, batches: list[ScheduledBatch], placements: Sequence[Placement], ranks: int, **more: Any
) -> RankedRun:
    own = placed(job, placements, ranks, PARTS)
    settings = Settings(slots=slots_for(group_specs(own), batches, "one batch"), seed=ranks, **more)
    run = RankedRun(own, batches, settings, ranks=ranks, parts=PARTS).run()
    run.assert_each_row_stays_with_its_owner()
    return run


@pytest.mark.parametrize(
    ("optimizer", "bags", "placements", "ranks"),
    [
        ("sgd", "single", PLACED, 2),
        ("adagrad", "multi", PLACED, 4),
        ("rowwise_adagrad", "weighted", WHOLE, 8),
        ("adam", "mean", WHOLE, 2),
        ("adagrad", "empty", WHOLE, 4),
        ("adam", "apart", WHOLE, 8),  # two tables without pooling stay by rows
        ("rowwise_adagrad", "mean", PLACED, 1),
    ],
)
def test_owners_that_pool_give_the_bits_of_the_plain_loop(
    optimizer: str, bags: Bags, placements: Sequence[Placement], ranks: int
) -> None:
    job = small_job(optimizer, bags)
    batches = small_batches(job, bags, num_steps=5, eval_at=(2, 4))
    run = run_placed(job, batches, placements, ranks, late_store=ranks == 2)
    assert_equal_bits(run, *run_plain_loop(job, start_state(job, NUM_DENSE), batches, PARTS))
    assert len(run.pairs[0].results.evaluations) == 2


@pytest.mark.parametrize("case", CASES)
def test_every_setting_has_the_bits_of_the_plain_loop_with_the_same_setting(case: str) -> None:
    job = small_job("adagrad", "multi", **CASES[case])
    batches = small_batches(job, "multi", num_steps=4, eval_at=(2,))
    run = run_placed(job, batches, PLACED, 4)
    assert_equal_bits(run, *run_plain_loop(job, start_state(job, NUM_DENSE), batches, PARTS))


def test_batches_smaller_than_the_parts_leave_some_without_vectors() -> None:
    job = small_job("adam", "empty")
    batches = batches_of_sizes(job, "empty", (64, 5, 3, 1, 13), eval_at=(2,), seed=4)
    run = run_placed(job, batches, PLACED, 8)
    assert_equal_bits(run, *run_plain_loop(job, start_state(job, NUM_DENSE), batches, PARTS))


@pytest.mark.parametrize(("placements", "gradients"), [(PLACED, "fp32"), (WHOLE, "fp32"), (PLACED, "bf16")])
def test_every_byte_that_travels_is_counted_as_auto_counts_it(placements: Sequence[Placement], gradients: str) -> None:
    """Of what moves between two ranks, rows and vectors are two-dimensional and sums are not."""
    job = small_job("adagrad", "multi", ranks={"gradients": gradients})
    batches = small_batches(job, "multi", num_steps=4, eval_at=())
    run = run_placed(job, batches, placements, 2)
    counters = [pair.trainer.counters for pair in run.pairs]
    for number, own in enumerate(counters):
        moved = [call.given[1 - number] for call in run.network.calls[number]]
        assert own.total("bytes_sent") == sum(one.nbytes for one in moved if one.dim() == 2)
        assert own.total("bytes_sent") == counters[1 - number].total("bytes_received")
        assert own.total("vector_bytes_sent") == counters[1 - number].total("vector_bytes_received") > 0
        assert (own.total("rows_sent") == 0) == (placements == WHOLE)
        assert (own.total("vector_bytes_sent") == own.total("bytes_sent")) == (placements == WHOLE)
    traffic = counted(run.job, batches)
    assert traffic.of(placements).mean == sum(own.total("bytes_received") for own in counters) / (4 * 2)
