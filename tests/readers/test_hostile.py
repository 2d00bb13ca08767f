"""Files of a stranger: whatever they claim, a reader and its process end with one sentence, or read what is there."""

import json
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.feather import write_feather

from rowcast.job.schema import Job
from rowcast.prefetcher.readers import id_check, workers
from rowcast.prefetcher.readers.formats.jsonl import MOST_DEPTH
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.workers import DecoderShare, WorkerSource
from rowcast.runtime.errors import DataError, RowcastError
from tests.readers.polling import rest_of
from tests.support.data_files import all_samples, make_job, table
from tests.support.facts import facts

TABLES = [table("a", 100, "a"), table("b", 100, "b")]
COLUMNS = {"dense": [], "label_values": "none", "hash": ["b"]}
ROWS = 200


def job_of(path: Path, form: str) -> Job:
    copies = str(path.parent / "copies")
    return make_job(form, TABLES, path=str(path), eval_fraction=0.0, columns=COLUMNS, copies=copies)


def samples(job: Job) -> list[Any]:
    return list(all_samples(open_reader(job).batches("train", 0)))


def read_or_refused(path: Path, form: str) -> list[Any] | None:
    """None if it is refused, as it must be: with its name."""
    try:
        return samples(job_of(path, form))
    except RowcastError as error:
        sentence, is_data = str(error), isinstance(error, DataError)
    assert path.name in sentence
    assert is_data or "no column" in sentence, "the name of a column may be damaged"
    return None


# JSON lines


def nested(opening: str, closing: str, depth: int) -> str:
    return opening * depth + "1" + closing * depth


DEEP = [("[", "]"), ('{"y":', "}"), ('[{"y":', "}]")]


@pytest.mark.parametrize(("opening", "closing"), DEEP, ids=["lists", "objects", "both"])
@pytest.mark.parametrize("key", ["unused", "a"])
@pytest.mark.parametrize("depth", [MOST_DEPTH, 2000, 100_000])
def test_a_line_that_is_nested_too_deep_is_refused_before_a_parser_sees_it(
    depth: int, key: str, opening: str, closing: str, tmp_path: Path
) -> None:
    for place in (0, 5):
        lines = ['{"a": 1, "b": "x"}'] * 9
        lines[place] = f'{{"{key}": {nested(opening, closing, depth)}, "b": "x"}}'
        (tmp_path / "log.jsonl").write_text("\n".join(lines))
        with pytest.raises(DataError, match=facts("log.jsonl", f"line {place + 1}", MOST_DEPTH)):
            samples(job_of(tmp_path / "log.jsonl", "jsonl"))


def test_brackets_that_are_not_deep_are_read(tmp_path: Path) -> None:
    wide, deep = [[{"y": [1]}]] * 500, json.loads(nested("[", "]", MOST_DEPTH - 1))
    lines = [{"a": 1, "b": "[" * 300 + '\\"[{', "unused": wide}, {"a": 2, "b": "x", "unused": deep}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(own) + "\n" for own in lines * 20))
    assert [sample.ids[0] for sample in samples(job_of(tmp_path / "log.jsonl", "jsonl"))] == [(1,), (2,)] * 20


def test_a_key_that_no_one_reads_may_hold_anything(tmp_path: Path) -> None:
    values = ["a", 3, {}, [], None, 1.5, {"x": [1, "a"]}, [1, "a", {}], 2**70, True]
    lines = [json.dumps({"a": 1, "b": "x", "unused": own, f"unused_{i}": own}) for i, own in enumerate(values)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    assert len(samples(job_of(tmp_path / "log.jsonl", "jsonl"))) == len(values)


def test_a_key_that_is_read_names_the_line_of_another_type(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"a": 1, "b": null}\n' * 30 + '{"a": 1, "b": "x"}\n{"a": 1, "b": 3}\n')
    with pytest.raises(DataError, match=facts("log.jsonl", "line 32", "column b", 3, "text")):
        samples(job_of(tmp_path / "log.jsonl", "jsonl"))


# Arrow


def arrow_file(path: Path, **changed: Any) -> Path:
    columns = {"a": pa.array([i % 100 for i in range(ROWS)]), "b": pa.array([f"u{i}" for i in range(ROWS)])}
    write_feather(pa.table(columns | changed), str(path), compression="uncompressed")
    return path


def places_of(content: bytes, number: int) -> Iterator[int]:
    """Where an int64 lies in a file."""
    at = content.find(wanted := number.to_bytes(8, "little", signed=True))
    while at >= 0:
        yield at
        at = content.find(wanted, at + 1)


@pytest.mark.parametrize("claimed", [-5, 2000, 200_000_000, 2**62])
def test_lengths_that_a_record_batch_claims_are_compared_with_its_buffers(claimed: int, tmp_path: Path) -> None:
    """Each place that holds the number of rows alone, and all together, as a batch and its columns claim it."""
    path = arrow_file(tmp_path / "log.arrow")
    content, expected = path.read_bytes(), samples(job_of(path, "arrow"))
    places = [*places_of(content, ROWS)]
    assert len(places) >= 3, "of the batch and of two columns"
    for chosen in (*([at] for at in places), places):
        changed = bytearray(content)
        for at in chosen:
            changed[at : at + 8] = claimed.to_bytes(8, "little", signed=True)
        path.write_bytes(changed)
        assert read_or_refused(path, "arrow") in (None, expected), "unless nobody reads the number"
    assert read_or_refused(path, "arrow") is None, "all claim it"


@pytest.mark.parametrize("offset", [-1, 2**31 - 1, 0, 7])
@pytest.mark.parametrize("name", ["a", "b"])
def test_offsets_of_texts_and_lists_lead_into_their_values(name: str, offset: int, tmp_path: Path) -> None:
    columns = {"b": pa.array([f"u{i}" for i in range(ROWS)]), "a": pa.array([[i % 100] for i in range(ROWS)])}
    path = arrow_file(tmp_path / "log.arrow", **columns)
    offsets = np.frombuffer(columns[name].buffers()[1], np.int32)[: ROWS + 1].tobytes()
    content = path.read_bytes()
    at = content.index(offsets) + 4 * 120
    path.write_bytes(content[:at] + offset.to_bytes(4, "little", signed=True) + content[at + 4 :])
    assert read_or_refused(path, "arrow") is None


def test_texts_of_any_encoding_are_hashed_as_their_bytes(tmp_path: Path) -> None:
    latin = pa.array([b"caf\xe9"] * ROWS, pa.binary()).view(pa.string())
    path = arrow_file(tmp_path / "log.arrow", b=latin)
    assert len({sample.ids[1] for sample in samples(job_of(path, "arrow"))}) == 1


# Parquet, and whatever a library raises


def damaged(content: bytes, seed: int) -> bytes:
    rng, changed = np.random.default_rng(seed), bytearray(content)
    for at in rng.integers(4, len(content), 6):
        changed[at] = rng.integers(0, 256)
    return bytes(changed)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_damaged_files_are_read_or_refused_by_name(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"log.{form}"
    columns = pa.table({"a": [i % 100 for i in range(ROWS)], "b": [f"u{i % 7}" for i in range(ROWS)]})
    if form == "parquet":
        pq.write_table(columns, path)
    else:
        arrow_file(path)
    content, refused = path.read_bytes(), 0
    for seed in range(60):
        path.write_bytes(damaged(content, seed))
        refused += read_or_refused(path, form) is None
    assert refused > 0


ERRORS: list[Callable[[], Exception]] = [
    lambda: RecursionError("deep"), lambda: SystemError("negative"), lambda: MemoryError("2**62"),
    lambda: OverflowError("wide"), lambda: KeyError("x"), lambda: pa.ArrowNotImplementedError("kind"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=[type(own()).__name__ for own in ERRORS])
def test_whatever_a_decoder_raises_is_a_sentence_with_the_place(error: Callable[[], Exception]) -> None:
    raised, kept = error(), DataError("its own sentence")
    sentence = facts("log.x, row 7", type(raised).__name__)
    with pytest.raises(DataError, match=sentence), id_check.decoding(lambda i: f"log.x, row {7 + i}", 1):
        raise raised
    with pytest.raises(DataError) as found, id_check.decoding(lambda i: "log.x", 1):
        raise kept
    assert found.value is kept


# the decoding process


def without_room(share: DecoderShare, sender: Any) -> None:
    raise MemoryError("no room")


def fails(share: DecoderShare, pipe: Connection) -> None:
    workers.send_share = without_room
    DECODE(share, pipe)


def ends_slowly(share: DecoderShare, pipe: Connection) -> None:
    pipe.close()
    time.sleep(1.5)  # as with a large core file
    os._exit(7)


DECODE = workers.decode


@pytest.mark.parametrize(
    ("target", "told"), [(fails, ("MemoryError", "no room")), (ends_slowly, ("exit code 7",))], ids=["fails", "slowly"]
)
def test_a_decoding_process_tells_how_it_ended(
    target: Callable[..., None], told: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "decode", target)
    source = WorkerSource(make_job("synthetic", None))
    source.start()
    with pytest.raises(RowcastError, match=facts(*told)):
        rest_of(source)
    source.close()
