"""The cases with which `make gpu-check` tries a device, in Triton's interpreter; and the rows that kernels refuse."""

import pytest
import torch

from benchmarks.gpu_check.kernels import ALL, CORE, KINDS, REST, Case, Records, Sizes, check_case
from rowcast.job.optimizers import SparseOptimizer
from rowcast.trainer.kernels import Kernels, RecordViews, rule_at, triton_ops
from tests.support.facts import facts

OURS: Kernels = triton_ops
SMALL = Sizes(slots=32, bags=24, rows=20)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few look-ups make a long row."""
    monkeypatch.setattr("rowcast.trainer.kernels.CHUNK_LOOKUPS", 5)


@pytest.mark.parametrize("case", [*CORE, *REST[::4]], ids=str)
def test_every_case_of_the_check_passes_in_the_interpreter_with_the_bits_of_torch(case: Case) -> None:
    found = check_case(case, OURS, torch.device("cpu"), SMALL)
    assert found["passed"], found
    assert found["update_bits"], found


def test_the_check_has_every_case_and_begins_with_each_row_optimizer() -> None:
    assert set(ALL) <= {*CORE, *REST}
    assert {case.kind for case in CORE} == set(KINDS)


@pytest.mark.parametrize("kind", ["adagrad", "rowwise_adagrad"])
def test_rows_whose_parts_lie_in_several_memories_are_refused(kind: str) -> None:
    rows = Records.random(Case(kind=kind, dim=16), 8).rows
    apart = RecordViews(weight=rows.weight.clone(), master=None, states=tuple(state.clone() for state in rows.states))
    same_stride = RecordViews(
        weight=rows.weight, master=None, states=Records.random(Case(kind=kind, dim=16), 8).rows.states
    )
    for refused in (apart, same_stride):
        with pytest.raises(AssertionError, match="all parts inside one record"):
            train(refused, kind)


def test_a_master_of_another_stride_is_refused() -> None:
    rows = Records.random(Case(kind="sgd", dim=16, dtype="bf16", master=True), 8).rows
    assert rows.master is not None
    other = RecordViews(weight=rows.weight, master=rows.master[::2], states=())
    with pytest.raises(AssertionError, match=facts("32 bytes", "192 bytes")):
        train(other, "sgd")


def train(rows: RecordViews, kind: str) -> None:
    rule = rule_at(SparseOptimizer(kind=kind, lr=0.05, eps=1e-8), 0)
    OURS.apply(rows, torch.arange(4, dtype=torch.int32), torch.ones(4, 16), rule)
