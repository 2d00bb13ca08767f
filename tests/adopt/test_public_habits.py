"""Loops with the habits of public training code keep their bits: parameters, optimizer states and losses.

Those of libraries run the library itself. Others are our own small scripts with the habits that their names say.
"""

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

import rowcast
from tests.support.twins import bytes_by_name

pytestmark = [
    pytest.mark.usefixtures("let_go"),
    pytest.mark.filterwarnings("ignore"),  # of these packages
]

Adopt = Callable[[nn.Module, str], Any]
USERS, ITEMS = 500, 700


def skewed(generator: torch.Generator, num_rows: int, *shape: int) -> Tensor:
    return (torch.rand(*shape, generator=generator) ** 2 * num_rows).long()


# libraries


def pykeen(adopt: Adopt, folder: Path) -> dict[str, Any]:
    """Its loop resets the parameters, makes the optimizer anew, trains one batch to see whether it fits, and does both
    again."""
    pytest.importorskip("pykeen", reason="the package pykeen is not installed")
    from pykeen.models import TransE
    from pykeen.training import SLCWATrainingLoop
    from pykeen.triples import TriplesFactory

    drawn = torch.Generator().manual_seed(1)
    triples = torch.stack([skewed(drawn, rows, 700) for rows in (ITEMS, 40, ITEMS)], 1)
    names = [{f"{kind}{at}": at for at in range(num)} for kind, num in (("entity", ITEMS), ("relation", 40))]
    factory = TriplesFactory(triples, *names)
    model = TransE(triples_factory=factory, embedding_dim=8, random_seed=2, entity_constrainer=None)
    adopt(model, "500 rows")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loop = SLCWATrainingLoop(model=model, triples_factory=factory, optimizer=optimizer)
    losses = loop.train(factory, num_epochs=2, batch_size=64, use_tqdm=False, use_tqdm_batch=False)
    return {"losses": losses, "model": model.state_dict(), "optimizer": loop.optimizer.state_dict()}


def torch_rechub(adopt: Adopt, folder: Path) -> dict[str, Any]:
    """Its trainer moves the model, decays weights, stops early, goes back to its best weights, and saves."""
    pytest.importorskip("torch_rechub", reason="the package torch-rechub is not installed")
    from torch_rechub.basic.features import SparseFeature
    from torch_rechub.models.ranking import DeepFM
    from torch_rechub.trainers import CTRTrainer
    from torch_rechub.utils.data import DataGenerator

    drawn = torch.Generator().manual_seed(1)
    x = {name: skewed(drawn, rows, 1000).numpy() for name, rows in (("user", USERS), ("item", ITEMS), ("day", 7))}
    y = (torch.rand(1000, generator=drawn) < 0.4).float().numpy()
    features = [SparseFeature(name, int(ids.max()) + 1, 8) for name, ids in x.items()]
    model = DeepFM(features, features, {"dims": [16], "dropout": 0.2, "activation": "relu"})
    adopt(model, "600 rows")
    loaders = DataGenerator(x, y).generate_dataloader(split_ratio=[0.7, 0.2], batch_size=50)
    trainer = CTRTrainer(
        model,
        optimizer_params={"lr": 0.01, "weight_decay": 1e-3},
        scheduler_fn=torch.optim.lr_scheduler.StepLR,
        scheduler_params={"step_size": 1, "gamma": 0.8},
        n_epoch=3,
        earlystop_patience=1,
        model_path=str(folder),
    )
    trainer.fit(*loaders[:2])
    losses = [trainer.evaluate(trainer.model, loaders[2]), trainer.early_stopper.best_auc]
    saved = torch.load(folder / "model.pth")
    return {"losses": losses, "model": saved, "optimizer": trainer.optimizer.state_dict()}


# sessions: GRU4REC


class ByIndex(Optimizer):
    """An Adagrad of the script, which reads and writes the rows of a sparse gradient by their numbers."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for own in group["params"]:
                if own.grad is None:
                    continue
                state = self.state[own]
                if not state:
                    state["sum"] = torch.full_like(own, 1e-6)
                if own.grad.is_sparse:
                    grad = own.grad.coalesce()
                    rows, values = grad.indices()[0], grad.values()
                    sums = state["sum"][rows] + values**2
                    state["sum"].index_copy_(0, rows, sums)
                    own.index_add_(0, rows, -group["lr"] * values / sums.sqrt())
                else:
                    state["sum"].addcmul_(own.grad, own.grad)
                    own.addcdiv_(own.grad, state["sum"].sqrt(), value=-group["lr"])


class Sessions(nn.Module):
    """Items in, and a score for each item of the batch and for drawn ones out, by other weights and a bias by item."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.items, self.outputs = (nn.Embedding(ITEMS, 8, sparse=sparse) for _ in range(2))
        self.bias = nn.Embedding(ITEMS, 1, sparse=sparse)
        nn.init.zeros_(self.bias.weight)
        self.cell = nn.GRUCell(8, 8)

    def forward(self, items: Tensor, candidates: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(self.items(items), hidden)
        return hidden @ self.outputs(candidates).T + self.bias(candidates).T, hidden


def in_parallel(sessions: list[Tensor], lanes: int) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """One item of each lane and the next of its session, and the lanes that have begun another session."""
    coming = iter(sessions)
    active, at, fresh = [next(coming) for _ in range(lanes)], [0] * lanes, list(range(lanes))
    while True:
        pairs = [session[place : place + 2] for session, place in zip(active, at, strict=True)]
        items, targets = torch.stack(pairs).T
        yield items, targets, fresh
        fresh = []
        for lane in range(lanes):
            at[lane] += 1
            if at[lane] + 1 == len(active[lane]):
                session = next(coming, None)
                if session is None:
                    return
                active[lane], at[lane] = session, 0
                fresh.append(lane)


def gru4rec(adopt: Adopt, folder: Path, *, sparse: bool = False) -> dict[str, Any]:
    """Sessions side by side, hidden states that are reset, the batch's targets as negatives of each other and more
    drawn ones, BPR-max with a penalty on drawn scores, and saved optimizers."""
    drawn = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 7, (60,), generator=drawn).tolist()
    sessions = [skewed(drawn, ITEMS, length) for length in lengths]
    popularity = torch.bincount(torch.cat(sessions), minlength=ITEMS).float() ** 0.5
    model, losses = Sessions(sparse=sparse), []
    adopt(model, "900 rows")
    optimizer = ByIndex(model.parameters(), 0.1) if sparse else torch.optim.Adagrad(model.parameters(), lr=0.1)
    for _ in range(2):
        hidden = torch.zeros(6, 8)
        for items, targets, fresh in rowcast.ahead(in_parallel(sessions, 6)):
            hidden = hidden.detach()
            hidden[fresh] = 0
            candidates = torch.cat([targets, torch.multinomial(popularity, 12, replacement=True)])
            scores, hidden = model(items, candidates, hidden)
            weights = scores.softmax(1)
            better = torch.sigmoid(scores.diag()[:, None] - scores)
            loss = (-torch.log((weights * better).sum(1)) + 0.5 * (weights * scores**2).sum(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        torch.save({"model": model, "optimizer": optimizer}, folder / "last.pt")
        with torch.no_grad():
            all_scores, _ = model(sessions[0][:1], torch.arange(ITEMS), torch.zeros(1, 8))
            losses.append(float(all_scores.topk(20)[0].sum()))
    saved = torch.load(folder / "last.pt", weights_only=False)
    return {"losses": losses, "model": saved["model"].state_dict(), "optimizer": saved["optimizer"].state_dict()}


def indexed_gru4rec(adopt: Adopt, folder: Path) -> dict[str, Any]:
    return gru4rec(adopt, folder, sparse=True)


# towers: NCF


class Drawn(Dataset[tuple[Any, ...]]):
    """Pairs that were seen, and as many more that each epoch draws."""

    def __init__(self, pairs: Tensor) -> None:
        self.seen = pairs.numpy()
        self.pairs, self.labels = self.seen, np.ones(len(pairs), np.float32)

    def draw(self) -> None:
        others = np.repeat(self.seen, 2, axis=0)
        others[:, 1] = np.random.randint(ITEMS, size=len(others))
        self.pairs = np.concatenate([self.seen, others])
        self.labels = np.repeat(np.array([1, 0], np.float32), [len(self.seen), len(others)])

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, at: int) -> tuple[Any, ...]:
        return *self.pairs[at], self.labels[at]


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gmf_users, self.mlp_users = nn.Embedding(USERS, 8), nn.Embedding(USERS, 16)
        self.gmf_items, self.mlp_items = nn.Embedding(ITEMS, 8), nn.Embedding(ITEMS, 16)
        self.layers = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 8), nn.ReLU())
        self.top = nn.Linear(16, 1)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.01)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        product = self.gmf_users(users) * self.gmf_items(items)
        deep = self.layers(torch.cat([self.mlp_users(users), self.mlp_items(items)], -1))
        scores: Tensor = self.top(torch.cat([product, deep], -1)).view(-1)
        return scores


def ncf(adopt: Adopt, folder: Path) -> dict[str, Any]:
    """Two tables each of users and items, negatives that are drawn each epoch in the loader's own data set, a worker,
    and an evaluation that keeps the best model: copied whole, and saved whole."""
    drawn = torch.Generator().manual_seed(1)
    pairs = torch.stack([skewed(drawn, rows, 200) for rows in (USERS, ITEMS)], 1)
    data, model, losses = Drawn(pairs), Towers(), []
    loader = DataLoader(data, 64, shuffle=True, num_workers=1)
    candidates = DataLoader(TensorDataset(pairs[:40, :1].expand(-1, 25), skewed(drawn, ITEMS, 40, 25)), 1)
    adopt(model, "1200 rows")
    criterion, optimizer = nn.BCEWithLogitsLoss(), torch.optim.Adam(model.parameters(), lr=0.01)
    best, best_model = -1.0, model
    for _ in range(2):
        model.train()
        loader.dataset.draw()  # type: ignore[attr-defined]
        for users, items, labels in loader:
            model.zero_grad()
            loss = criterion(model(users, items), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        tops = [model(users[0], items[0]).topk(5)[1] for users, items in candidates]  # with gradients on
        hits = float(torch.stack(tops).float().mean())
        losses.append(hits)
        if hits > best:
            best, best_model = hits, copy.deepcopy(model)
            torch.save(model, folder / "best.pt")
    saved = torch.load(folder / "best.pt", weights_only=False)
    models = {"last": model.state_dict(), "best": best_model.state_dict(), "saved": saved.state_dict()}
    return {"losses": losses, **models, "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("script", [pykeen, torch_rechub, gru4rec, indexed_gru4rec, ncf])
def test_a_public_loop_trains_the_same_bits_when_it_is_adopted(
    script: Callable[[Adopt, Path], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(adopt: Adopt) -> dict[str, Any]:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        return bytes_by_name(script(adopt, tmp_path))

    plain = trained(lambda model, capacity: model)
    assert "rows stay on the device" not in capsys.readouterr().err
    adopted = trained(rowcast.adopt)
    assert "rows stay on the device" in capsys.readouterr().err
    assert plain.keys() == adopted.keys()
    assert [name for name, own in plain.items() if adopted[name] != own] == []
