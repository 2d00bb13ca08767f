"""One frame gives one set of batches, bit for bit, in whatever format it is written."""

from pathlib import Path

import pytest

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import Part, open_reader, stream_columns
from rowcast.protocol.batch import Kind
from rowcast.protocol.parts import UNDIVIDED
from tests.support.data_files import make_job, same_batch
from tests.support.one_frame import TABLES, WAYS, written


@pytest.mark.parametrize("shuffle", ["none", "window:150", "full"])
def test_every_format_gives_the_same_batches(shuffle: str, tmp_path: Path) -> None:
    expected: list[Part] = []
    for way in WAYS:
        if (way, shuffle) == ("parquet", "full"):  # it reads row groups, and refuses this order
            continue
        data = written(way, tmp_path)
        job = make_job(data.pop("format"), TABLES, shuffle=shuffle, eval_fraction=0.1, batch_size=64, **data)
        found = batches(job)
        expected = expected or found
        assert all(same_batch(own, other) for own, other in zip(found, expected, strict=True)), way


def batches(job: Job) -> list[Part]:
    splits: list[tuple[Kind, int]] = [("train", 0), ("train", 1), ("eval", 0)]
    return [
        decode(UNDIVIDED)
        for part in stream_columns(job)
        for split, epoch in splits
        for decode in open_reader(job, part).pending(split, epoch)
    ]
