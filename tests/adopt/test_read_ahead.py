"""Batches are read ahead, and a script gets them as un-adopted: the same, in their order, with its random state."""

import gc
import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.id_program import TableKey
from tests.adopt.looked_up import Bench
from tests.support.repeats import count

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy.random": np.random.rand,
    "random": random.random,
}


class Clicks(Dataset[Any]):
    def __init__(self, draws: str = "", num: int = 50, fails_at: int = -1) -> None:
        self.x = torch.randint(0, 1000, (num, 3), generator=torch.Generator().manual_seed(1))
        self.draws, self.fails_at = draws, fails_at

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> tuple[Tensor, float]:
        if at == self.fails_at:
            raise LookupError(f"sample {at}")
        return self.x[at], DRAWS[self.draws]() if self.draws else 0.0


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    with opened(made):
        yield made


@contextmanager
def opened(bench: Bench) -> Iterator[None]:
    plain = DataLoader.__iter__
    bench.reading.open()
    try:
        yield
    finally:
        gc.collect()
        bench.reading.close()
        assert DataLoader.__iter__ is plain
        assert sorted([*bench.engine.begun, *bench.engine.abandoned]) == list(range(len(bench.engine.announced)))


def seeded() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


def drawn() -> list[float]:
    """The next numbers of all generators, which stay as they are."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    numbers = [draw() for draw in DRAWS.values()]
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    return numbers


def as_numbers(batch: Any) -> list[Any]:
    return [own.tolist() if isinstance(own, Tensor) else own for own in batch]


Script = Callable[[], Iterator[Any]]  # yields what it sees


def same_as_unadopted(script: Callable[[Callable[[Tensor], Any]], Iterator[Any]]) -> Bench:
    """Runs a script un-adopted, then read ahead; `script` gets the function that looks up, and yields what it sees."""
    seeded()
    plain = [*script(lambda ids: None), drawn()]
    bench = Bench()
    with opened(bench):
        seeded()
        assert [*script(bench.look_up), drawn()] == plain
    return bench


@pytest.mark.parametrize("loader_draws", ["", *DRAWS])
@pytest.mark.parametrize("step_draws", ["", *DRAWS])
def test_the_random_state_is_that_of_the_script_unadopted(loader_draws: str, step_draws: str) -> None:
    def script(look_up: Callable[[Tensor], Any]) -> Iterator[Any]:
        for epoch in range(3):
            for at, batch in enumerate(DataLoader(Clicks(loader_draws), 8, shuffle=True)):
                yield as_numbers(batch)
                yield drawn()
                look_up(batch[0])
                if step_draws:
                    yield DRAWS[step_draws]()
                if epoch == 1 and at == 2:
                    break
            yield drawn()

    if loader_draws and loader_draws == step_draws:
        with pytest.raises(ConfigError, match=f"both draw from {loader_draws} in this process"):
            same_as_unadopted(script)
    else:
        bench = same_as_unadopted(script)
        assert bench.verdicts.count("mistaken") == 0
        assert bench.num_foreseen == len(bench.verdicts) - 1  # the first step is recorded


def test_a_refusal_comes_before_a_batch_with_wrong_numbers() -> None:
    def script(look_up: Callable[[Tensor], Any], seen: list[Any]) -> list[Any]:
        for batch in DataLoader(Clicks("torch"), 8):
            seen.append(as_numbers(batch))
            look_up(batch[0])
            torch.rand(())
        return seen

    seeded()
    plain = script(lambda ids: None, [])
    bench = Bench()
    seen: list[Any] = []
    with opened(bench):
        seeded()
        with pytest.raises(ConfigError, match="num_workers=1 or a generator of its own"):
            script(bench.look_up, seen)
    assert 1 <= len(seen) < len(plain)
    assert seen == plain[: len(seen)]


def test_a_generator_of_the_loader_that_the_step_uses_is_watched() -> None:
    own = torch.Generator()

    def script(look_up: Callable[[Tensor], Any], draws: bool) -> Iterator[Any]:
        own.manual_seed(3)
        sampler = RandomSampler(Clicks(), replacement=True, generator=own)
        for at, (x, _) in enumerate(DataLoader(Clicks(), 8, sampler=sampler)):
            yield x.tolist()
            yield own.get_state().tolist()
            look_up(x)
            if draws:
                yield float(torch.rand((), generator=own))
            if at == 4:
                break

    assert same_as_unadopted(lambda look_up: script(look_up, draws=False)).num_foreseen == 4
    with pytest.raises(ConfigError, match=r"both draw from the loader's torch\.Generator 0"):
        same_as_unadopted(lambda look_up: script(look_up, draws=True))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from Clicks().x


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "plain": lambda: DataLoader(Clicks(), 8),
    "shuffled, last batch dropped": lambda: DataLoader(Clicks(), 8, shuffle=True, drop_last=True),
    "batch sampler": lambda: DataLoader(Clicks(), batch_sampler=BatchSampler(RandomSampler(Clicks()), 7, False)),
    "stream": lambda: DataLoader(Stream(), 8, collate_fn=lambda rows: [torch.stack(rows)]),
    "no batches": lambda: DataLoader(Clicks(), batch_size=None),
    "empty": lambda: DataLoader(Clicks(num=1), 8, drop_last=True),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_every_kind_of_loader_gives_its_batches(make: Callable[[], Any]) -> None:
    def script(look_up: Callable[[Tensor], Any]) -> Iterator[Any]:
        loader = make()
        for _ in range(2):
            for batch in loader:
                yield as_numbers(batch)
                look_up(batch[0])

    same_as_unadopted(script)


def test_the_iterator_of_a_loader_has_its_length() -> None:
    def script(look_up: Callable[[Tensor], Any]) -> Iterator[Any]:
        loader = DataLoader(Clicks(), 8)
        batches = iter(loader)
        yield len(loader), len(batches), iter(batches) is batches, as_numbers(next(batches))

    same_as_unadopted(script)


@pytest.mark.parametrize("draws", ["torch", ""])
def test_persistent_workers_are_read_ahead_in_each_epoch(draws: str) -> None:
    """If the script leaves an epoch early, a worker that draws has drawn more than un-adopted."""

    def script(look_up: Callable[[Tensor], Any]) -> Iterator[Any]:
        loader = DataLoader(Clicks(draws), 8, shuffle=True, num_workers=1, persistent_workers=True)
        for epoch in range(3):
            for at, batch in enumerate(loader):
                yield as_numbers(batch)
                look_up(batch[0])
                yield float(torch.rand(()))
                if epoch == 1 and at == 1 and not draws:
                    break

    bench = same_as_unadopted(script)
    assert bench.num_foreseen == len(bench.verdicts) - 1


def test_an_exception_of_the_loader_comes_at_its_batch_and_ends_nothing() -> None:
    def script(look_up: Callable[[Tensor], Any]) -> Iterator[Any]:
        batches = iter(DataLoader(Clicks(fails_at=27), 8))
        while True:
            try:
                batch = next(batches)
            except LookupError as error:
                yield str(error)
            except StopIteration:
                break
            else:
                yield as_numbers(batch)
                look_up(batch[0])

    assert same_as_unadopted(script).num_foreseen == 5


def test_an_interrupt_while_reading_is_raised_at_once(bench: Bench) -> None:
    def batches() -> Iterator[Any]:
        for at in range(20):
            if at == 4:
                np.random.rand()
                raise KeyboardInterrupt
            yield Clicks().x[at : at + 2]

    seeded()
    before = drawn()
    num = 0
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for x in bench.reading.ahead(batches()):
            bench.look_up(x)
            num += 1
    assert num == 1  # three more batches had been read
    assert drawn() == before


def test_a_loader_within_a_loader_and_one_in_the_loop() -> None:
    class Within(Clicks):
        def __getitem__(self, at: int) -> tuple[Tensor, float]:
            return next(iter(DataLoader(Clicks(), 1, generator=torch.Generator())))[0][0] + at, 0.0

    def script(look_up: Callable[[Tensor], Any]) -> Iterator[Any]:
        valid = DataLoader(Clicks(num=10), 4)
        for _ in range(2):
            for at, (x, _) in enumerate(DataLoader(Within(), 8, shuffle=True)):
                yield x.tolist()
                look_up(x)
                if at % 3 == 0:
                    with torch.no_grad():
                        for y, _ in valid:
                            yield y.tolist(), drawn()
                            look_up(y)

    bench = same_as_unadopted(script)
    assert bench.verdicts.count("mistaken") == 0
    assert bench.num_foreseen >= len(bench.verdicts) - 12


def test_two_loaders_in_one_step_are_both_foreseen() -> None:
    def script(look_up: Callable[[Tensor], Any]) -> Iterator[Any]:
        other = DataLoader(Clicks(num=40), 4, collate_fn=tails_of)
        for (x, _), (y, _) in zip(DataLoader(Clicks(), 8), other, strict=False):
            yield x.tolist(), y.tolist()
            look_up(y[:, 0] * 3 % 1000)
            look_up(x)

    bench = same_as_unadopted(script)
    assert bench.verdicts == ["unknown"] * 2 + ["foreseen"] * 12


def test_a_script_that_asks_for_the_next_batch_before_its_step() -> None:
    def script(look_up: Callable[[Tensor], Any]) -> Iterator[Any]:
        batches = iter(DataLoader(Clicks(), 8))
        following = next(batches, None)
        while following is not None:
            batch, following = following, next(batches, None)
            yield as_numbers(batch)
            look_up(batch[0] % 900)

    assert same_as_unadopted(script).verdicts == ["unknown"] * 2 + ["foreseen"] * 5


def held_back(batches: Iterable[Any], most: int) -> Iterator[Any]:
    """The same batches; the loader is `most` ahead of the step."""
    held = []
    for batch in batches:
        held.append(batch)
        if len(held) > most:
            yield held.pop(0)
    yield from held


def in_lists(batches: Iterable[Any], most: int) -> Iterator[Any]:
    """Takes `most` batches before it steps with each."""
    batches = iter(batches)
    while held := [*islice(batches, most)]:
        yield from held


def in_a_thread(batches: Iterable[Any], most: int) -> Iterator[Any]:
    held: queue.Queue[Any] = queue.Queue(most)

    def read() -> None:
        for batch in batches:
            held.put(batch)
        held.put(None)

    thread = threading.Thread(target=read)
    thread.start()
    if most > 12:
        thread.join()  # it has read all batches of an epoch before the first step
    yield from iter(held.get, None)
    thread.join()


Step = Callable[[Bench, Tensor], Any]
POSITIONS, NEGATIVES = TableKey("positions", 10), TableKey("negatives", 1000)


def with_positions(bench: Bench, x: Tensor) -> None:
    bench.look_up(x)
    bench.look_up(torch.arange(3), POSITIONS)


def positions_first(bench: Bench, x: Tensor) -> None:
    bench.look_up(torch.arange(3), POSITIONS)
    bench.look_up(x * 7 % 1000)


def with_negatives(bench: Bench, x: Tensor) -> None:
    bench.look_up(x[:, 0])
    bench.look_up(torch.randint(0, 1000, (4,)), NEGATIVES)
    bench.look_up(x[:, 1:] * 3 % 1000)


def negatives_first(bench: Bench, x: Tensor) -> None:
    bench.look_up(torch.randint(0, 1000, (4,)), NEGATIVES)
    bench.look_up(x)


STEPS: dict[str, tuple[Step, int]] = {  # and how many of its look-ups can be foreseen
    "plain": (lambda bench, x: bench.look_up(x), 1),
    "computed": (lambda bench, x: [bench.look_up(x % 900), bench.look_up((x + 5) % 1000)], 2),
    "with positions": (with_positions, 2),
    "positions first": (positions_first, 2),
    "with negatives": (with_negatives, 2),
    "negatives first": (negatives_first, 1),
}


@pytest.mark.parametrize("most", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("step", STEPS)
def test_a_loader_may_be_ahead_of_the_step(bench: Bench, step: str, most: int) -> None:
    """Of each epoch all batches are foreseen but those that the first step has waited for."""
    work, known = STEPS[step]
    for epoch in range(2):
        for x, _ in held_back(DataLoader(Clicks(num=240), 8), most):
            work(bench, x)
        assert bench.num_foreseen == ((epoch + 1) * 30 - most - 1) * known
    assert bench.engine.abandoned == []


@pytest.mark.parametrize("most", [2, 4])
@pytest.mark.parametrize("step", ["plain", "computed", "with negatives", "negatives first"])
def test_batches_that_are_taken_in_lists(bench: Bench, step: str, most: int) -> None:
    work, known = STEPS[step]
    for x, _ in in_lists(DataLoader(Clicks(num=240), 8), most):
        work(bench, x)
    assert bench.num_foreseen == (30 - most) * known
    assert bench.verdicts.count("mistaken") == 0


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_loop_that_passes_batches_over(bench: Bench, most: int) -> None:
    for at, (x, _) in enumerate(held_back(DataLoader(Clicks(num=400), 8), most)):
        if at % 5:
            bench.look_up(x)
    assert bench.num_foreseen >= 40 - most - 1
    assert len(bench.engine.abandoned) == 10


@pytest.mark.parametrize(("draws", "most"), [("torch", 13), ("", 13), ("", 4)])
def test_a_thread_that_reads_for_the_step_reads_as_unadopted(draws: str, most: int) -> None:
    """The step draws when it likes: nothing of what it draws is put back."""

    def script(look_up: Callable[[Tensor], Any]) -> Iterator[Any]:
        for _ in range(4):
            for x, numbers in in_a_thread(DataLoader(Clicks(draws, num=96), 8), most):
                yield x.tolist(), numbers.tolist(), float(torch.rand(()))
                look_up(x % 900)

    bench = same_as_unadopted(script)
    assert bench.num_foreseen >= (36 if most > 12 else 0)
    assert bench.verdicts.count("mistaken") == 0


def test_calls_are_read_ahead_and_may_end_or_fail() -> None:
    def script(look_up: Callable[[Tensor], Any], ahead: Callable[[Any], Any]) -> Iterator[Any]:
        made = iter(range(9))

        def call() -> Any:
            at = next(made)
            if at == 5:
                raise ValueError(f"call {at}")
            return zip(*zip(Clicks().x[at : at + 12].numpy(), range(12), strict=True), strict=True)

        function = ahead(call)
        for _ in range(11):
            try:
                x, numbers = function()
            except (ValueError, StopIteration) as error:
                yield repr(error)
                continue
            yield numbers
            look_up(torch.LongTensor(np.array(x)))

    seeded()
    plain = [*script(lambda ids: None, lambda call: call)]
    bench = Bench()
    with opened(bench):
        assert [*script(bench.look_up, bench.reading.ahead_calls)] == plain
    assert bench.verdicts == ["unknown", *["foreseen"] * 7]


def test_a_loader_given_by_hand_can_be_looped_over_again(bench: Bench) -> None:
    batches = [Clicks().x[at : at + 4] for at in range(0, 20, 4)]
    ahead = bench.reading.ahead(batches)
    assert len(ahead) == 5  # type: ignore[arg-type]
    for _ in range(2):
        for batch, x in zip(batches, ahead, strict=True):
            assert x is batch
            bench.look_up(x)
    assert bench.verdicts == ["unknown", *["foreseen"] * 9]
    assert next(iter(bench.reading.ahead(iter(batches)))) is batches[0]


def test_the_rows_of_a_batch_are_announced_when_it_is_read(bench: Bench) -> None:
    x = Clicks().x
    for at, (ids, _) in enumerate(DataLoader(Clicks(), 8)):
        if at:
            assert len(bench.engine.announced) == min(at + 1 + bench.depth, 7)
        bench.look_up(ids)
        assert bench.engine.begun == list(range(at + 1))
    for at in range(1, 7):
        assert bench.engine.rows(at, bench.table).tolist() == sorted(set(x[8 * at : 8 * at + 8].flatten().tolist()))


def test_ids_that_a_table_lacks_are_not_announced(bench: Bench) -> None:
    for x in bench.reading.ahead([torch.tensor([5, -1, 999, 1000, 5]), torch.tensor([-7, 1000, 2000])] * 2):
        bench.reading.note(bench.table, x)
    assert [own.rows.get(bench.table, np.zeros(0)).tolist() for own in bench.engine.announced] == [[], [], [5, 999], []]


def test_batches_that_the_script_leaves_are_abandoned(bench: Bench) -> None:
    for at, (x, _) in enumerate(DataLoader(Clicks(), 8)):
        bench.look_up(x)
        if at == 1:
            break
    bench.reading.settle_departed()
    assert (bench.engine.begun, bench.engine.abandoned) == ([0, 1], [2, 3, 4, 5])


def test_a_closed_source_closes_its_generator(bench: Bench) -> None:
    closed = []

    def batches() -> Iterator[Tensor]:
        try:
            yield from Clicks().x
        finally:
            closed.append(True)

    ahead: Any = bench.reading.ahead(batches())
    bench.look_up(next(ahead))
    ahead.close()
    assert closed == [True]
    assert next(ahead, None) is None


def test_steps_that_look_nothing_up_are_read_as_unadopted(bench: Bench) -> None:
    num_read = 0

    def batches() -> Iterator[Tensor]:
        nonlocal num_read
        for x in Clicks().x:
            num_read += 1
            yield x

    for at, _ in enumerate(bench.reading.ahead(batches())):
        assert num_read == at + 1 or at < 3


def test_a_program_that_is_mistaken_is_recorded_anew_once_then_left(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    for at, (x, _) in enumerate(DataLoader(Clicks(num=240), 8)):
        factor = 1 if at < 5 else 2 if at < 15 else at  # NumPy in between hides where it comes from
        bench.look_up(torch.from_numpy(x.numpy() * factor % 1000))
    assert bench.verdicts[:5] == ["unknown", *["foreseen"] * 4]
    assert bench.verdicts[5:8] == ["mistaken"] * 3
    assert set(bench.verdicts[8:]) == {"unknown", "mistaken"}
    assert bench.verdicts[-10:] == ["unknown"] * 10
    assert (
        capsys.readouterr().err.count(
            "items: steps look up other ids than the id program gives, which was recorded twice"
        )
        == 1
    )


def test_a_recording_with_an_evaluation_is_replaced(bench: Bench) -> None:
    for at, (x, _) in enumerate(DataLoader(Clicks(num=240), 8)):
        bench.look_up(x[:, 0])
        if at == 0:
            bench.look_up(x.flip(0))
    assert bench.verdicts[-20:] == ["foreseen"] * 20
    assert len(bench.engine.rows(29, bench.table)) <= 8


def test_random_negatives_are_said_once_and_the_rest_is_foreseen(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    negatives = TableKey("negatives", 1000)
    for x, _ in DataLoader(Clicks(), 8):
        bench.look_up(x)
        bench.reading.note(negatives, torch.randint(0, 1000, (4,)))
    assert bench.verdicts == ["unknown", *["foreseen"] * 6]
    said = capsys.readouterr().err
    assert said.count("negatives: its ids depend on a random draw in the step (aten.randint.low)") == 1
    assert "id program of 0 operations and 0 constants for 1 of 2 look-ups of a step" in said


def test_scripts_that_alternate_two_kinds_of_batches_have_two_programs() -> None:
    def script(look_up: Callable[[Tensor], Any]) -> Iterator[Any]:
        heads, tails = iter(DataLoader(Clicks(), 4)), iter(DataLoader(Clicks(), 4, collate_fn=tails_of))
        for _ in range(10):
            (x, _), (y, mode) = next(heads), next(tails)
            yield x.tolist(), mode
            look_up(x[:, 0])
            look_up(y[:, 2])

    assert same_as_unadopted(script).num_foreseen == 18


def tails_of(samples: list[Any]) -> tuple[Tensor, str]:
    return torch.stack([x for x, _ in samples]), "tail"


def test_a_look_at_one_batch_or_epochs_without_look_ups_stop_no_reading_ahead(bench: Bench) -> None:
    loader = DataLoader(Clicks(), 8)
    next(iter(loader))
    for _ in loader:
        pass
    for x, _ in loader:
        bench.look_up(x)
    assert bench.verdicts == ["unknown", *["foreseen"] * 6]


def test_an_evaluation_before_the_look_ups_of_its_step(bench: Bench) -> None:
    valid = DataLoader(Clicks(num=16), 8, collate_fn=tails_of)
    for at, (x, _) in enumerate(DataLoader(Clicks(), 8)):
        if at % 3 == 1:
            for y, _ in valid:
                with torch.no_grad():
                    bench.look_up(y)
        bench.look_up(x)
    assert bench.verdicts == ["unknown", "unknown", *["foreseen"] * 9]
    assert [own.trains for own in bench.engine.announced].count(False) == 3  # one was not known to be an evaluation


def test_a_loop_that_ended_keeps_nothing(bench: Bench) -> None:
    gc.collect()
    gc.disable()
    try:
        for x, _ in DataLoader(Clicks(), 8):
            bench.look_up(x)
        assert len(bench.reading.departed) == 1
    finally:
        gc.enable()


def test_the_report_names_each_verdict(bench: Bench) -> None:
    for x, _ in DataLoader(Clicks(), 8):
        bench.look_up(x)
    assert bench.reading.counts.sentence().startswith(
        "look-ups: 6 foreseen, 0 mistaken, 1 unknown; the id program takes "
    )


def test_workers_that_are_forked_in_a_recorded_step_do_not_record(bench: Bench) -> None:
    for x, _ in DataLoader(Clicks(num=8), 8):
        bench.look_up(x)
        for modes, _ in DataLoader(Modes(), 1, num_workers=1):
            assert modes.tolist() == [0]


class Modes(Clicks):
    def __getitem__(self, at: int) -> tuple[Any, Any]:
        return torch.tensor(_len_torch_dispatch_stack()), 0


def test_the_number_of_forms_is_bounded(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    batches = [{"name": str(at), "x": Clicks().x[:4]} for at in range(80)] * 2
    for batch in bench.reading.ahead(batches):
        bench.look_up(batch["x"])
    assert bench.num_foreseen == 64
    assert "batches have more than 64 forms" in capsys.readouterr().err


def test_a_step_that_fails_leaves_nothing_recording(bench: Bench) -> None:
    with pytest.raises(ValueError, match="the step"):  # noqa: PT012
        for x, _ in DataLoader(Clicks(), 8):
            bench.look_up(x)
            raise ValueError("the step")
    for x, _ in DataLoader(Clicks(), 8):
        bench.look_up(x)
    assert bench.num_foreseen >= 6


@settings(max_examples=count(20, 300), deadline=None)
@given(st.data())
def test_random_scripts_get_their_batches_and_foreseen_ids_are_real(data: st.DataObject) -> None:
    """Loaders of any depth, left and begun again, with steps that skip, repeat and change look-ups."""
    depth = data.draw(st.integers(0, 6))
    actions = data.draw(st.lists(st.sampled_from("ssssshmbnv"), min_size=1, max_size=40))
    bench = Bench(depth)

    def script(look_up: Callable[[Tensor], Any]) -> list[Any]:
        seen: list[Any] = []
        batches = iter(DataLoader(Clicks("numpy.random"), 8, shuffle=True))
        for action in actions:
            batch = next(batches, None)
            if batch is None or action == "b":
                batches = iter(DataLoader(Clicks("numpy.random"), 8, shuffle=True))
                continue
            x, numbers = batch
            seen += [x.tolist(), numbers.tolist(), drawn()]
            match action:
                case "s":
                    look_up((x[:, :2] + 1) % 1000)
                case "h":
                    look_up(x * 7 % 1000)
                case "m":
                    look_up(torch.from_numpy((x.numpy() + len(seen)) % 1000))
                case "v":
                    look_up(torch.randint(0, 1000, (3,)))
                    look_up(x)
        return seen

    seeded()
    plain = script(lambda ids: None)
    with opened(bench):
        seeded()
        assert script(bench.look_up) == plain
