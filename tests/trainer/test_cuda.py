"""What only a CUDA device reaches, on one that is not there, and torch's default device."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

from rowcast.protocol.transport.ring_file import in_memory_buffer
from rowcast.trainer.device.cuda import (
    Bounced,
    CudaStream,
    host_memory,
    make_streams,
    page_locked,
    peak_device_bytes,
    phase_clock,
    release_memory,
)
from rowcast.trainer.device.streams import HostMemory, Lap, memory_for
from rowcast.trainer.models.evaluate import to_host
from rowcast.trainer.models.model_state import model_state, optimizer_state, pack, random_state, restore_random
from tests.support.fake_cuda import CUDA, FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with FakeCuda(monkeypatch) as made:
        yield made


def test_rings_are_page_locked_while_they_are_used(cuda: FakeCuda) -> None:
    rings = [in_memory_buffer(8192), in_memory_buffer(4096)]
    with page_locked(rings, CUDA) as is_locked:
        assert is_locked
        assert cuda.registered == {ring.ctypes.data: ring.nbytes for ring in rings}
        assert type(host_memory(rings[0], CUDA, page_locked=is_locked)) is HostMemory
    assert not cuda.registered


def test_a_ring_that_is_refused_leaves_no_error_behind_and_is_copied_through_a_page_locked_buffer(
    cuda: FakeCuda,
) -> None:
    rings = [in_memory_buffer(4096), in_memory_buffer(4096)]
    cuda.refused.add(rings[1].ctypes.data)
    with page_locked(rings, CUDA) as is_locked:
        assert not is_locked
        assert not cuda.stale_error, "the next launch would raise it"
        memory = host_memory(rings[1], CUDA, page_locked=is_locked)
        assert isinstance(memory, Bounced)
        assert cuda.holds("pinned", memory.arriving(rings[1]))
    assert not cuda.registered, "the ring that was locked is not"


def test_only_memory_that_is_short_is_said_to_be_short() -> None:
    with pytest.raises(RuntimeError, match="illegal address"), memory_for("no room for rows", "take fewer"):
        raise RuntimeError("CUDA error: illegal address")


def test_phases_are_measured_by_the_marks_between_them(cuda: FakeCuda) -> None:
    compute, laps = make_streams(CUDA).compute, dict[Lap, float]()
    clock = phase_clock(compute, lambda lap, seconds, step, ended_s: laps.update({lap: seconds}))

    def step() -> None:
        clock.begin(0)
        compute.run(lambda: cuda.spend(2))
        clock.lap("lookup")
        compute.run(lambda: cuda.spend(5))
        clock.lap("forward")

    compute.run(step)
    cuda.synchronize()
    clock.complete(0)
    assert laps == {"lookup": pytest.approx(2e-3), "forward": pytest.approx(5e-3)}


def test_memory_for_a_stream_is_taken_while_it_is_torch_s_current_one(cuda: FakeCuda) -> None:
    compute, found = CudaStream(CUDA), list[tuple[object, int]]()
    like: Any = SimpleNamespace(new_empty=lambda count: found.append((cuda.current, count)))
    compute.memory_like(like, 3)
    assert found == [(compute._stream, 3)]


def test_streams_that_move_rows_come_before_the_one_that_computes(cuda: FakeCuda) -> None:
    streams = make_streams(CUDA)
    found = {name: getattr(streams, name)._stream.priority for name in ("copy_in", "fill", "evict", "compute")}
    assert found == {"copy_in": -1, "fill": -1, "evict": -1, "compute": 0}


def test_the_state_of_the_device_s_random_numbers_is_saved_and_restored(cuda: FakeCuda) -> None:
    saved = random_state(CUDA)
    torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8), CUDA)
    restore_random(CUDA, saved)
    assert torch.equal(torch.cuda.get_rng_state(CUDA), saved["random.cuda"])


def test_counts_leave_the_device_through_page_locked_memory(cuda: FakeCuda) -> None:
    counts = torch.ones(4, device=CUDA)
    assert cuda.holds("pinned", to_host(counts))
    assert peak_device_bytes(CUDA, 0) == counts.nbytes
    release_memory(CUDA)


ROOT = Path(__file__).parents[2]
CONSTRUCTORS = {function.__name__ for function in _device_constructors()}


def without_a_device(text: str) -> list[str]:
    """The calls of torch's constructors that name no device, nor stand in a block that does."""
    tree = ast.parse(text)
    named = {
        id(call)
        for block in ast.walk(tree)
        if isinstance(block, ast.With) and ast.unparse(block.items[0]).startswith("torch.device(")
        for call in ast.walk(block)
    }
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in {f"torch.{name}" for name in CONSTRUCTORS}
        and not {"device", None} & {keyword.arg for keyword in call.keywords}
        and id(call) not in named
    ]


SELF_CHECK = Path("trainer/kernels/choose.py")  # called within such a block


def test_every_tensor_of_the_trainer_names_its_device() -> None:
    assert {"zeros", "as_tensor", "randn"} <= CONSTRUCTORS
    assert without_a_device("torch.zeros(3)") == ["line 1: torch.zeros(3)"]
    assert without_a_device("with torch.device('cpu'):\n    torch.zeros(3)") == []
    files = [path for path in (ROOT / "trainer").rglob("*.py") if path.relative_to(ROOT) != SELF_CHECK]
    found = {str(path.relative_to(ROOT)): without_a_device(path.read_text()) for path in files}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_the_state_of_a_model_is_not_moved_by_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    torch.autograd.backward(model(torch.ones(3, 2)).sum())
    optimizer.step()
    try:
        torch.set_default_device("meta")
        tensors = {**model_state(model), **optimizer_state(model, optimizer)}
        assert pack(tensors)
    finally:
        torch.set_default_device(None)
    assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}
