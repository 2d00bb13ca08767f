"""Training scripts on several ranks, under torchrun: they end with the bits of stock PyTorch in as many parts."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from examples.adopt.plain_dlrm import CONFIGS, LR
from rowcast.trainer.models.evaluate import EvalMetrics
from tests.adopt.rank_script import STEPS, clicks, loss_of, model_over, module
from tests.support.processes import Process, Session
from tests.support.repeats import count

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(tmp_path) as own:
        yield own


def start(session: Session, ranks: int, *options: str, **wishes: Any) -> Process:
    wishes["folder"] = str(session.folder)
    arguments = [
        f"--nproc-per-node={ranks}",
        *options,
        "-m",
        "tests.adopt.rank_script",
        json.dumps(wishes),
    ]
    return session.start_module("rowcast.deploy.torchrun", *arguments, PYTHONPATH=".")


class Tables(nn.Module):
    def __init__(self, tables: dict[str, Tensor]) -> None:
        super().__init__()
        self.names = [config.feature_names[0] for config in CONFIGS]
        self.tables = nn.ParameterList(nn.Parameter(table.clone()) for table in tables.values())

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        columns = zip(self.names, self.tables, ids.T, strict=True)
        return {name: nn.functional.embedding(own, table) + 0.0 for name, table, own in columns}


def tree(values: Sequence[Any]) -> Any:
    while len(values) > 1:
        values = [sum(values[i + 1 : i + 2], values[i]) for i in range(0, len(values), 2)]
    return values[0]


def stock(folder: Path, parts: int, epochs: int) -> tuple[dict[str, Tensor], list[list[Tensor]], list[float]]:
    """What a script ends with, the losses of its parts, and AUC and log loss of its last evaluation: all tables in
    memory, gradients of parts added in the tree. Each part has random numbers of its own."""
    tables = Tables(module(folder / "first").state_dict())
    model, optimizer = model_over(tables)
    rows = torch.optim.Adagrad(tables.parameters(), lr=LR)
    randoms = [torch.Generator().manual_seed(part).get_state() for part in range(parts)]
    losses, figures, weights = list[list[Tensor]](), list[float](), list(model.parameters())
    for epoch in range(epochs):
        for dense, ids, labels in clicks()("train", epoch):
            gradients, own_losses = [], []
            for part in range(parts):
                own = slice(part * len(labels) // parts, (part + 1) * len(labels) // parts)
                torch.set_rng_state(randoms[part])
                model.zero_grad()
                loss = loss_of(model.train()(dense[own], ids[own]), labels[own])
                torch.autograd.backward(loss)
                randoms[part] = torch.get_rng_state()
                gradients.append([weight.grad * (1 / parts) for weight in weights if weight.grad is not None])
                own_losses.append(loss.detach())
            for weight, *of_parts in zip(weights, *gradients, strict=True):
                weight.grad = tree(of_parts)
            optimizer.step()
            rows.step()
            losses.append(own_losses)
        metrics = EvalMetrics(torch.device("cpu"), parts)
        for dense, ids, labels in clicks()("eval", epoch):
            for part in range(parts):
                own = slice(part * len(labels) // parts, (part + 1) * len(labels) // parts)
                with torch.no_grad():
                    metrics.update(model.eval()(dense[own], ids[own]), labels[own], part=part)
        found = metrics.close().result(0, ["label"], ())
        assert found is not None
        assert found.auc is not None
        assert found.logloss is not None
        figures = [found.auc, found.logloss]
    state = {name: own.detach() for name, own in model.state_dict().items() if not name.startswith("embeddings")}
    named = zip(CONFIGS, tables.tables, strict=True)
    state |= {f"embeddings.embedding_bags.{config.name}.weight": table.detach() for config, table in named}
    return state, losses, figures


def assert_as_stock(session: Session, ranks: int, epochs: int = 1) -> None:
    state, losses, figures = stock(session.folder, ranks, epochs)
    for rank in range(ranks):
        found = load_file(session.folder / f"{rank}.end")
        assert found.pop("evaluation").tolist() == figures, rank
        own = found.pop("losses")  # since it was started last
        assert torch.equal(own, torch.stack([of_parts[rank] for of_parts in losses[-len(own) :]])), rank
        expected = {name: own for name, own in state.items() if rank == 0 or "embedding" not in name}
        assert found.keys() == expected.keys(), "rank 0 alone has the tables"
        differ = {name: int((own != expected[name]).sum()) for name, own in found.items()}
        assert not any(differ.values()), differ
    assert session.remains(killed=True) == []


def test_a_ddp_script_on_two_ranks_has_the_bits_of_stock_pytorch_in_two_parts(session: Session) -> None:
    ended = start(session, 2, ddp=True).ended(200)
    assert ended.code == 0, ended.stderr
    assert_as_stock(session, 2)


def test_a_table_that_the_script_places_changes_no_bit(session: Session) -> None:
    ended = start(session, 2, placement="table").ended(200)
    assert ended.code == 0, ended.stderr
    assert_as_stock(session, 2)
    assert json.loads((session.run_dir / "rank-000" / "job.json").read_bytes())["tables"][0]["placement"] == "table"


@pytest.mark.timeout(600)  # twelve processes of torch, one after the other
@pytest.mark.parametrize("seed", range(count(1, 20)))
def test_ranks_that_are_killed_at_random_steps_end_with_the_bits_of_stock_pytorch(seed: int, session: Session) -> None:
    chance, ranks = random.Random(seed), 4
    steps = sorted(chance.sample(range(STEPS), 2))  # the second life begins before the second one
    kills = {f"{life}.{chance.randrange(ranks)}.{step}": "SIGKILL" for life, step in enumerate(steps)}
    ended = start(session, ranks, "--max-restarts=2", **kills).ended(550)
    assert ended.code == 0, ended.stderr
    assert_as_stock(session, ranks)


@pytest.mark.parametrize("how", ["SIGTERM", "stop"])
def test_a_stop_ends_all_ranks_after_one_step_and_the_run_goes_on_from_there(how: str, session: Session) -> None:
    stopped = {f"0.{rank}.5": how for rank in range(1 if how == "SIGTERM" else 2)}
    ended = start(session, 2, epochs=3, **stopped).ended(200)
    assert ended.code == 0, ended.stderr
    done = session.manifest().train_steps
    assert done == 6 if how == "stop" else 6 < done < 3 * STEPS
    assert not session.manifest().finished
    ended = start(session, 2, epochs=3).ended(200)
    assert ended.code == 0, ended.stderr
    assert_as_stock(session, 2, epochs=3)


@pytest.mark.parametrize(
    ("what", "sentences"),
    [
        (
            "leave out",
            (
                "RuntimeError: rank 1 has not trained train step 7: its loop has left out the look-up or",
                "rank 0 of 2 lost another rank while they exchanged the gradients of step 7",
            ),
        ),
        (
            "alone",
            ("ConfigError: after train step 7 rank 1 has other dense weights than rank 0 (first: weight 0 of Ad",),
        ),
        ("small", ("train step 0 has 1 samples for 2 ranks, and the mean loss of no samples is not a number",)),
        ("wait", ("waited 15 s for the other ranks to exchange", "a rank whose loop has left out a look-up or sum_g")),
        (
            "stop",
            ("waited 15 s for ranks 0; their logs say", "loader.stop() ends a run on several ranks if all"),
        ),
        ("leave", ("ended with code 1",)),  # of its prefetchers; rank 0 loses it in the exchange of step 7
    ],
)
def test_a_rank_that_leaves_out_a_batch_ends_the_others_with_the_step(
    what: str, sentences: Sequence[str], session: Session
) -> None:
    waits = what in ("wait", "stop")
    acts = {f"0.{rank}.7": what for rank in range(1 if what != "alone" else 0, 2)}
    wishes = {"job": {"ranks.timeout": "15s"}} if waits else {"size": 1} if what == "small" else {}
    ended = start(session, 2, **acts, **wishes).ended(200)
    assert ended.code
    for sentence in sentences:
        assert sentence in ended.stderr
    assert session.remains(killed=True) == []
