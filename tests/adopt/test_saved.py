"""An adopted script that saves itself as a run goes on with its bits, and what reads runs reads its rows."""

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

import rowcast
from rowcast.deploy.score import scoring_content
from rowcast.job.training_identity import differing_settings
from rowcast.prefetcher.checkpoints.export import export_run
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.protocol.messages import Save
from rowcast.runtime.crash_points import VARIABLE
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.serving.model import Model as Served
from rowcast.serving.publisher import Publisher
from rowcast.trainer.adopt import records
from rowcast.trainer.adopt.script_engine import ScriptEngine
from rowcast.trainer.run.connection import PrefetcherConnection
from tests.adopt.engines import Engines, drop, manifests
from tests.support import jobs
from tests.support.facts import facts

pytestmark = [
    pytest.mark.usefixtures("let_go"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # of torch's own sparse Adagrad
]

ROWS, STEPS, EVERY = 150, 24, 4
RULES: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adam": lambda own: optim.Adam(own, lr=0.05),
    "AdamW, all rows move": lambda own: optim.AdamW(own, lr=0.05, weight_decay=0.01),
    "momentum": lambda own: optim.SGD(own, lr=0.05, momentum=0.9),
    "no states": lambda own: optim.SGD(own, lr=0.05),
    "sparse": lambda own: optim.Adagrad(own, lr=0.05, initial_accumulator_value=0.1),
}


class Net(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, 3, sparse=sparse)
        self.user = nn.EmbeddingBag(ROWS, 2, sparse=sparse, mode="sum")
        self.top = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.top(torch.cat([self.item(x[:, 0]), self.user(x)], 1))
        return scores.squeeze(1)


class Pair(NamedTuple):
    first: int
    second: int


class Best:
    """Keeps numbers, text and tensors."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"losses": [], "name": "", "top": torch.zeros(5)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Script:
    def __init__(self, rule: str, seed: int = 3) -> None:
        torch.manual_seed(seed)
        self.model: Any = Net(sparse=rule == "sparse")
        self.optimizer = RULES[rule](self.model.parameters())
        self.schedule = optim.lr_scheduler.StepLR(self.optimizer, 5, 0.9)
        self.best = Best()
        self.objects: list[Any] = [self.model, self.optimizer, self.schedule, self.best]

    def train(self, first: int, end: int, folder: Path | None = None) -> "Script":
        for step in range(first, end):
            x = batch(step)
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(x), x[:, 0] / ROWS)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.schedule.step()
            self.best.state = {"losses": [*self.best.state["losses"], loss.item()], "name": f"{step}", "top": x[0] / 2}
            if folder is not None and (step + 1) % EVERY == 0:
                rowcast.save(folder, *self.objects, step=step + 1)
        return self

    def adopted(self) -> "Script":
        rowcast.adopt(self.model, "100 rows")
        return self

    def bits(self) -> list[Tensor]:
        states = [own for of in self.optimizer.state_dict()["state"].values() for own in of.values() if own is not None]
        numbers = torch.tensor([*self.schedule.get_last_lr(), *self.best.state["losses"]], dtype=torch.float64)
        return [torch.as_tensor(own).clone() for own in (*self.model.state_dict().values(), *states, numbers)]


def batch(step: int) -> Tensor:
    own = torch.Generator().manual_seed(step)
    return (4 * step + torch.randint(0, 50, (8, 3), generator=own)) % ROWS


def resumed(rule: str, folder: Path) -> tuple[Script, int]:
    """The script as another process has it: with other first values."""
    script = Script(rule, seed=99).adopted()
    return script, rowcast.restore(folder, *script.objects)


def differing(first: Script, second: Script) -> int:
    """Tensors with other bits."""
    pairs = zip(first.bits(), second.bits(), strict=True)
    return sum(own.numpy().tobytes() != other.numpy().tobytes() for own, other in pairs)


@pytest.mark.parametrize("rule", RULES)
def test_a_script_that_was_lost_goes_on_from_its_save_with_the_same_bits(
    rule: str, engines: Engines, tmp_path: Path
) -> None:
    plain = Script(rule).train(0, STEPS)
    Script(rule).adopted().train(0, 10, tmp_path / "run")
    drop()
    script, step = resumed(rule, tmp_path / "run")
    assert step == 8
    script.train(step, 19, tmp_path / "run")
    drop()
    script, step = resumed(rule, tmp_path / "run")
    assert step == 16
    script.train(step, STEPS, tmp_path / "run")
    assert differing(plain, script) == 0
    assert [own.train_steps for own in manifests(tmp_path / "run")] == [24, 20], "two stay"


POINTS = ["dense file synced", "rows not collected", "row file written:2", "manifest not renamed", "manifest renamed"]


@pytest.mark.parametrize("point", [*POINTS, "manifest durable", "old manifest removed", "garbage removed"])
def test_killed_at_any_moment_of_a_save_the_one_before_is_whole(
    point: str, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, folder = Script("Adam").train(0, STEPS), tmp_path / "run"
    script = Script("Adam").adopted().train(0, 9, folder)
    before = manifests(folder)
    drop()
    monkeypatch.setenv(VARIABLE, point)
    script, step = resumed("Adam", folder)
    with pytest.raises(RowcastError, match=facts("prefetcher", "SIGKILL")):
        script.train(step, 13, folder)
    monkeypatch.delenv(VARIABLE)
    drop()
    is_there = point in ("manifest renamed", "manifest durable", "old manifest removed", "garbage removed")
    assert manifests(folder)[0].train_steps == (12 if is_there else 8)
    assert is_there or manifests(folder)[0] == before[0]
    Checkpoints(folder, Disk()).verify(manifests(folder)[0])
    script, step = resumed("Adam", folder)
    assert differing(plain, script.train(step, STEPS, folder)) == 0
    assert len(manifests(folder)) == 2


def test_a_script_goes_on_after_a_save_that_failed(engines: Engines, tmp_path: Path) -> None:
    plain, script = Script("sparse").train(0, 12), Script("sparse").adopted().train(0, 6, tmp_path)
    before, blocked = manifests(tmp_path), tmp_path / "checkpoints" / "step-000000000006"
    blocked.write_bytes(b"")
    with pytest.raises(RowcastError, match=facts("save: ", "step-000000000006")):
        rowcast.save(tmp_path, *script.objects, step=6)
    assert manifests(tmp_path) == before
    blocked.unlink()
    script.train(6, 10, tmp_path)
    assert len(engines.children) == 1, "the engine goes on"
    drop()
    script, step = resumed("sparse", tmp_path)
    assert (step, differing(plain, script.train(step, 12))) == (8, 0)


def test_an_interrupt_of_a_save_leaves_a_run_that_goes_on(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, script = Script("Adam").train(0, 12), Script("Adam").adopted().train(0, 6, tmp_path)
    answers, drive = ScriptEngine._answers_to, PrefetcherConnection.drive

    def interrupted(own: PrefetcherConnection, advance: Callable[[], bool], until: Callable[[], bool]) -> None:
        signal.raise_signal(signal.SIGINT)
        drive(own, advance, until)

    def asked(engine: ScriptEngine, asks: Any) -> bytearray:
        if isinstance(asks[0], Save):
            patched.setattr(PrefetcherConnection, "drive", interrupted)
        return answers(engine, asks)

    with monkeypatch.context() as patched:
        patched.setattr(ScriptEngine, "_answers_to", asked)
        with pytest.raises(KeyboardInterrupt):
            rowcast.save(tmp_path, *script.objects, step=6)
    script.train(6, 10, tmp_path)
    drop()
    script, step = resumed("Adam", tmp_path)
    assert (step, differing(plain, script.train(step, 12))) == (8, 0)


def test_only_rows_with_another_value_are_written_also_after_a_restart(engines: Engines, tmp_path: Path) -> None:
    Script("sparse").adopted().train(0, 9, tmp_path)
    drop()
    script, step = resumed("sparse", tmp_path)
    script.train(step, 12, tmp_path)
    looked_up = torch.cat([batch(own) for own in range(8, 12)])
    changed = len(torch.unique(looked_up[:, 0])) + len(torch.unique(looked_up))
    [shard] = manifests(tmp_path)[0].shards
    assert shard.layers[-1].kind == "delta"
    assert 0 < shard.layers[-1].num_rows <= changed


def test_what_reads_runs_has_the_rows_of_the_script(engines: Engines, tmp_path: Path) -> None:
    folder, versions = tmp_path / "run", tmp_path / "versions"
    publisher = Publisher(folder, versions, "fp32", 3)
    script = Script("Adam").adopted()
    for first in (0, 8):  # a whole version, and a changed one
        script.train(first, first + 8, folder)
        with publisher.lock():
            assert publisher.publish() is not None
    values, states = script.model.state_dict(), script.optimizer.state_dict()["state"]
    export_run(folder, tmp_path / "all.safetensors")
    exported, served = load_file(tmp_path / "all.safetensors"), Served(versions)
    for at, name in enumerate(["item.weight", "user.weight"]):
        assert torch.equal(exported[f"embedding_bags.{name}.weight"], values[name])
        assert torch.equal(torch.from_numpy(served.rows(name, range(ROWS))), values[name])
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(exported[f"optimizer.{name}.{state}"], states[at][state])
    for name in ("top.weight", "top.bias"):
        assert torch.equal(exported[name], values[name])
        assert torch.equal(torch.from_numpy(served.dense()[name].copy()), values[name])
    [manifest, _] = manifests(folder)
    job = jobs.job(job={"run_dir": str(folder)})
    for use in (
        lambda: rowcast.load(folder),
        lambda: scoring_content(manifest, folder, "any"),
        lambda: differing_settings(manifest, job),
    ):
        with pytest.raises(ConfigError, match=facts("rowcast.save", "rowcast.restore")):
            use()


def test_a_state_that_cannot_be_saved_or_is_of_others_is_refused_by_name(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script("Adam")
    with pytest.raises(ConfigError, match=facts("adopt")):
        rowcast.save(tmp_path, script.model, step=1)
    script.adopted().train(0, 4, tmp_path)
    script.best.state["rows"] = {1, 2}
    with pytest.raises(ConfigError, match=facts("Best", "set")):
        rowcast.save(tmp_path, *script.objects, step=5)
    for state, kind in (({("a", 1): 2}, "('a', 1)"), (Pair(1, 2), "Pair"), (torch.eye(2).to_sparse(), "Tensor")):
        script.best.state["rows"] = state
        with pytest.raises(ConfigError, match=facts("Best", kind)):
            rowcast.save(tmp_path, *script.objects, step=5)
    for step in (-1, 5.0, 10**12, None):
        with pytest.raises(ConfigError, match=facts(f"save(step={step!r})", "a whole number")):
            rowcast.save(tmp_path, step=step)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=facts("Generator", "state_dict")):
        rowcast.save(tmp_path, torch.Generator(), step=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=facts("step=4", "step 4", "ascend")):
        rowcast.save(tmp_path, step=4)
    with pytest.raises(ConfigError, match=facts("keep=0")):
        rowcast.save(tmp_path, step=5, keep=0)
    with monkeypatch.context() as patched:
        patched.setattr(records, "MOST_WHOLE", ROWS - 1)
        with pytest.raises(ConfigError, match=facts("item.weight", ROWS, "rowcast.tables(folder)")):
            rowcast.save(tmp_path, step=5)
    script.model(batch(5)).sum().backward()
    with pytest.raises(ConfigError, match=facts("item.weight", "gradient", "zero_grad")):
        rowcast.save(tmp_path, step=5)
    drop()
    other, same = Script("Adam"), Script("Adam")
    other.model.item = nn.Embedding(ROWS + 1, 3)
    rowcast.adopt(other.model, "100 rows")
    assert rowcast.restore(tmp_path / "none", other.model) == 0
    with pytest.raises(ConfigError, match=facts("item.weight [150, 3]", "item.weight [151, 3]")):
        rowcast.restore(tmp_path, *other.objects)
    with pytest.raises(ConfigError, match=facts("step 4", "rowcast.restore")):
        rowcast.save(tmp_path, step=5)
    drop()
    same.adopted()
    with pytest.raises(ConfigError, match=facts("Net, Adam, StepLR, Best", "Net, StepLR")):
        rowcast.restore(tmp_path, same.model, same.schedule)
    same.model.top = nn.Linear(4, 1)
    with pytest.raises(ConfigError, match=facts("Net", "size mismatch for top.weight")):
        rowcast.restore(tmp_path, *same.objects)


class Wrapped:
    """Shows progress, say."""

    def __init__(self, loader: Any) -> None:
        self.inner = loader

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Any:
        return iter(self.inner)


class Shuffles(Sampler[int]):
    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count, self.drawn_from = count, generator

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter(torch.randperm(self.count, generator=self.drawn_from).tolist())


LOADERS: dict[str, Callable[[Any, torch.Generator], Any]] = {
    # without a generator of its own the loader draws once, as an epoch begins
    "none": lambda data, own: DataLoader(data, 8, shuffle=True),
    "loader": lambda data, own: DataLoader(data, 8, shuffle=True, generator=own),
    "sampler": lambda data, own: DataLoader(data, 8, sampler=Shuffles(len(data), own)),
    "batch sampler": lambda data, own: DataLoader(data, batch_sampler=BatchSampler(Shuffles(len(data), own), 8, False)),
    "wrapped": lambda data, own: Wrapped(DataLoader(data, 8, shuffle=True, generator=own)),
}


class Epochs(Script):
    """Shuffled epochs, and steps that draw from all generators that scripts use."""

    def __init__(self, seed: int, *, owned: str) -> None:
        """`owned`: what has a generator of its own."""
        super().__init__("Adam", seed)
        random.seed(seed)
        np.random.seed(seed)
        ids = torch.cat([batch(step) for step in range(10)])
        self.generator = torch.Generator().manual_seed(seed)
        self.loader = LOADERS[owned](TensorDataset(ids, ids[:, 0] / ROWS), self.generator)

    def run(self, step: int, end: int, folder: Path | None = None) -> "Epochs":
        epoch, done = divmod(step, len(self.loader))
        for _ in range(epoch, 3):
            for x, y in rowcast.ahead(self.loader, skip=done):
                if step == end:
                    return self
                noise = torch.rand(()) + random.random() + np.random.rand()
                self.optimizer.zero_grad()
                loss = F.mse_loss(self.model(x), y) * noise
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                step += 1
                if folder is not None and step % EVERY == 0:
                    rowcast.save(folder, *self.objects, step=step)
            done = 0
            assert len([*DataLoader(numbers(9), 4, shuffle=True)]) == 3, "an evaluation"
        return self


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


@pytest.mark.parametrize("owned", LOADERS)
def test_a_script_that_was_lost_within_an_epoch_goes_on_at_its_batch(
    owned: str, engines: Engines, tmp_path: Path
) -> None:
    plain = Epochs(3, owned=owned).run(0, 30)
    left: Any = Epochs(3, owned=owned).adopted()
    left.run(0, 7, tmp_path)
    for seed, expected, end in ((7, 4, 15), (8, 12, 25), (9, 24, 30)):
        drop()
        left = Epochs(seed, owned=owned).adopted()
        assert rowcast.restore(tmp_path, *left.objects) == expected
        left.run(expected, end, tmp_path)
    assert differing(plain, left) == 0
    assert owned == "none" or torch.equal(left.generator.get_state(), plain.generator.get_state())


def test_a_loop_cannot_go_on_where_its_beginning_is_not_known(engines: Engines, tmp_path: Path) -> None:
    Script("Adam").adopted().train(0, 4, tmp_path)
    drop()
    resumed("Adam", tmp_path)
    with pytest.raises(ConfigError, match=facts("skip=2", "no loop")):
        iter(rowcast.ahead(DataLoader(numbers(3)), skip=2))
    rest = rowcast.ahead(DataLoader(numbers(3)), skip=2)
    assert [int(own) for [own] in rest] == [2], "the first loop goes on"
    assert [int(own) for [own] in rest] == [0, 1, 2]
    assert [*rowcast.ahead(iter([3, 4, 5]), skip=1)] == [4, 5]
    with pytest.raises(ConfigError, match=facts("an enumerate, which has begun its loader", "give the loader itself")):
        rowcast.ahead(enumerate(DataLoader(numbers(3))), skip=1)
