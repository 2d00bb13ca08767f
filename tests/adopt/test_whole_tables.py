"""Arrays of whole tables: where first values lie in a file, what a read costs, and what NumPy may write."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rowcast
from rowcast.prefetcher.stores.records import mapped
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.trainer.adopt.records import ChangedRows, place_of
from tests.support.facts import facts

ROWS, DIM = 40, 3

pytestmark = pytest.mark.usefixtures("no_engine", "let_go")


def tensor_of(path: Path, numbers: int, *, shared: bool = True) -> Tensor:
    """A file of 0, 1, 2, ... as a tensor."""
    np.arange(numbers, dtype=np.float32).tofile(path)
    return torch.from_file(str(path), shared=shared, size=numbers)


VIEWS = {
    "the whole file": lambda flat: flat[: ROWS * DIM].view(ROWS, DIM),
    "behind a header": lambda flat: flat[7 : 7 + ROWS * DIM].view(ROWS, DIM),
    "some columns": lambda flat: flat[: ROWS * 5].view(ROWS, 5)[:, 1:4],
    "each second row": lambda flat: flat[: 2 * ROWS * DIM].view(2 * ROWS, DIM)[::2],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_of_a_mapped_file_is_read_where_it_lies(view: Any, tmp_path: Path) -> None:
    weights = view(tensor_of(tmp_path / "numbers", 300))
    place = place_of(weights)
    assert place is not None
    assert place.path == str(tmp_path / "numbers")
    assert np.array_equal(mapped(place, ROWS), weights.numpy())


def test_what_no_place_can_say_is_copied(tmp_path: Path) -> None:
    flat = tensor_of(tmp_path / "numbers", 300)
    assert place_of(flat[: ROWS * DIM].view(DIM, ROWS).T) is None
    assert place_of(flat[:DIM].expand(ROWS, DIM)) is None
    assert place_of(torch.rand(ROWS, DIM)) is None
    private = tensor_of(tmp_path / "private", 300, shared=False)
    private[5] = -1
    assert place_of(private[: ROWS * DIM].view(ROWS, DIM)) is None


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    place = place_of(tensor_of(tmp_path / "numbers", 300)[100 : 100 + ROWS * DIM].view(ROWS, DIM))
    assert place is not None
    with (tmp_path / "numbers").open("r+b") as file:
        file.truncate(600)
    with pytest.raises(ConfigError, match=facts("numbers", 600, 40, 880)):
        mapped(place, ROWS)


class Script:
    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = rowcast.adopt(nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)), "20 rows")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, **settings)

    @property
    def weight(self) -> Any:
        return self.model[0].weight

    def step(self, *ids: int) -> None:
        self.model(torch.tensor(ids)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(("settings", "moving"), [({}, {1, 2, 5, 9}), ({"weight_decay": 0.1}, set(range(ROWS)))])
def test_a_whole_read_reads_the_rows_that_may_have_moved_once(
    settings: dict[str, float], moving: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(**settings)
    script.step(1, 2)
    held = script.weight.data
    before = held.clone()
    script.step(5, 9)
    asked: list[int] = []
    plain = ChangedRows.read
    monkeypatch.setattr(ChangedRows, "read", lambda rows, ids: asked.extend(ids.tolist()) or plain(rows, ids))  # type: ignore[func-returns-value]
    moved = (held != before).any(1).nonzero().flatten()
    assert set(asked) == moving
    assert set(moved.tolist()) <= moving
    asked.clear()
    held.sum()
    assert asked == []


def test_states_are_read_only_where_they_are_used() -> None:
    script = Script()
    script.step(1, 2)
    folder = script.weight.table.home.folder
    script.weight.data.sum()
    assert len([*folder.glob("*.whole.*")]) == 1
    states = script.optimizer.state_dict()["state"][0]
    assert len([*folder.glob("*.whole.*")]) == 1
    states["exp_avg"].sum()
    assert len([*folder.glob("*.whole.*")]) == 2


def test_arrays_made_after_a_look_up_are_read_only() -> None:
    script = Script()
    script.step(1, 2)
    array = script.weight.detach().numpy()
    with pytest.raises(RowcastError, match=facts("torch.no_grad()", "weight[...] = ...")):
        array[0] = 1
    with pytest.raises(RowcastError, match=facts("__dlpack__", "0.weight")):
        np.from_dlpack(script.weight.data)


def test_a_write_through_a_kept_array_ends_the_script_at_the_next_whole_read() -> None:
    script = Script()
    array = script.weight.detach().numpy()
    array[3] = 1
    script.step(1, 3)
    assert float(script.weight.data[3].abs().min()) > 0.5, "the write before counts"
    array[4] = 1
    with pytest.raises(RowcastError, match=facts("0.weight", "NumPy")):
        script.weight.data.sum()


REFUSED: dict[str, Any] = {
    "a whole gradient": lambda script: setattr(script.weight, "grad", torch.ones(ROWS, DIM)),
    "a value in all rows": lambda script: (script.weight.grad.add_(1), script.optimizer.step()),
    "noise": lambda script: script.weight.grad.normal_(),
    "weights added": lambda script: script.weight.grad.add_(script.weight.detach()),
    "a view of all rows written": lambda script: script.weight.grad.view(-1).zero_(),
    "autograd.grad": lambda script: torch.autograd.grad(script.model(torch.tensor([1])).sum(), script.weight),
    "named inputs": lambda script: script.model(torch.tensor([1])).sum().backward(inputs=[script.weight]),
    "another shape": lambda script: setattr(script.weight, "data", torch.ones(ROWS + 1, DIM)),
    "another table's memory": lambda script: setattr(script.weight, "data", Script().weight.data),
    "a trace": lambda script: torch.jit.trace(script.model, torch.tensor([1])),  # type: ignore[no-untyped-call]
    "a score with gradients": lambda script: torch.rand(2, DIM) @ script.weight.T,
    "a snapshot in the loss": lambda script: script.weight.clone().sum().backward(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("act", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_done_is_refused_by_the_tables_name(act: Any) -> None:
    script = Script()
    script.step(1, 2)
    script.model(torch.tensor([1, 4])).sum().backward()
    with pytest.raises(RowcastError, match=r"0\.weight|weight\.grad itself"):
        act(script)
