"""Ids of jagged batches: those that tensors tell are foreseen, and those of lists where the script gives them (`ids=`).

Each script ends with the bits that it has un-adopted, whatever is foreseen.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import rowcast
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt import adopt as doors
from tests.adopt.looked_up import Bench
from tests.support.facts import facts
from tests.support.twins import bytes_by_name

pytestmark = pytest.mark.usefixtures("let_go")

ITEMS, STEPS, LENGTH, CAPACITY = 2000, 24, 12, "900 rows"


def same_bits(new: Callable[[], nn.Module], batches: Callable[[nn.Module], Any]) -> int:
    """Returns how many of three look-ups a step were foreseen. The model gives the loss of a batch."""

    def trained(adopt: Callable[[nn.Module], Any]) -> dict[str, Any]:
        torch.manual_seed(0)
        model, losses = new(), []
        adopt(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for batch in batches(model):
            optimizer.zero_grad()
            losses.append(model(batch))
            losses[-1].backward()
            optimizer.step()
        losses.append(torch.rand(()))  # no draw is missing
        return bytes_by_name([model.state_dict(), optimizer.state_dict(), torch.stack(losses).detach()])

    plain, adopted = trained(lambda model: model), trained(lambda model: rowcast.adopt(model, CAPACITY))
    assert [name for name, own in plain.items() if adopted[name] != own] == []
    counts = doors._doors[0].reading.counts.look_ups
    assert counts.total() == 3 * STEPS
    return counts["foreseen"]


def test_look_ups_of_a_keyed_jagged_tensor_are_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))
    configs = pytest.importorskip("torchrec.modules.embedding_configs")
    modules = pytest.importorskip("torchrec.modules.embedding_modules")
    jagged = pytest.importorskip("torchrec.sparse.jagged_tensor")
    keys = ["history", "positive", "negative"]
    config = configs.EmbeddingConfig(name="item", num_embeddings=ITEMS, embedding_dim=8, feature_names=keys)

    class Model(modules.EmbeddingCollection):  # type: ignore[name-defined, misc]
        def forward(self, batch: Any) -> Tensor:
            found = super().forward(batch).values()
            return torch.stack([own.to_padded_dense(LENGTH) for own in found]).square().mean()

    def batches() -> Iterator[Any]:
        drawn = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            lengths = torch.randint(1, LENGTH, (3 * 16,), generator=drawn)
            ids = (torch.rand(int(lengths.sum()), generator=drawn) ** 3 * ITEMS).long()
            yield jagged.KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths)

    foreseen = same_bits(lambda: Model(tables=[config]), lambda model: rowcast.ahead(batches()))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchrec"]:
        del sys.modules[name]
    assert foreseen >= 0.9 * 3 * STEPS


class SASRec(nn.Module):
    """Over lists of items, which it pads in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(ITEMS, 8, padding_idx=0), nn.Embedding(LENGTH, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)

    def forward(self, batch: tuple[list[list[int]], list[int]]) -> Tensor:
        length = max(map(len, batch[0]))
        padded = torch.tensor([own + [0] * (length - len(own)) for own in batch[0]])
        mask = nn.Transformer.generate_square_subsequent_mask(length - 1)
        found = self.block(self.items(padded[:, :-1]) + self.places.weight[: length - 1], src_mask=mask)
        true, other = (found * self.items(padded[:, 1:])).sum(-1), found @ self.items(torch.tensor(batch[1])).T
        return -(F.logsigmoid(true)[padded[:, 1:] > 0].mean() + F.logsigmoid(-other).mean())


def histories() -> Iterator[tuple[list[list[int]], list[int]]]:
    """And drawn negatives."""
    drawn = random.Random(1)
    for _ in range(STEPS):
        lists = [[drawn.randrange(1, ITEMS) for _ in range(drawn.randint(2, LENGTH))] for _ in range(16)]
        yield lists, [drawn.randrange(1, ITEMS) for _ in range(8)]


def test_sasrec_over_lists_is_foreseen_as_its_function_gives_the_ids(capsys: pytest.CaptureFixture[str]) -> None:
    def drawing(batch: Any) -> list[Any]:
        np.random.rand()
        torch.rand(1)
        return [*batch[0], batch[1], [0]]

    def batches(model: Any) -> Any:
        return rowcast.ahead(histories(), ids=lambda batch: {model.items.weight: drawing(batch)})

    assert same_bits(SASRec, batches) == 3 * STEPS
    assert "fetched when" not in capsys.readouterr().err


def test_a_line_says_that_python_computes_ids_or_that_the_function_leaves_some_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert same_bits(SASRec, lambda model: rowcast.ahead(histories())) < 3 * STEPS
    said = capsys.readouterr().err
    assert "items.weight: steps look up other ids than the id program gives" in said
    assert "give them by rowcast.ahead(batches, ids=...)" in said
    negatives = lambda model: rowcast.ahead([*histories()], ids=lambda batch: {"items.weight": batch[1]})  # noqa: E731
    assert same_bits(SASRec, negatives) == STEPS
    assert "items.weight: rowcast.ahead(..., ids=...) does not give all ids" in capsys.readouterr().err


REFUSED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "an id outside of the table": ({"items.weight": [[1, 2], [ITEMS]]}, ("items.weight", ITEMS, "0 to 1,999")),
    "a negative id": ({"items.weight": torch.tensor([-1])}, ("items.weight", -1)),
    "no dict": ([1, 2], ("list", "dict")),
    "no integers": ({"items.weight": np.ones(2)}, ("items.weight", "1.0")),
    "no integers in lists": ({"items.weight": [1.0, float("nan")]}, ("items.weight", "1.0", "integers")),
    "another name": ({"item.weight": [1]}, ("item.weight", "items.weight")),
}


@pytest.mark.parametrize(("gives", "about"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.usefixtures("no_engine")
def test_what_the_function_gives_wrongly_is_refused_at_its_batch(gives: Any, about: tuple[Any, ...]) -> None:
    model = rowcast.adopt(SASRec(), CAPACITY)
    read: list[int] = []
    good = {model.items.weight: range(5), model.places.weight: [LENGTH + 7]}  # of an ordinary table
    with pytest.raises(ConfigError, match=facts(*about)):
        read.extend(rowcast.ahead(range(9), ids=lambda batch: gives if batch == 3 else good))
    assert read == [0, 1, 2]


@pytest.mark.usefixtures("no_engine")
def test_no_exception_of_the_function_ends_a_loop_in_silence() -> None:
    model = rowcast.adopt(SASRec(), CAPACITY)
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iter(rowcast.ahead(range(9), ids=lambda batch: {model.items.weight: next(iter([]))})))
    assert rowcast.ahead_calls(lambda: 7, ids=lambda batch: {model.items.weight: batch})() == 7


@pytest.fixture
def bench() -> Iterator[Bench]:
    own = Bench()
    own.reading.open()
    yield own
    own.reading.close()


def test_a_loader_and_a_thread_take_the_function_too(bench: Bench) -> None:
    data = [torch.tensor([at, at + 100]) for at in range(12)]
    taken: list[Tensor] = []

    def give_ids(batch: Tensor) -> Any:
        return {bench.table: batch.numpy()}

    for batch in bench.reading.ahead(DataLoader(data, batch_size=None), give_ids):  # type: ignore[arg-type]
        bench.look_up(batch.flip(0))
    reader = threading.Thread(target=lambda: taken.extend(bench.reading.ahead(iter(data), give_ids)))
    reader.start()
    reader.join()
    for batch in taken:
        bench.look_up(batch.flip(0))
    assert bench.num_foreseen == 24


Jagged = tuple[Tensor, Tensor]  # values and lengths of three keys, key by key


def in_pieces(values: Tensor, sizes: list[int]) -> list[Tensor]:
    ends = np.cumsum(sizes).tolist()
    return [values[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def in_one(values: Tensor, sizes: list[int]) -> list[Tensor]:
    return [*values.split_with_sizes(sizes)]


JAGGED: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    "split by a list": lambda x, lengths: in_one(x, lengths.view(3, -1).sum(1).tolist()),
    "cut by numbers": lambda x, lengths: in_pieces(x, [int(own.sum()) for own in lengths.view(3, -1)]),
    "cut by a list": lambda x, lengths: in_pieces(x, lengths.tolist()),
    "cut to the longest": lambda x, lengths: [x[:36].view(-1, 1).expand(-1, 9)[:, : int(lengths.max())]],
    "as many as there are": lambda x, lengths: [x[x > 300], torch.arange(len(x[x > 300]))],
}


@pytest.mark.parametrize("ids_of", JAGGED.values(), ids=JAGGED.keys())
def test_sizes_that_the_step_reads_from_its_batch_are_foreseen(
    ids_of: Callable[[Tensor, Tensor], list[Tensor]], bench: Bench
) -> None:
    drawn = torch.Generator().manual_seed(1)
    all_lengths = torch.randint(1, 9, (6, 36), generator=drawn)
    batches = [(torch.randint(0, 1000, (int(own.sum()),), generator=drawn), own) for own in all_lengths]
    for batch in bench.reading.ahead(batches):
        num = len([bench.look_up(ids) for ids in ids_of(*batch)])
    assert bench.num_foreseen >= 0.95 * 5 * num  # a sample of one item is no size that could be known
