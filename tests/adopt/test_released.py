"""Tables that begin in files of a released model: `rowcast.adopt(files=...)`. The twin has the table loaded whole."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, optim

import rowcast
from examples.adopt import released_memory
from rowcast.prefetcher.checkpoints.export import export_run
from rowcast.prefetcher.checkpoints.overlay import apply_overlay, write_overlay
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, DataError, RowcastError
from rowcast.trainer.adopt import adopt
from rowcast.trainer.adopt.adopt import say_left_out
from rowcast.trainer.adopt.gradient_sum import TableSum
from rowcast.trainer.adopt.rows import Home, say_of_moves
from tests.adopt.engines import Engines, drop, manifests
from tests.support.facts import facts

ROWS, DIM, NAME, LAST = 5000, 8, "memory.weight", 12
PIECES = [1200, 1, 2000, 799, 1000]

pytestmark = [pytest.mark.usefixtures("let_go"), pytest.mark.filterwarnings("ignore:Sparse invariant checks")]


def release(folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 3) -> Tensor:
    """Writes the table in pieces, two files of them beside another tensor. Returns it whole."""
    folder.mkdir(parents=True)
    whole = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)
    pieces = {f"memory.shard_{n}.weight": rows.clone() for n, rows in enumerate(torch.split(whole, PIECES))}
    first = {name: pieces[name] for name in [*pieces][:2]}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    others = {name: rows for name, rows in pieces.items() if name not in first}
    save_file({**others, "top.weight": torch.zeros(1, DIM)}, folder / "model-00002-of-00002.safetensors")
    return whole.float()


class Model(nn.Module):
    def __init__(self, device: str = "cpu", *, sparse: bool = False) -> None:
        super().__init__()
        self.memory = nn.Embedding(ROWS, DIM, sparse=sparse, device=device)
        torch.manual_seed(5)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.top(self.memory(ids).sum(1))
        return logits


def adamw(parameters: Any) -> optim.Optimizer:
    memory, *others = parameters
    return optim.AdamW([{"params": [memory], "weight_decay": 0.0, "lr": 0.05}, {"params": others}], lr=0.01)


def decayed(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def momentum(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def sparse(parameters: Any) -> optim.Optimizer:
    return optim.SparseAdam([*parameters][:1], lr=0.02)


class Script:
    """Two batches a step; saves itself every fourth step."""

    def __init__(self, optimizer: Any, whole: Tensor | None = None, files: Path | None = None) -> None:
        self.model = Model("cpu" if files is None else "meta", sparse=optimizer is sparse)
        if whole is not None:
            self.model.memory.weight.data.copy_(whole)
        if files is not None:
            rowcast.adopt(self.model, "700 rows", files={NAME: files})
        self.optimizer = optimizer(self.model.parameters())

    def train(self, first: int, end: int, run: Path | None = None) -> list[Tensor]:
        losses = []
        batches = [ids for step in range(first, end) for ids in (batch(2 * step), batch(2 * step + 1))]
        for n, ids in enumerate(rowcast.ahead(batches)):
            loss = F.mse_loss(self.model(ids), ids.float().mean(1, keepdim=True) / ROWS)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            if n % 2:
                nn.utils.clip_grad_value_(self.model.top.parameters(), 0.3)
                self.optimizer.step()
                self.optimizer.zero_grad()
                if run is not None and (step := first + (n + 1) // 2) % 4 == 0:
                    rowcast.save(run, self.model, self.optimizer, step=step)
        return losses

    def rows(self) -> Tensor:
        with torch.no_grad():
            return torch.cat([self.model.memory(torch.arange(ROWS)), self.model.top.weight])


def batch(number: int) -> Tensor:
    return torch.randint(0, ROWS, (16, 4), generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        (torch.bfloat16, adamw),
        (torch.float16, momentum),
        (torch.float32, sparse),
        (torch.bfloat16, decayed),
    ],
)
def test_a_table_in_files_has_the_bits_of_the_table_loaded_whole(
    dtype: torch.dtype, optimizer: Any, engines: Engines, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    say_of_moves.cache_clear()
    whole = release(tmp_path / "released", dtype)
    twin, script = Script(optimizer, whole), Script(optimizer, files=tmp_path / "released")
    assert script.model.memory.weight.device.type == "cpu"
    losses, expected = script.train(0, 10), twin.train(0, 10)
    assert all(map(torch.equal, losses, expected))
    assert torch.equal(script.rows(), twin.rows())
    said = capfd.readouterr().err.count("moves all 5,000 rows of memory.weight at every step")
    assert said == (optimizer is decayed)


def test_a_save_has_changed_rows_and_goes_on_with_equal_files_elsewhere(engines: Engines, tmp_path: Path) -> None:
    run = tmp_path / "run"
    twin = Script(adamw, release(tmp_path / "a"))
    twin.train(0, LAST)
    Script(adamw, files=tmp_path / "a").train(0, 6, run)
    looked_up = torch.cat([batch(number) for number in range(8)])
    assert manifests(run)[0].num_rows == len(torch.unique(looked_up))
    drop()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    script = Script(adamw, files=tmp_path / "b")
    assert rowcast.restore(run, script.model, script.optimizer) == 4
    script.train(4, LAST, run)
    assert torch.equal(script.rows(), twin.rows())
    export_run(run, tmp_path / "all")
    assert torch.equal(load_file(tmp_path / "all")["embedding_bags.memory.weight.weight"], twin.rows()[:ROWS])
    check_overlay(run, tmp_path, twin.rows()[:ROWS].to(torch.bfloat16))
    drop()
    save_file({NAME: torch.zeros(ROWS, DIM)}, tmp_path / "b" / "model-00001-of-00002.safetensors")
    (tmp_path / "b" / "model-00002-of-00002.safetensors").unlink()
    script = Script(adamw, files=tmp_path / "b")
    with pytest.raises(ConfigError, match=facts("memory.weight", "model-00001-of-00002.safetensors", "19,392 bytes")):
        rowcast.restore(run, script.model, script.optimizer)


def check_overlay(run: Path, folder: Path, whole: Tensor) -> None:
    """`whole`: as the released files have it after training."""
    (folder / "b" / "config.json").write_text("{}")
    overlay, first, new = folder / "o.safetensors", torch.cat(pieces_of(folder / "b")), folder / "new"
    overlay.write_bytes(b"an earlier one")
    killed_in(lambda: write_overlay(run, overlay), os, "fsync")
    killed_in(lambda: write_overlay(run, overlay), Path, "rename")
    assert overlay.read_bytes() == b"an earlier one"
    killed_in(lambda: write_overlay(run, overlay), Disk, "sync_folder")
    num_rows = len(load_file(overlay)[f"{NAME}.rows"])
    assert write_overlay(run, overlay) == num_rows
    assert num_rows == int((first.view(torch.int16) != whole.view(torch.int16)).any(1).sum())
    assert load_file(overlay)[NAME].dtype == torch.bfloat16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(ConfigError, match=facts("--out", "No space left")):
            apply_overlay(overlay, folder / "b", new)
    assert sorted(path.name for path in folder.iterdir() if "new" in path.name) == []
    for place, name in ((shutil, "copyfile"), (os, "link"), (os, "fsync"), (Path, "rename")):
        killed_in(lambda: apply_overlay(overlay, folder / "b", new), place, name)
        assert not new.exists()
    assert torch.equal(torch.cat(pieces_of(folder / "b")), first)
    killed_in(lambda: apply_overlay(overlay, folder / "b", folder / "renamed"), Disk, "sync_folder")
    assert apply_overlay(overlay, folder / "b", new) == 2
    for made in (new, folder / "renamed"):
        assert torch.equal(torch.cat(pieces_of(made)).view(torch.int16), whole.view(torch.int16))
    assert (new / "config.json").samefile(folder / "b" / "config.json")
    write_overlay(run, folder / "f32.safetensors", "fp32")
    apply_overlay(folder / "f32.safetensors", folder / "b", folder / "again")
    assert all(map(torch.equal, pieces_of(folder / "again"), pieces_of(new)))
    with pytest.raises(ConfigError, match=facts("the overlay is for model-00001-of-00002.safetensors", "--apply")):
        apply_overlay(overlay, new, folder / "twice")
    with pytest.raises(ConfigError, match=facts("--out", "within the released files", str(folder / "b"))):
        apply_overlay(overlay, folder / "b", folder / "b" / "new")
    with pytest.raises(ConfigError, match=facts("none", "No such file", "--out")):
        write_overlay(run, folder / "none" / "o.safetensors")
    with pytest.raises(DataError, match=facts("model-00001-of-00002.safetensors", "no overlay")):
        apply_overlay(new / "model-00001-of-00002.safetensors", folder / "b", folder / "twice")


def killed_in(work: Callable[[], object], place: object, name: str) -> None:
    """Does the work in a fork that is killed where it first calls a function."""
    if (pid := os.fork()) == 0:
        setattr(place, name, lambda *given, **named: os.kill(os.getpid(), signal.SIGKILL))
        work()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def failing(path: Path, target: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def pieces_of(folder: Path) -> list[Tensor]:
    tensors = {name: rows for path in folder.glob("*.safetensors") for name, rows in load_file(path).items()}
    return [tensors[f"memory.shard_{n}.weight"] for n in range(len(PIECES))]


def test_the_example_trains_the_memory_of_the_model_that_it_released(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} and {number * number} " * 300)
    folders = ["--text", f"{tmp_path}/text", "--released", f"{tmp_path}/m", "--run", f"{tmp_path}/run"]
    held_out = []
    for options in (["all"], ["nothing", "--capacity=900 rows"], ["memory", "--capacity=900 rows"]):
        monkeypatch.setattr("sys.argv", ["released_memory", *folders, "--rows=2000", "--steps=4", "--train", *options])
        released_memory.main()
        held_out.append(capsys.readouterr().out.split()[2])
    assert float(held_out[1]) == pytest.approx(float(held_out[0]), abs=0.01), "the memory is rounded to bfloat16"
    assert float(held_out[2]) < float(held_out[1])
    assert write_overlay(tmp_path / "run", tmp_path / "o.safetensors") > 0
    assert apply_overlay(tmp_path / "o.safetensors", tmp_path / "m", tmp_path / "new") == 1


# bad input


class TwoRanks:
    """Rank 0 gives `first`, and this rank is rank 1."""

    def __init__(self, first: list[bytes]) -> None:
        self.first, self.coming = first, SimpleNamespace(tables=set())

    def gather(self, mine: bytes) -> list[bytes]:
        self.first.append(mine)
        return [self.first[0], mine]


class Adopted(NamedTuple):
    home: Home
    name: str = NAME
    dim: int = DIM
    num_rows: int = ROWS
    shape: tuple[int, ...] = (ROWS, DIM)


def test_ranks_whose_folders_have_other_contents_are_refused(tmp_path: Path) -> None:
    first = list[bytes]()
    for folder, seed in (("a", 3), ("copy", 3), ("other", 4)):
        release(tmp_path / folder, seed=seed)
        script = Script(adamw, files=tmp_path / folder)
        table: Any = Adopted(adopt._doors[0].engine.homes[0])
        ranks: Any = TwoRanks(first)
        tables = TableSum([table], ranks)
        if folder == "other":
            with pytest.raises(ConfigError, match=facts("rank 0 adopts memory.weight", "rank 1", "capacity and files")):
                tables.begin_alike(sends=False)
        else:
            tables.begin_alike(sends=False)
        drop()
        del script


def named(folder: Path, **tensors: Tensor) -> None:
    folder.mkdir()
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / "a.safetensors")


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"memory__bias": torch.zeros(ROWS, DIM)}, facts("none of the 1 files", NAME, "memory.weight.shard_0")),
        ({"memory__weight": torch.zeros(ROWS, DIM + 1)}, facts("a.safetensors", NAME, "[5000, 9]", "8 values")),
        ({"memory__weight": torch.zeros(ROWS - 1, DIM)}, facts(NAME, "4,999 rows", "5,000")),
        ({"memory__weight": torch.zeros(ROWS, DIM, dtype=torch.float8_e4m3fn)}, facts("F8_E4M3", "F32, BF16, F16")),
        (
            {"memory__weight__shard_0": torch.zeros(3000, DIM), "memory__weight__shard_2": torch.zeros(2000, DIM)},
            facts("has 2 pieces", "number 2", "lacks number 1"),
        ),
        (
            {"memory__weight__shard_0": torch.zeros(3000, DIM), "memory__shard_0__weight": torch.zeros(2000, DIM)},
            facts("memory.weight.shard_0", "memory.shard_0.weight", "both the rows of number 0"),
        ),
    ],
)
def test_files_without_the_rows_of_the_parameter_are_refused(
    tensors: dict[str, Tensor], sentence: str, tmp_path: Path
) -> None:
    named(tmp_path / "files", **tensors)
    model = Model()
    before = model.memory.weight.detach().clone()
    with pytest.raises(ConfigError, match=sentence):
        rowcast.adopt(model, "700 rows", files={NAME: tmp_path / "files"})
    assert torch.equal(model.memory.weight, before)


def test_a_table_of_another_dtype_or_kept_is_refused(tmp_path: Path) -> None:
    release(tmp_path / "a")
    with pytest.raises(ConfigError, match=facts(NAME, "torch.bfloat16")):
        rowcast.adopt(Model().to(torch.bfloat16), "700 rows", files={NAME: tmp_path / "a"})
    with pytest.raises(ConfigError, match=facts("keep=['memory.weight']", "never on the device as a whole")):
        rowcast.adopt(Model(), "700 rows", keep=[NAME], files={NAME: tmp_path / "a"})
    with pytest.raises(ConfigError, match=facts("adopt(files=['memory'])", "memory.weight")):
        rowcast.adopt(Model(), "700 rows", files={"memory": tmp_path / "a"})


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def replaced(path: Path) -> None:
    shutil.copyfile(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("change", [cut, replaced, Path.unlink])
def test_a_file_that_changes_ends_the_script_before_a_row_of_it_is_trained(
    change: Callable[[Path], None], is_here: bool, engines: Engines, tmp_path: Path
) -> None:
    release(tmp_path / "a")
    script = Script(adamw, files=tmp_path / "a")
    script.train(0, 0 if is_here else 3)
    change(tmp_path / "a" / "model-00002-of-00002.safetensors")
    with pytest.raises(RowcastError, match=facts("model-00002-of-00002.safetensors")):
        script.train(3, 12)


@pytest.mark.usefixtures("no_engine")
def test_a_row_that_is_not_finite_is_named_when_a_step_needs_it(tmp_path: Path) -> None:
    rows = torch.zeros(ROWS, DIM)
    rows[4321, 2] = torch.nan
    named(tmp_path / "a", memory__weight=rows)
    model = rowcast.adopt(Model(), "700 rows", files={NAME: tmp_path / "a"})
    model(torch.tensor([[4320, 4322]]))
    with pytest.raises(DataError, match=facts("a.safetensors", "row 4,321 of memory.weight", "not finite")):
        model(torch.tensor([[4320, 4321]]))


@pytest.mark.usefixtures("no_engine")
def test_such_a_table_is_left_out_of_states_and_refused_as_a_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    release(tmp_path / "a")
    say_left_out.cache_clear()
    script = Script(decayed, files=tmp_path / "a")
    state = script.model.state_dict()
    assert sorted(state) == ["top.bias", "top.weight"]
    assert capfd.readouterr().err.count("state_dict() leaves memory.weight out") == 1
    with torch.device("meta"):
        empty = rowcast.adopt(Model(), "700 rows", files={NAME: tmp_path / "a"})
    empty.load_state_dict(state, assign=True)
    assert torch.equal(empty(batch(0)), script.model(batch(0)))
    script.train(0, 1)
    with pytest.raises(ConfigError, match=facts("5,000 rows of released files", "rowcast.save")):
        script.model.memory.weight.detach().sum()
    with pytest.raises(ConfigError, match=facts("memory.weight has 5,000 rows", '"weight_decay": 0')):
        rowcast.save(tmp_path / "run", script.model, script.optimizer, step=1)
