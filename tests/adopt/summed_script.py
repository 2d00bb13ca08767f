"""A script on ranks that trains as it is and adopted, each time with the wishes that its argument has, as JSON; started
by torchrun. It writes how many values differ."""

import copy
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rowcast
from rowcast.trainer.adopt import adopt, ranks
from rowcast.trainer.adopt.adopted_table import AdoptedTable
from rowcast.trainer.adopt.adoption import Adoption
from rowcast.trainer.adopt.ranks import ComingRows

ROWS, CAPACITY, BATCH = (3000, 2000), "1500 rows", 16
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda weights: [torch.optim.Adam(weights, lr=0.01)],
    "adamw": lambda weights: [torch.optim.AdamW(weights, lr=0.01, weight_decay=0.1)],
    "momentum": lambda weights: [torch.optim.SGD(weights, lr=0.1, momentum=0.9)],
}


class Model(nn.Module):
    """Two tables, and one that is a parameter of the model itself."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.items, self.users = (nn.Embedding(rows, 8, sparse=sparse) for rows in ROWS)
        self.bias = nn.Parameter(torch.randn(ROWS[0], 1))
        self.top = nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor, *, looks_up: bool) -> Tensor:
        found = self.items(ids)
        if looks_up:
            # without the factor, sparse gradients share memory, and DistributedDataParallel divides it for each table
            found = found + 0.5 * self.users(ids % ROWS[1])
        logits: Tensor = self.top(found) + self.bias[ids[:, :1]].sum(1)
        return logits


def samples(steps: int) -> TensorDataset:
    own = torch.Generator().manual_seed(4)
    size = steps * BATCH * dist.get_world_size()
    return TensorDataset((torch.rand(size, 4, generator=own) ** 2 * ROWS[0]).long(), torch.rand(size, 1, generator=own))


def optimizers(model: Model, kind: str) -> list[torch.optim.Optimizer]:
    if kind in OPTIMIZERS:
        made: list[torch.optim.Optimizer] = OPTIMIZERS[kind](model.parameters())
        return made
    tables = [model.items.weight, model.users.weight]
    rest = [model.bias, *model.top.parameters()]
    return [torch.optim.SparseAdam(tables, lr=0.01), torch.optim.Adam(rest, lr=0.01)]


class Demanded:
    """Rows that an adopted script has fetched on demand, and rows that it has trained."""

    def __init__(self) -> None:
        self.trained, self.before = 0, (0, 0)
        plain = AdoptedTable.set_sum

        def set_sum(table: AdoptedTable, ids: Tensor, gradient: Tensor, *, is_sparse: bool) -> None:
            plain(table, ids, gradient, is_sparse=is_sparse)
            self.trained += len(ids)

        AdoptedTable.set_sum = set_sum  # type: ignore[method-assign, assignment]

    def now(self) -> tuple[int, int]:
        process = adopt._doors[0].engine._process if adopt._doors else None
        return (process.engine.num_demanded if process is not None else 0), self.trained

    def begin(self) -> None:
        self.before = self.now()

    def share(self) -> float:
        (demanded, trained), (demanded_before, trained_before) = self.now(), self.before
        return (demanded - demanded_before) / max(1, trained - trained_before)


demanded = Demanded()
tell = ComingRows.tell


def disturbed(wishes: dict[str, float]) -> Callable[..., None]:
    """Lists of coming rows are lost, come some steps late, or have wrong numbers; each with a probability."""
    chance, kept = random.Random(dist.get_rank()), deque[tuple[Any, ...]]()

    def tell_some(ranks: ComingRows, ahead: int, rows: Any) -> None:
        kept.append((ranks, ahead + (chance.random() < wishes.get("wrong", 0)), rows))
        if chance.random() >= wishes.get("late", 0):
            while kept:
                ranks, ahead, rows = kept.popleft()
                if chance.random() >= wishes.get("lost", 0):
                    tell(ranks, ahead, rows)

    return tell_some


def held_back(batches: Iterable[Any], count: int) -> Iterator[Any]:
    kept = deque[Any]()
    for batch in batches:
        kept.append(batch)
        if len(kept) > count:
            yield kept.popleft()
    yield from kept


def train(wishes: dict[str, Any], *, adopted: bool) -> list[Tensor]:
    """Returns losses, norms of gradients, and all weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank if wishes.get("seeds") else 0)
    kind, sums, every = wishes["optimizer"], wishes.get("sum", False), wishes.get("accumulate", 1)
    model = Model(sparse=kind == "sparse")
    if adopted:
        rowcast.adopt(model, CAPACITY, tables=["bias"])
    own = optimizers(model, kind)
    net: Any = model
    if not sums:
        net = DistributedDataParallel(
            model, find_unused_parameters=bool(wishes.get("in_turn")), **wishes.get("ddp", {})
        )
    data = samples(wishes["steps"])
    figures = []
    for epoch in range(wishes.get("epochs", 1)):
        sampler: Any = DistributedSampler(data, shuffle=True, seed=epoch)
        batches = held_back(DataLoader(data, BATCH, sampler=sampler), wishes.get("holds", {}).get(str(rank), 0))
        for step, (ids, labels) in enumerate(batches):
            if (epoch, step) == (0, 2 + max(wishes.get("holds", {"": 0}).values())):  # ids are known after one step
                demanded.begin()
            is_last = (step + 1) % every == 0
            # of a table that the ranks look up in turn; in some steps nobody does
            looks_up = not wishes.get("in_turn") or (step + rank) % world_size == 0
            if wishes.get("in_turn") and not sums and step % 5 == 0:
                looks_up = False
            with nullcontext() if is_last or sums else net.no_sync():
                loss = nn.functional.mse_loss(net(ids, looks_up=looks_up), labels) / every
                loss.backward()
            figures.append(loss.detach())
            if wishes.get("alone") and step == 5 and rank == 0:
                with torch.no_grad():
                    figures.append(model(data.tensors[0][:64], looks_up=True).sum())
            if not is_last:
                continue
            if sums:
                rowcast.sum_gradients(model)
            if wishes.get("clip"):
                figures.append(nn.utils.clip_grad_norm_(model.parameters(), wishes["clip"]))
            for each in own:
                each.step()
                each.zero_grad(set_to_none=wishes.get("set_to_none", True))
            if adopted and step == wishes.get("leaves_at", {}).get(str(rank)):
                leave(wishes)
    wishes["demanded"] = demanded.share()
    return [*figures, *(value.clone() for value in copy.deepcopy(model.state_dict()).values())]


def leave(wishes: dict[str, Any]) -> None:
    """In the middle of a run: killed, or away for long."""
    if wishes["leaves"] == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(wishes["leaves"]))


def differing(plain: Iterable[Tensor], adopted: Iterable[Tensor]) -> int:
    return sum(
        int((one.view(torch.int32) != other.view(torch.int32)).sum()) if one.numel() else 0
        for one, other in zip(plain, adopted, strict=True)
    )


def exchanges() -> int:
    """The synchronised steps of this process."""
    return sum(own._num_begun for own in ranks._ranks.values())


def main() -> None:
    wishes = json.loads(sys.argv[1])
    folder = Path(wishes["folder"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=wishes.get("timeout", 60)))
    found, look_up = [], Adoption.look_up
    for case in wishes["cases"]:
        Adoption.look_up = look_up  # type: ignore[method-assign]
        if not case.get("engine"):  # rows stay in the script's process, which saves the time of its start
            Adoption.look_up = lambda self, device: None  # type: ignore[method-assign]
        os.chdir(tempfile.mkdtemp(dir=folder))
        ComingRows.tell = disturbed(case.get("lists", {}))  # type: ignore[method-assign]
        plain = [] if case.get("adopted_only") else train(case, adopted=False)
        before = exchanges()
        adopted = train(case, adopted=True)
        doors = adopt._doors[0]
        differ = differing(plain or adopted, adopted)
        compared, starts = sum(own.numel() for own in plain), doors.engine.num_starts
        found.append([differ, compared, starts, exchanges() - before, case["demanded"]])
        del doors
        gc.collect()
    (folder / f"{dist.get_rank()}.found").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
