"""Wide & Deep and DeepFM against the papers' formulas over tables of their own, in stock PyTorch."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.trainer.models import build_model
from tests.support.batches import NUM_DENSE, small_batches
from tests.support.driver import start_state
from tests.support.jobs import job as make_job
from tests.support.jobs import table

DIM = 4
LR = 0.1
STEPS = 5


def linear_job(kind: str, optimizer: str = "sgd") -> Job:
    return make_job(
        data={"batch_size": 16},
        tables=[table("a", 30, DIM, linear=True), table("b", 20, DIM, linear=True), table("c", 10, DIM)],
        model={"kind": kind, "top_mlp": [6, 1]},
        optimizer={"sparse": {"kind": optimizer, "lr": LR}, "dense": {"kind": "sgd", "lr": LR}},
    )


class Paper(nn.Module):
    """logit = w x + b + sum of w_i + MLP([x, v_1, ...]), and for DeepFM + sum of v_i v_j over the pairs i < j."""

    def __init__(self, job: Job, start: dict[str, Tensor]) -> None:
        super().__init__()
        rows = {table.name: start[f"embedding_bags.{table.name}.weight"] for table in job.tables}
        self.vectors = nn.ModuleDict({name: embedding(own[:, :DIM]) for name, own in rows.items()})
        linear = [table.name for table in job.tables if table.linear]
        self.weights = nn.ModuleDict({name: embedding(rows[name][:, DIM:]) for name in linear})
        self.wide = nn.Linear(NUM_DENSE, 1)
        self.top_mlp = nn.ModuleList([nn.Linear(NUM_DENSE + 3 * DIM, 6), nn.Linear(6, 1)])
        self.load_state_dict({name: own for name, own in start.items() if name in self.state_dict()}, strict=False)
        self.pairs = job.model.kind == "deepfm"

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        vectors = [own(of_feature) for own, of_feature in zip(self.vectors.values(), ids, strict=True)]
        weights = [own(of_feature) for own, of_feature in zip(self.weights.values(), ids[:2], strict=True)]
        hidden = torch.relu(self.top_mlp[0](torch.cat([dense, *vectors], dim=1)))
        logits: Tensor = self.wide(dense) + sum(weights) + self.top_mlp[1](hidden)
        if self.pairs:
            logits = logits + sum((a * b).sum(1, keepdim=True) for a, b in combinations(vectors, 2))
        return logits.squeeze(1)


def embedding(rows: Tensor) -> nn.Embedding:
    return nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows.clone())


@pytest.mark.parametrize("kind", ["wide-deep", "deepfm"])
def test_training_gives_what_the_papers_formula_gives(kind: str) -> None:
    job = linear_job(kind)
    batches = small_batches(job, "single", num_steps=STEPS, eval_at=())
    start = start_state(job, NUM_DENSE)
    losses, end = run_plain_loop(job, start, batches)
    paper = Paper(job, start)
    optimizer = torch.optim.SGD(paper.parameters(), lr=LR)
    for scheduled, loss in zip(batches, losses, strict=True):
        batch = scheduled.batch
        logits = paper(torch.tensor(batch.dense), torch.tensor(batch.ids).view(3, -1))
        own = nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(batch.labels))
        assert loss == pytest.approx(own.item(), rel=1e-5)
        optimizer.zero_grad()
        torch.autograd.backward(own)
        optimizer.step()
    trained_apart = paper.state_dict()
    for name in paper.vectors:
        torch.testing.assert_close(
            end[f"embedding_bags.{name}.weight"][:, :DIM], trained_apart[f"vectors.{name}.weight"]
        )
    for name in paper.weights:
        trained = end[f"embedding_bags.{name}.weight"][:, DIM:]
        torch.testing.assert_close(trained, trained_apart[f"weights.{name}.weight"])
        assert trained.any(), "linear weights begin as 0 and are trained"


RULES: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda rows: torch.optim.SGD(rows, lr=LR, foreach=False),
    "adagrad": lambda rows: torch.optim.Adagrad(rows, lr=LR, foreach=False),
    "adam": lambda rows: torch.optim.SparseAdam(rows, lr=LR),
}


@pytest.mark.parametrize("optimizer", RULES)
def test_a_row_with_a_linear_weight_has_the_bits_of_two_tables(optimizer: str) -> None:
    """The model of the job, over one embedding for vectors and one for linear weights in place of a table of both."""
    job = linear_job("wide-deep", optimizer)
    batches = small_batches(job, "single", num_steps=STEPS, eval_at=())
    start = start_state(job, NUM_DENSE)
    _, end = run_plain_loop(job, start, batches)
    model = build_model(job, NUM_DENSE)
    rows = {table.name: start[f"embedding_bags.{table.name}.weight"] for table in job.tables}
    vectors = {name: embedding(own[:, :DIM]) for name, own in rows.items()}
    weights = {name: embedding(own[:, DIM:]) for name, own in rows.items() if own.shape[1] > DIM}
    sides = [
        RULES[optimizer]([own.weight for own in (*vectors.values(), *weights.values())]),
        torch.optim.SGD(model.parameters(), lr=LR, foreach=False),
    ]
    for scheduled in batches:
        batch = scheduled.batch
        ids = dict(zip(rows, torch.tensor(batch.ids).view(3, -1), strict=True))
        logits = model(
            torch.tensor(batch.dense),
            [vectors[name](ids[name]) for name in rows],
            [weights[name](ids[name]) for name in weights],
        )
        torch.autograd.backward(nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(batch.labels)))
        if optimizer == "adam":  # takes sparse gradients, whose duplicates are summed here
            for name, own in [*vectors.items(), *weights.items()]:
                touched = ids[name].unique()
                grad = own.weight.grad
                assert grad is not None
                own.weight.grad = torch.sparse_coo_tensor(touched[None], grad[touched], grad.shape)
        for side in sides:
            side.step()
            side.zero_grad()
    for name in rows:
        trained = end[f"embedding_bags.{name}.weight"]
        apart = [vectors[name].weight.detach(), *([weights[name].weight.detach()] if name in weights else [])]
        assert torch.equal(trained, torch.cat(apart, dim=1))
