"""Adopted scripts over real prefetchers: their bits are those of the script as it was, and however they end nothing is
left."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, Dataset

import rowcast
from rowcast.job.schema import Transport
from rowcast.job.units import parse_seconds
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.trainer.adopt import records
from rowcast.trainer.adopt.adoption import ALL, job_of, store_of
from rowcast.trainer.run.connection import PrefetcherConnection
from tests.adopt import saved_script
from tests.adopt.engines import Engines
from tests.support.facts import facts
from tests.support.processes import MARK, ROOT, environment_of
from tests.support.repeats import count
from tests.support.small_disk import small_disk

pytestmark = [
    pytest.mark.usefixtures("let_go"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # of torch's own sparse Adagrad
]

ROWS, DIM, CAPACITY = 150, 3, "100 rows"
Adopt = Callable[[Any], Any]


class Clicks(Dataset[Any]):
    def __init__(self, seed: int, size: int = 120) -> None:
        own = torch.Generator().manual_seed(seed)
        self.x = (torch.rand(size, 3, generator=own) ** 2 * ROWS).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return self.x[at], self.x[at].float().mean() / ROWS


class Model(nn.Module):
    """Tables in modules of which two may share one, and one that is a bare parameter."""

    def __init__(self, *, tied: bool, sparse: bool) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, sparse=sparse)
        self.bag = nn.EmbeddingBag(ROWS, DIM, sparse=sparse, mode="sum")
        self.user = nn.Embedding(ROWS, 2, sparse=sparse)
        self.top = nn.Linear(2 * DIM + 2, 1)
        if tied:
            self.bag.weight = self.item.weight

    def forward(self, x: Tensor) -> Tensor:
        own = [self.item(x[:, 0]), self.bag(x), self.user(x[:, 1])]
        scores: Tensor = self.top(torch.cat(own, 1))
        return scores.squeeze(1)


def table_rules(chance: random.Random, *, sparse: bool) -> Callable[[list[Any]], optim.Optimizer]:
    if sparse:
        return chance.choice([lambda own: optim.SparseAdam(own, lr=0.05), lambda own: optim.Adagrad(own, lr=0.05)])
    return chance.choice(
        [
            lambda own: optim.Adam(own, lr=0.05, weight_decay=chance.choice((0.0, 0.01))),
            lambda own: optim.SGD(own, lr=0.05, momentum=0.9),
            lambda own: optim.RMSprop(own, lr=0.01),
            lambda own: optim.AdamW(own, lr=0.02),
        ]
    )


def wild(seed: int, adopt: Adopt) -> list[Tensor]:
    """A script in which much happens that no hint foretells; what it saw."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    sparse = chance.random() < 0.3
    model = adopt(Model(tied=chance.random() < 0.4, sparse=sparse))
    tables = list(dict.fromkeys([model.item.weight, model.bag.weight, model.user.weight]))
    rule, accumulate, seen = table_rules(chance, sparse=sparse), chance.choice((1, 1, 3)), []
    num_new, num_changed = chance.choice((0, 1)), chance.choice((0, 1))
    optimizers: list[optim.Optimizer] = []
    for epoch in range(3):
        if not optimizers or (num_new and epoch == 2):
            optimizers = [rule(tables), optim.Adam(model.top.parameters(), lr=0.01)]
        loader = DataLoader(Clicks(seed), 8, shuffle=True, generator=torch.Generator().manual_seed(epoch))
        for at, (x, y) in enumerate(loader):
            if chance.random() < 0.2:  # what no hint has
                x = torch.cat([x, torch.randint(0, ROWS, (4, 3))])
                y = torch.cat([y, torch.rand(4)])
            loss = F.mse_loss(model(x), y) / accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            seen.append(loss.detach())
            if (at + 1) % accumulate == 0:
                for own in optimizers:
                    own.step()
                    own.zero_grad()
            if chance.random() < 0.1:
                seen += evaluated(model, chance)
            if chance.random() < 0.03:
                seen.append(model.item.weight.detach().clone())
            if chance.random() < 0.05 and epoch:
                break
        if num_changed and epoch == 1:
            for own in optimizers:
                own.zero_grad()
            model.user.weight.data.mul_(0.5)
    states = [own for optimizer in optimizers for of in optimizer.state_dict()["state"].values() for own in of.values()]
    return seen + [torch.as_tensor(own).clone() for own in [*model.state_dict().values(), *states]]


def evaluated(model: nn.Module, chance: random.Random) -> list[Tensor]:
    loader = DataLoader(Clicks(chance.randrange(5), 40), 20)
    with torch.no_grad():
        return [model(x) for x, _ in loader][: chance.randint(1, 2)]


def differing(first: list[Tensor], second: list[Tensor]) -> list[int]:
    assert [own.shape for own in first] == [own.shape for own in second]
    return [at for at, (own, other) in enumerate(zip(first, second, strict=True)) if not torch.equal(own, other)]


@pytest.mark.parametrize("seed", range(count(4, 60)))
def test_a_script_with_all_sorts_of_habits_trains_the_same_bits(
    seed: int, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MOST_WHOLE", (0, ROWS)[seed // 2 % 2])
    memory = ("100 rows", ALL)[seed % 2]
    plain, seen = (
        wild(seed, lambda model: model),
        wild(seed, lambda model: rowcast.adopt(model, CAPACITY, memory=memory)),
    )
    assert len(engines.children) >= 1
    assert differing(plain, seen) == []


def train(model: Any, optimizer: optim.Optimizer, batches: Any, act: Callable[[int], object] = lambda at: None) -> int:
    """Returns the steps. Calls `act` before each."""
    at = 0
    for at, (x, y) in enumerate(batches, 1):
        act(at)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return at


def plain_model() -> tuple[Model, optim.Optimizer]:
    torch.manual_seed(5)
    model = Model(tied=False, sparse=False)
    return model, optim.Adam(model.parameters(), lr=0.05)


def adopted_model(capacity: str = CAPACITY) -> tuple[Model, optim.Optimizer]:
    model, optimizer = plain_model()
    return rowcast.adopt(model, capacity), optimizer


def clicks(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Clicks(1), 8, **settings)


def values(model: nn.Module) -> list[Tensor]:
    return [own.clone() for own in model.state_dict().values()]


def test_forked_workers_of_a_loader_leave_the_engine_alone(engines: Engines) -> None:
    (plain, plain_optimizer), (model, optimizer) = plain_model(), adopted_model()
    for _ in range(2):
        train(plain, plain_optimizer, clicks())
        train(model, optimizer, clicks(num_workers=2, multiprocessing_context="fork"))
    assert differing(values(plain), values(model)) == []
    assert len(engines.children) == 1


def test_a_prefetcher_that_is_killed_is_named_and_leaves_nothing(engines: Engines) -> None:
    model, optimizer = adopted_model()

    def kill(at: int) -> None:
        if at == 9:
            os.kill(engines.children[0].process.pid, signal.SIGKILL)

    with pytest.raises(RowcastError, match=facts("prefetcher", "SIGKILL")):
        train(model, optimizer, clicks(), kill)
    with pytest.raises(RowcastError, match=facts("prefetcher", "SIGKILL")):
        model(torch.arange(12).view(4, 3))
    assert engines.remains() == []


def test_an_interrupt_ends_a_step_and_the_tables_are_those_of_the_step_before(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain, plain_optimizer), (model, optimizer) = plain_model(), adopted_model()
    drive, first, done, interrupts = PrefetcherConnection.drive, [*clicks()], list[int](), list[int]()
    optimizer.register_step_post_hook(lambda *own: done.append(1))

    def interrupted(own: PrefetcherConnection, advance: Callable[[], bool], until: Callable[[], bool]) -> None:
        if len(done) >= 6 and not interrupts and not until():
            interrupts.append(1)
            signal.raise_signal(signal.SIGINT)
        drive(own, advance, until)

    monkeypatch.setattr(PrefetcherConnection, "drive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, clicks())
    assert 6 <= len(done) < len(first), "it was interrupted in mid-run"
    train(plain, plain_optimizer, first[: len(done)])
    assert differing(values(plain), values(model)) == []


def test_more_rows_in_a_step_than_the_capacity_are_refused_with_both_numbers(engines: Engines) -> None:
    model, optimizer = adopted_model("12 rows")
    with pytest.raises(RowcastError, match=r"looks up \d+ rows of .* capacity (has room for|leaves) [\d,]+"):
        train(model, optimizer, clicks())
    assert engines.remains() == []


def test_rows_beyond_memory_that_fill_the_disk_end_the_script_with_a_sentence(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small", 3 * 2**20) as folder:
        monkeypatch.chdir(folder)
        model: Any = nn.EmbeddingBag(20_000, 16)
        rowcast.adopt(model, "400 rows", memory="1000 rows")
        optimizer = optim.Adam(model.parameters())
        batches = [(x, torch.zeros(10, 16)) for x in torch.randperm(20_000).view(-1, 10, 20)]
        with pytest.raises(RowcastError, match=r"has no space for \d+ more bytes .*; free space there, or have"):
            train(model, optimizer, rowcast.ahead(batches))
        assert engines.children[0].ended_within(30), "it closes its files after it has said why"
        assert engines.remains() == []
        monkeypatch.chdir(tmp_path)


def test_memory_that_cannot_hold_the_rows_of_the_device_is_refused(engines: Engines) -> None:
    model, optimizer = plain_model()
    model = rowcast.adopt(model, CAPACITY, memory="300MiB")
    with pytest.raises(RowcastError, match=r"adopt\(memory=...\) is too small .* set \d+ bytes or more"):
        train(model, optimizer, clicks())
    with pytest.raises(ConfigError, match=r"adopt\(memory='4 GiBs'\): '4 GiBs' is not a size"):
        rowcast.adopt(plain_model()[0], CAPACITY, memory="4 GiBs")
    with pytest.raises(
        ConfigError, match="with memory='300MiB', and all models share it: give this one the same instead"
    ):
        rowcast.adopt(plain_model()[0], CAPACITY)


class Started:
    """The script in a process of its own, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file, self._mark = folder, folder / "saved.pt", uuid.uuid4().hex

    def run(self, ending: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "tests.adopt.saved_script", str(self.file), "300 rows", ending]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: self._mark}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120)

    def processes(self) -> list[str]:
        mark = f"{MARK}={self._mark}".encode()
        return [path.name for path in Path("/proc").glob("[0-9]*") if mark in environment_of(path)]

    def remains(self) -> list[str]:
        """Once its processes have had the time to end."""
        deadline_s = time.monotonic() + 30
        while self.processes() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return self.processes() + [path.name for path in self.folder.glob("runs/*")]


def test_a_script_that_is_killed_goes_on_from_what_it_saved_with_the_same_bits(tmp_path: Path) -> None:
    saved_script.main(tmp_path / "plain.pt", "", "whole")
    script, before = Started(tmp_path), shared_memory()
    assert script.run("killed").returncode == -signal.SIGKILL
    assert all("." in name for name in script.remains()), "only the folder of the killed process is left"
    ended = script.run("whole")
    assert ended.returncode == 0, ended.stderr
    assert re.search(
        r"look-ups: [\d,]+ foreseen.* missed steps of rows replayed, 1 start of the engine\n", ended.stderr
    )
    assert script.remains() == []
    assert shared_memory() <= before
    plain = saved_bits(tmp_path / "plain.pt")
    assert len(plain) == 4 + 3 * 4
    assert saved_bits(tmp_path / "saved.pt") == plain


def test_a_script_that_is_stopped_for_a_while_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    saved_script.main(tmp_path / "plain.pt", "", "whole")
    script = Started(tmp_path)
    ended = script.run("stopped")
    assert ended.returncode == 0, ended.stderr
    assert saved_bits(tmp_path / "saved.pt") == saved_bits(tmp_path / "plain.pt")
    assert script.remains() == []


def test_a_prefetcher_that_is_stopped_for_a_while_goes_on_with_the_same_bits(engines: Engines) -> None:
    (plain, plain_optimizer), (model, optimizer) = plain_model(), adopted_model()

    def stop(at: int) -> None:
        if at == 9:
            pid = engines.children[0].process.pid
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(saved_script.STOPPED_S, os.kill, (pid, signal.SIGCONT)).start()

    train(plain, plain_optimizer, clicks())
    train(model, optimizer, clicks(), stop)
    assert differing(values(plain), values(model)) == []
    assert len(engines.children) == 1


def test_no_time_out_that_only_a_job_file_can_raise_ends_a_script(tmp_path: Path) -> None:
    """A script has no job file: it waits for a prefetcher that lives, on however busy a host."""
    job = job_of([], 1, store_of(ALL), torch.device("cpu"), tmp_path)
    names = {name for name in Transport.__struct_fields__ if name.endswith("_timeout")} - {"rejoin_timeout"}
    assert {name: parse_seconds(job["transport"][name]) > 24 * 3600 for name in names} == dict.fromkeys(names, True)


def saved_bits(file: Path) -> list[bytes]:
    return [leaf.numpy().tobytes() for leaf in tree_flatten(torch.load(file))[0] if isinstance(leaf, Tensor)]


def test_a_script_that_ends_by_an_error_of_its_own_shows_it_and_leaves_nothing(tmp_path: Path) -> None:
    script, before = Started(tmp_path), shared_memory()
    ended = script.run("raises")
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("ZeroDivisionError: the script's own error")
    assert ended.stderr.count("Traceback") == 1
    assert script.remains() == []
    assert shared_memory() <= before


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("rowcast-*")}


# tied tables with sparse gradients, sparse accumulation, whole tables changed within one, batches joined to others
@pytest.mark.parametrize("seed", [4, 13, 19, 32, 33])
@pytest.mark.usefixtures("no_engine")
def test_such_a_script_has_its_bits_with_the_rows_in_its_process(seed: int) -> None:
    assert differing(wild(seed, lambda model: model), wild(seed, lambda model: rowcast.adopt(model, CAPACITY))) == []
