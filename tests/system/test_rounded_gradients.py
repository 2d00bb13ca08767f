"""ranks.gradients = "bf16": parts and sums are rounded before anything is sent, so no number of ranks changes a bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from examples.plain_loop import add_up, run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.exchange import ordered_sum
from rowcast.protocol.batch import ScheduledBatch
from rowcast.trainer.kernels import GroupLookup, torch_ops
from rowcast.trainer.kernels.choose import group_lookup, lookup_arrays
from rowcast.trainer.kernels.torch_ops import with_gradients
from rowcast.trainer.models.row_exchange import add_levels
from tests.support.batches import NUM_DENSE, Bags, slots_for, small_batches, small_job
from tests.support.comparisons import Plain, assert_equal_bits, differing
from tests.support.driver import InProcessRun, Settings, start_state
from tests.support.ranked_run import RankedRun

pytestmark = pytest.mark.usefixtures("one_thread", "collected")
BF16 = {"gradients": "bf16"}


def workload(optimizer: str, bags: Bags, parts: int, /, **sections: Any) -> tuple[Job, list[ScheduledBatch], Plain]:
    job = small_job(optimizer, bags, **{"ranks": BF16, **sections})
    batches = small_batches(job, bags, num_steps=6, eval_at=(3,))
    return job, batches, run_plain_loop(job, start_state(job, NUM_DENSE), batches, parts)


def settings_of(job: Job, batches: list[ScheduledBatch], seed: int = 0) -> Settings:
    return Settings(slots=slots_for(group_specs(job), batches, "one batch"), seed=seed)


@pytest.mark.parametrize(
    ("optimizer", "bags", "parts"),
    [
        ("adagrad", "single", 8),
        ("adagrad", "mean", 8),
        ("rowwise_adagrad", "weighted", 4),
        ("rowwise_adagrad", "apart", 4),
        ("adam", "apart", 4),
    ],
)
def test_any_number_of_ranks_has_the_bits_of_the_plain_loop(optimizer: str, bags: Bags, parts: int) -> None:
    job, batches, expected = workload(optimizer, bags, parts)
    for ranks in (1, 2, 4, 8):
        if ranks <= parts:
            run = RankedRun(job, batches, settings_of(job, batches, ranks), ranks=ranks, parts=parts).run()
            assert_equal_bits(run, *expected)
            dtypes = {call.taken[0].dtype for calls in run.network.calls for call in calls if call.taken[0].dim() == 2}
            assert ranks == 1 or dtypes == {torch.float32, torch.bfloat16}, "rows, and their gradients"


CASES: dict[str, dict[str, Any]] = {
    "rounded rows with a master": {"dtypes": ("bf16", "bf16", "fp16", "fp32"), "master": True},
    "clipped rows": {"optimizer": {"sparse": {"kind": "adagrad", "lr": 0.05, "clip_rows": 1e-3}}},
    "a model that ignores its tables": {"model": {"kind": "tests.system.odd_models:dense_only_model"}},
}


@pytest.mark.parametrize("sections", CASES.values(), ids=CASES)
def test_other_settings_have_them_too(sections: dict[str, Any]) -> None:
    job, batches, expected = workload("adagrad", "multi", 4, **sections)
    for ranks in (1, 4):
        assert_equal_bits(RankedRun(job, batches, settings_of(job, batches), ranks=ranks, parts=4).run(), *expected)


@pytest.mark.parametrize(("optimizer", "bags"), [("sgd", "mean"), ("adagrad", "multi"), ("adam", "apart")])
def test_one_rank_that_computes_a_batch_whole_rounds_its_only_part(optimizer: str, bags: Bags) -> None:
    job, batches, expected = workload(optimizer, bags, 1)
    assert_equal_bits(InProcessRun(job, batches, settings_of(job, batches)).run(), *expected)
    _, _, not_rounded = workload(optimizer, bags, 1, ranks={"gradients": "fp32"})
    assert differing(expected[1], not_rounded[1]), "so equal bits say something"


TINY = 2.0**-133  # the least above 0 in bf16; half of it rounds to 0
Values = npt.NDArray[np.float32]


@st.composite
def parts_of_rows(draw: Callable[..., Any]) -> list[tuple[npt.NDArray[np.int64], Values]]:
    """Of each part its distinct rows and their gradients of two columns."""
    special = st.sampled_from([0.0, -0.0, -TINY / 4, TINY / 2, -TINY, 1.0, 1 + 2**-8, -1 - 2**-8, 3e38, -3e38])
    values = st.one_of(special, st.floats(-4, 4, width=32))
    parts = []
    for _ in range(draw(st.integers(1, 9))):
        keys = np.array(sorted(draw(st.sets(st.integers(0, 5)))), np.int64)
        parts.append((keys, draw(arrays(np.float32, (len(keys), 2), elements=values))))
    return parts


@settings(max_examples=200)
@given(parts_of_rows())
def test_sums_of_rounded_parts_are_those_of_whole_tables(parts: list[tuple[npt.NDArray[np.int64], Values]]) -> None:
    """Also where a part without the row adds 0.0, and where the smallest gradients are rounded to 0."""
    kernels = with_gradients(torch_ops, "bf16")
    reduced = [kernels.reduce(torch.from_numpy(own), one_look_up_each(len(own)), None) for _, own in parts]
    sums, _ = ordered_sum([keys for keys, _ in parts])
    found = torch.cat(reduced)
    add_levels(found, torch.from_numpy(sums.to), torch.from_numpy(sums.of), sums.level_ends)
    expected = add_up(range(len(parts)), lambda part: [whole_table(*parts[part]).bfloat16() + 0.0])[0]
    assert expected is not None
    assert found.dtype == torch.bfloat16
    assert same_bits(found[torch.from_numpy(sums.roots).long()], expected[torch.from_numpy(sums.keys)])


def whole_table(keys: npt.NDArray[np.int64], values: Values) -> Tensor:
    """As the plain loop's gradient of a table, which begins with 0.0."""
    table = torch.zeros(6, 2)
    table[torch.from_numpy(keys)] += torch.from_numpy(values)
    return table


def one_look_up_each(count: int) -> GroupLookup:
    rows = np.arange(count, dtype=np.int32)
    return group_lookup(lookup_arrays(rows, rows), count)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """A NaN, of sums of infinities, may have any sign."""
    is_nan = found.isnan() & expected.isnan()
    return bool(((found.view(torch.int16) == expected.view(torch.int16)) | is_nan).all())


def test_torch_adds_two_of_them_as_one_rounded_sum() -> None:
    """Every value once on each side. With 24 bits, more than 2 * 8 + 2, rounding twice changes nothing."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    others = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]
    both = torch.cat([values, others])[:, None].repeat(1, 3)
    to = torch.arange(len(values), dtype=torch.int32)
    add_levels(both, to, to + len(values), (len(values),))
    assert same_bits(both[: len(values), 0], (values.float() + others.float()).to(torch.bfloat16))
