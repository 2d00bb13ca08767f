"""A program gives the ids that the step looks up, or says why it cannot; it leaves its batch as it is."""

import gc
import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowcast.trainer.adopt.id_program import Program, Recorder, TableKey, Unknown, leaves_of

ITEMS, USERS = TableKey("items", 1000), TableKey("users", 50)
WEIGHTS = torch.rand(1000, 4).requires_grad_()
Step = Callable[[Any], list[Tensor]]  # a batch -> the ids of each look-up


def recorded(step: Step, batch: object) -> Program:
    recorder = Recorder(leaves_of(batch))
    with recorder:
        looked_up = list(step(batch))
    for ids in looked_up:
        recorder.note(ITEMS, ids)
    return Program(recorder, is_alone=True)


def foreseen(step: Step, first: object, other: object) -> bool:
    """Whether the program of `first` gives the ids of `other`, which it leaves as it is."""
    program = recorded(step, first)
    leaves = leaves_of(other)
    before = [own.clone() for own in leaves.tensors]
    hints = program.run(leaves)
    assert all(torch.equal(a, b) for a, b in zip(leaves.tensors, before, strict=True))
    return all(
        isinstance(hint, Tensor) and hint.dtype == ids.dtype and torch.equal(hint, ids)
        for (_, hint), ids in zip(hints, step(other), strict=True)
    )


def ids(seed: int, *shape: int, high: int = 1000) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def buffered(x: Tensor) -> Tensor:
    buffer = torch.zeros(len(x), 2, dtype=torch.int64)
    buffer[:, 0] = x[:, 1]
    buffer[:, 1].copy_(x[:, 0] * 3 % 1000)
    return buffer


def in_place(x: Tensor) -> Tensor:
    x = x.clone()
    column = x[:, 1]
    x[:, 0] += 7
    column.remainder_(5)
    return x


STEPS: dict[str, Step] = {
    "the ids of the batch": lambda x: [x],
    "slices and casts": lambda x: [x[:, 0], x[:, 1:3].int(), x.float()[:, 2].long()],
    "offsets of the fields": lambda x: [x + torch.tensor([0, 100, 200])],
    "offsets by numpy": lambda x: [x + x.new_tensor(np.array((0, *np.cumsum([300, 300]))))],
    "a hash": lambda x: [(x[:, 0] * 1000003 ^ x[:, 1]) % 1000],
    "flat": lambda x: [x.flatten(), x.reshape(-1, 1), x.t().contiguous().view(-1)],
    "where": lambda x: [torch.where(x > 500, x - 500, torch.zeros_like(x)), x.clamp(max=9)],
    "joined": lambda x: [torch.cat([x[:, :1], x[:, 2:]], 1), torch.stack([x[:, 0], x[:, 1]])],
    "positions": lambda x: [torch.arange(x.shape[0]), torch.arange(3).unsqueeze(0).expand(len(x), -1)],
    "split": lambda x: [own.squeeze(1) for own in x.split(1, 1)],
    "data-dependent shapes": lambda x: [x[x > 300], torch.unique(x)],
    "sorted": lambda x: [x.sort(1).values, x.topk(2, 1).indices],
    "numpy in between": lambda x: [torch.LongTensor(x.numpy().copy()), torch.from_numpy(x.numpy()[:, 1])],
    "a column by numpy": lambda x: [torch.tensor(x.numpy()[:, 2].tolist())],
    "detached and back": lambda x: [x.detach().data[:, 0], torch.from_numpy(x.numpy())],
    "a buffer that is filled": lambda x: [buffered(x)],
    "writes into a copy": lambda x: [in_place(x)],
    "columns that are cast at once": lambda x: [x.to(torch.int16)[:, own % 3].long() for own in range(6)],
    "columns of a cast that are written": lambda x: [x.int()[:, own % 3].long().add_(own) for own in range(6)],
    "embedded mapping": lambda x: [torch.arange(999, -1, -1)[x]],
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("size", [8, 5])
def test_the_program_gives_the_ids_of_another_batch_of_its_form(step: Step, size: int) -> None:
    assert foreseen(step, ids(1, 8, 3), ids(2, size, 3))


def test_a_step_that_writes_into_its_batch_is_repeated_on_copies() -> None:
    def step(x: Tensor) -> list[Tensor]:
        first = x[:, 0] + 0
        x[:, 0] += 1
        x.numpy()  # no write
        torch.from_numpy(x.numpy()).mul_(2)
        return [first, x % 1000]

    program = recorded(step, ids(1, 8, 3))
    batch = ids(2, 8, 3)
    hints = program.run(leaves_of(batch))
    assert torch.equal(batch, ids(2, 8, 3))
    for (_, hint), own in zip(hints, step(batch), strict=True):
        assert isinstance(hint, Tensor)
        assert torch.equal(hint, own)


def test_ids_that_share_memory_with_the_batch_do_not_change_with_it() -> None:
    program = recorded(lambda x: [x, x[:, 0]], ids(1, 8, 3))
    batch = ids(2, 8, 3)
    hints = program.run(leaves_of(batch))
    batch.zero_()
    assert all(isinstance(own, Tensor) and own.any() for _, own in hints)


Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: Tensor
    names: list[str]


class Jagged:
    """As KeyedJaggedTensor: values of another length each, and caches that are empty at first."""

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        self._keys, self._values, self._lengths, self._offsets = ["a", "b"], values, lengths, None

    def values(self) -> Tensor:
        return self._values


FORMS: dict[str, tuple[Callable[[Tensor], object], Step]] = {
    "dict": (lambda x: {"x": x, "y": [x[:, 0], None]}, lambda b: [b["x"], b["y"][0]]),
    "named tuple": (lambda x: Pair(x, x.float()), lambda b: [b.x, b.y.long() % 7]),
    "dataclass": (lambda x: Sample(x, [str(own) for own in x[:, 0].tolist()]), lambda b: [b.x]),
    "object": (lambda x: SimpleNamespace(part=SimpleNamespace(x=x)), lambda b: [b.part.x]),
    "jagged": (lambda x: Jagged(x.flatten(), torch.full((len(x),), 3)), lambda b: [b.values() % 10]),
    "numpy": (lambda x: (x.numpy(), x.numpy()[:, 0].astype(np.float32)), lambda b: [torch.LongTensor(b[0])]),
    "lists of numbers": (lambda x: (x.tolist(), x[:, 1].tolist()), lambda b: [torch.tensor(b[0]), torch.tensor(b[1])]),
    "samples of numpy": (
        lambda x: tuple(x.numpy()),
        lambda b: [torch.LongTensor(np.array(b)), torch.as_tensor(np.array(b))[:, 1]],
    ),
    "read-only numpy": (lambda x: frozen(x.numpy()), lambda b: [torch.tensor(b)]),
    "float matrix": (lambda x: x.float(), lambda b: [b[:, k : k + 1].long() for k in range(3)]),
    "nested lists of tensors": (lambda x: [[x[:, 0]], [x[:, 1], x[:, 2]]], lambda b: [b[1][1], b[0][0]]),
}


def frozen(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(("made", "step"), FORMS.values(), ids=FORMS.keys())
def test_batches_of_every_shape_have_a_program(made: Callable[[Tensor], object], step: Step) -> None:
    first, other = made(ids(1, 16, 3)), made(ids(2, 11, 3))
    assert leaves_of(first).form == leaves_of(other).form
    assert foreseen(step, first, other)


def test_another_structure_string_dtype_or_width_is_another_form() -> None:
    x = ids(1, 8, 3)
    made = [
        x,
        (x,),
        [x],
        {"x": x},
        {"y": x},
        (x, "head"),
        (x, "tail"),
        x.int(),
        x[:, :2],
        x[:, 0],
        (x, None),
        (x, True),
    ]
    assert len({leaves_of(own).form for own in made}) == len(made)
    assert leaves_of((x, 3)).form == leaves_of((x[:5], 4)).form


def because(step: Step, batch: object) -> str:
    ((_, why),) = recorded(step, batch).run(leaves_of(batch))
    assert isinstance(why, Unknown)
    return why.because


def test_ids_of_draws_rows_and_weights_are_unknown_and_named() -> None:
    x = ids(1, 8, 3)
    assert because(lambda x: [torch.randint(0, 9, (len(x),))], x) == "a random draw in the step (aten.randint.low)"
    assert because(lambda x: [torch.empty(3).random_(0, 9).long()], x).startswith(
        "a random draw in the step (aten.random_"
    )
    assert because(lambda x: [x[torch.randperm(len(x))]], x).startswith("a random draw in the step (aten.randperm")
    rows = "rows of a table or trained weights (aten.embedding.default)"
    assert because(lambda x: [torch.nn.functional.embedding(x, WEIGHTS).sum(2).argmax(1)], x) == rows
    assert because(lambda x: [(x * WEIGHTS[0, 0]).long()], x).startswith("rows of a table or trained weights")


def test_a_draw_into_memory_that_ids_need_makes_them_unknown() -> None:
    def step(x: Tensor) -> list[Tensor]:
        x = x.clone()
        x[:, 1].random_(0, 9)
        return [x[:, 0]]

    assert because(step, ids(1, 8, 3)).startswith("a random draw")


def test_a_program_never_draws() -> None:
    program = recorded(lambda x: [x + 0, torch.randint(0, 9, (3,)), x[:, 0] + torch.rand(()).long()], ids(1, 8, 3))
    before = torch.get_rng_state()
    hints = program.run(leaves_of(ids(2, 8, 3)))
    assert torch.equal(torch.get_rng_state(), before)
    assert [isinstance(own, Unknown) for _, own in hints] == [False, True, True]


def test_ids_without_a_part_of_the_batch_are_foreseen_for_training_only() -> None:
    x = ids(1, 8, 3)
    for is_alone, known in ((True, [False, True, True]), (False, [False, False, True])):
        recorder = Recorder(leaves_of(x))
        with torch.no_grad():
            recorder.note(ITEMS, torch.arange(1000))
        recorder.note(ITEMS, torch.arange(7))
        recorder.note(ITEMS, x)
        hints = Program(recorder, is_alone=is_alone).run(leaves_of(x))
        assert [isinstance(own, Tensor) for _, own in hints] == known


def test_a_program_leaves_out_how_another_batch_gives_its_ids() -> None:
    x, other = ids(1, 8, 3), ids(2, 8, 3)
    recorder = Recorder(leaves_of(x))
    with recorder:
        looked_up = [x[:, 0], (other + 1) % 1000]
    for own in looked_up:
        recorder.note(ITEMS, own)
    program = Program(recorder, is_alone=False)
    assert (program.num_operations, program.num_constants, program.is_known) == (1, 0, [True, False])


def test_a_step_with_sparse_tensors_of_its_batch_is_recorded() -> None:
    def step(x: Tensor) -> list[Tensor]:
        x.float().to_sparse(1).coalesce().mul_(2)
        return [x[:, 0]]

    assert foreseen(step, ids(1, 8, 3), ids(2, 8, 3))


def test_a_program_keeps_only_what_the_ids_need() -> None:
    def step(x: Tensor) -> list[Tensor]:
        loss = torch.nn.functional.embedding(x, WEIGHTS).sum() * x.float().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.arange(9).cumsum(0)
        return [(x + 1) % 1000]

    program = recorded(step, ids(1, 8, 3))
    WEIGHTS.grad = None
    assert (program.num_operations, program.num_constants) == (2, 0)


def test_recording_keeps_no_activations() -> None:
    recorder = Recorder(leaves_of(ids(1, 8, 3)))
    x = ids(1, 8, 3)
    with recorder:
        rows = torch.nn.functional.embedding(x, WEIGHTS)
        activations = (rows.sum(2) + x.float()).exp()
        seen = [weakref.ref(own.untyped_storage()) for own in (rows, activations)]
        del rows, activations
    gc.collect()
    assert [own() for own in seen] == [None, None]


def test_numbers_of_constants_are_those_before_the_step_wrote_them() -> None:
    counter = torch.zeros((), dtype=torch.int64)

    def step(x: Tensor) -> list[Tensor]:
        counter.add_(1)
        return [x + counter]

    program = recorded(step, ids(1, 8, 3))
    x = ids(2, 8, 3)
    for _ in range(2):
        ((_, hint),) = program.run(leaves_of(x))
        assert torch.equal(hint, x + 1)  # type: ignore[arg-type]
    assert counter == 1


def test_a_batch_that_the_operations_do_not_fit_is_unknown() -> None:
    program = recorded(lambda x: [x, x.view(2, 4)], ids(1, 8))
    for _, why in program.run(leaves_of(ids(2, 7))):
        assert isinstance(why, Unknown)
        assert "RuntimeError" in why.because


OPERATIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x + y,
    lambda x, y: x * 31 % 97,
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: x.clamp(3, 500),
    lambda x, y: (x ^ y) % 1000,
    lambda x, y: x.int().long(),
    lambda x, y: x.double().mul(0.5).long(),
    lambda x, y: x.flip(0),
    lambda x, y: x.flatten().view(x.shape),
    lambda x, y: torch.cat([x[:, 1:], y[:, :1]], 1),
    lambda x, y: x.masked_fill(y > 500, 0),
    lambda x, y: x.clone().add_(y),
    lambda x, y: torch.stack([x, y], 2)[:, :, 0],
    lambda x, y: x.gather(1, y % x.shape[1]),
    lambda x, y: x.sort(1).values,
    lambda x, y: x + torch.arange(x.shape[1]),
    lambda x, y: x.t().contiguous().t(),
    lambda x, y: x.clone().index_copy_(0, torch.arange(len(x)), y),
    lambda x, y: x.scatter(1, y % x.shape[1], 7),
    lambda x, y: x.expand(17, *x.shape)[1],
    lambda x, y: torch.bucketize(x.float().contiguous(), torch.linspace(0, 1000, 50)),
    lambda x, y: x.detach().data.view(x.shape) + torch.zeros_like(x),
]  # of [B, W] each


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(range(len(OPERATIONS))), st.integers(0, 9), st.integers(0, 9)), max_size=6),
    st.integers(2, 9),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 1000),
)
def test_random_steps_are_foreseen(
    chain: list[tuple[int, int, int]], size: int, other: int, width: int, seed: int
) -> None:
    """Unless the other batch has another size: then a number that happened to be a batch size may be wrong."""

    def step(batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        known = [*batch]
        for at, x, y in chain:
            known.append(OPERATIONS[at](known[x % len(known)], known[y % len(known)]))
        return [known[-1], known[len(known) // 2]]

    first = (ids(seed, size, width), ids(seed + 1, size, width))
    assert foreseen(step, first, (ids(seed + 2, size, width), ids(seed + 3, size, width)))
    if size > width:
        assert foreseen(step, first, (ids(seed + 4, other, width), ids(seed + 5, other, width)))
