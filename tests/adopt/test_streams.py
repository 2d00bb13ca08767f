"""A script draws a batch on one stream and computes on another: a stream that notes its calls shows the waits."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rowcast
from rowcast.trainer.adopt.connect.batch import LoadedBatch
from rowcast.trainer.device.streams import Event, PlainStreams, Stream, Wait, on_device
from tests.adopt.scripts import Launches, make, train_on
from tests.support.one_device import OneDevice


class Noted:
    """An event with the place where it was recorded."""

    def __init__(self, at: int) -> None:
        self.at = at

    def query(self) -> bool:
        return True


class NotingStream(Stream):
    """Runs at once, and keeps what it was asked for in order: "record", or a wait by name."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.awaited: list[int] = []  # places of "record" that were waited for

    def run(self, closure: Callable[[], None]) -> None:
        closure()

    def wait(self, event: Event, why: Wait) -> None:
        self.notes.append(why)
        if isinstance(event, Noted):
            self.awaited.append(event.at)

    def record(self) -> Event:
        self.notes.append("record")
        return Noted(len(self.notes) - 1)


def test_every_use_of_a_step_is_awaited_before_the_step_is_reported(
    tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = NotingStream()

    def noting(device: torch.device) -> PlainStreams:
        streams = PlainStreams()
        streams.compute = compute
        return streams

    monkeypatch.setattr("rowcast.trainer.adopt.connect.script_run.adopted_streams", noting)
    model, optimizer = make(tmp_path)
    with rowcast.connect(model.ebc, "tests.adopt.clicks:train") as loader:
        batches = iter(loader)
        batch = next(batches)
        assert compute.notes == ["filled", "record"], "the rows are awaited, and the batch is copied"
        train_on(model, optimizer, batch)
        assert compute.notes == ["filled", "record", "filled", "record", "record"], (
            "look-up and update, each on a stream of its own"
        )
        next(batches)
    assert compute.notes[5:9] == ["used", "used", "used", "record"]
    assert compute.awaited == [1, 1, 3, 4], "the look-up awaits the batch, and the step all of it"


def test_the_token_says_the_device_of_the_batch_and_memory_is_kept_for_a_stream() -> None:
    header = SimpleNamespace(batch_size=8, kind="train", train_step=0, epoch=0)
    arrays = {"dense": torch.zeros(8, 2, device="meta"), "labels": torch.zeros(8, device="meta")}
    step: Any = SimpleNamespace(step=3, header=header, arrays=arrays)
    batch = LoadedBatch(step, None, ["a"])
    assert batch.sparse_features.device == torch.device("meta")
    assert batch.sparse_features.to(batch.dense_features.device).step == 3


def test_on_the_cpu_there_is_no_device_to_be_on() -> None:
    with on_device(torch.device("cpu")) as entered:
        assert entered is None


def test_a_script_on_another_device_leaves_the_first_one_alone(
    tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = OneDevice(monkeypatch)
    model, optimizer = make(tmp_path)
    loader = rowcast.connect(model.ebc, "tests.adopt.clicks:train", dense=(model, optimizer))
    for batch in loader:
        torch.autograd.backward(model(batch.dense_features, batch.sparse_features).sum())
        optimizer.step()
    own = ["kernels", "records", "page-locking", "streams", "allocation", "look-up"]
    own += ["copy in", "fill", "event results", "event released"]
    assert {(what, "MainThread") for what in own} < device.work
    assert {("evict", "sender"), ("event sent", "sender")} < device.work
    # on a device, the backward pass runs on a thread of autograd's, which torch keeps on the device of its tensors
    assert device.outside == {("compute", "MainThread"), ("update", "MainThread")}
