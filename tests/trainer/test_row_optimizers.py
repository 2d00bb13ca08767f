"""Row optimizers on gathered rows have the bits of torch.optim on whole tables."""

import msgspec
import pytest
import torch
from torch import Tensor, nn

from rowcast.job.embedding_tables import RowType
from rowcast.job.optimizers import ROW_OPTIMIZERS, SparseOptimizer
from rowcast.job.tables import GroupSpec, record_parts
from rowcast.trainer.kernels import DTYPES, part_of, rows_of, rule_at, torch_ops
from tests.support.full_capacity import bits

KINDS = tuple(ROW_OPTIMIZERS)
WIDTHS = (1, 4, 5, 12, 16, 33, 64)
ROWS_AND_THREADS = ((1, 1), (3, 1), (5000, 1), (5000, 2))


pytestmark = pytest.mark.usefixtures("threads")


def settings_of(kind: str, *, master: bool = False) -> SparseOptimizer:
    content = {"kind": kind, "lr": 0.037, "initial_accumulator": 0.25 if "adagrad" in kind else 0.0, "master": master}
    eps = {} if ROW_OPTIMIZERS[kind].eps is None else {"eps": 0.003}  # the defaults change few bits
    return msgspec.convert(content | eps, SparseOptimizer)


def group_of(settings: SparseOptimizer, dim: int, dtype: RowType = "fp32") -> GroupSpec:
    parts, record_bytes = record_parts(settings, dtype, dim)
    return GroupSpec(
        index=0,
        name="group",
        tables=(),
        embedding_dim=dim,
        optimizer=settings,
        parts=parts,
        record_bytes=record_bytes,
        feature_positions=(),
    )


class StockTable:
    """A whole table under torch.optim."""

    def __init__(self, settings: SparseOptimizer, weight: Tensor) -> None:
        self.weight = nn.Parameter(weight.clone())
        self.settings = settings
        self.rowwise_sum = torch.full((len(weight), 1), settings.initial_accumulator)
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        lr, eps = self.settings.lr, self.settings.epsilon
        if self.settings.kind == "adagrad":
            return torch.optim.Adagrad(
                [self.weight], lr=lr, eps=eps, initial_accumulator_value=self.settings.initial_accumulator
            )
        if self.settings.kind == "adam":
            return torch.optim.SparseAdam([self.weight], lr=lr, eps=eps, betas=self.settings.betas)
        return torch.optim.SGD([self.weight], lr=lr)

    def step(self, rows: Tensor, grads: Tensor) -> None:
        if self.settings.kind == "rowwise_adagrad":
            self.rowwise_step(rows, grads)
            return
        if self.settings.kind == "adam":
            with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
                self.weight.grad = torch.sparse_coo_tensor(rows[None], grads, self.weight.shape)
        else:
            self.weight.grad = torch.zeros_like(self.weight).index_copy(0, rows, grads)
        self.optimizer.step()

    @torch.no_grad()
    def rowwise_step(self, rows: Tensor, grads: Tensor) -> None:
        self.rowwise_sum[rows] += (grads * grads).mean(1, keepdim=True)
        self.weight[rows] -= self.settings.lr * grads / (self.rowwise_sum[rows].sqrt() + self.settings.epsilon)

    def parts(self) -> list[Tensor]:
        state = self.optimizer.state[self.weight]
        match self.settings.kind:
            case "sgd":
                return [self.weight]
            case "adagrad":
                return [self.weight, state["sum"]]
            case "rowwise_adagrad":
                return [self.weight, self.rowwise_sum]
            case _:
                return [self.weight, state["exp_avg"], state["exp_avg_sq"]]


def random_gradients(num_rows: int, dim: int) -> Tensor:
    """Of very different sizes, with zeros and whole rows of zeros."""
    grads = torch.randn(num_rows, dim) * 10 ** (torch.rand(num_rows, 1) * 6 - 5)
    grads[torch.rand(num_rows) < 0.1] = 0
    grads[torch.rand(num_rows, dim) < 0.1] = 0
    return grads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize(("num_rows", "threads"), ROWS_AND_THREADS, indirect=["threads"])
def test_touched_rows_end_with_the_bits_of_the_whole_table(kind: str, dim: int, num_rows: int) -> None:
    torch.manual_seed(dim)
    settings = settings_of(kind)
    group = group_of(settings, dim)
    stock = StockTable(settings, torch.randn(num_rows, dim))
    slots = torch.randperm(num_rows + 7)[:num_rows]
    records = torch.zeros(num_rows + 7, group.record_floats)
    for part in group.parts:
        part_of(records, part)[slots] = stock.weight.detach() if part.initial is None else part.initial
    for train_step in range(8):
        touched = torch.randperm(num_rows)[: int(torch.randint(1, num_rows + 1, ()))]
        grads = random_gradients(len(touched), dim)
        stock.step(touched, grads)
        torch_ops.apply(rows_of(records, group), slots[touched].int(), grads, rule_at(settings, train_step))
    for part, whole in zip(group.parts, stock.parts(), strict=True):
        assert torch.equal(bits(part_of(records, part)[slots]), bits(whole)), part.name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("dim", [1, 5, 16, 33])
def test_half_rows_are_trained_in_fp32_and_rounded_at_every_step(
    kind: str, dtype: torch.dtype, master: bool, dim: int
) -> None:
    """Against a whole fp32 table under torch.optim, which is rounded after each step without master weights."""
    torch.manual_seed(dim)
    settings = settings_of(kind, master=master)
    group = group_of(settings, dim, "fp16" if dtype == torch.float16 else "bf16")
    start = torch.randn(300, dim)
    stock = StockTable(settings, start if master else start.to(dtype).float())
    slots = torch.randperm(307)[:300]
    records = torch.zeros(307, group.record_floats)
    for part in group.parts:
        part_of(records, part)[slots] = start.to(DTYPES[part.dtype]) if part.initial is None else part.initial
    for train_step in range(8):
        touched = torch.randperm(300)[: int(torch.randint(1, 301, ()))]
        grads = random_gradients(len(touched), dim)
        stock.step(touched, grads)
        torch_ops.apply(rows_of(records, group), slots[touched].int(), grads, rule_at(settings, train_step))
        if not master:
            stock.weight.data.copy_(stock.weight.data.to(dtype))
    weight, *others = (part_of(records, part)[slots] for part in group.parts)
    whole, *states = stock.parts()
    assert torch.equal(bits(weight), bits(whole.to(dtype)))
    assert not torch.equal(weight, start.to(dtype)), "nothing was trained"
    for found, expected in zip(others, [whole, *states] if master else states, strict=True):
        assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "master"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_other_slots_and_padding_are_never_written(kind: str, dtype: RowType, master: bool) -> None:
    settings = settings_of(kind, master=master)
    group = group_of(settings, 5, dtype)
    records = torch.full((6, group.record_floats), 9.0)
    before = records.clone().view(torch.uint8)
    torch_ops.apply(
        rows_of(records, group), torch.tensor([4, 1], dtype=torch.int32), torch.ones(2, 5), rule_at(settings, 0)
    )
    changed = records.view(torch.uint8) != before
    for part in group.parts:
        assert changed[:, part.bytes].any(), f"{part.name} was not trained"
        changed[[1, 4], part.bytes] = False
    assert not changed.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_touches_no_row_changes_nothing(kind: str) -> None:
    settings = settings_of(kind)
    group = group_of(settings, 5)
    records = torch.randn(6, group.record_floats)
    before = records.clone()
    torch_ops.apply(rows_of(records, group), torch.empty(0, dtype=torch.int32), torch.empty(0, 5), rule_at(settings, 0))
    assert torch.equal(records, before)
