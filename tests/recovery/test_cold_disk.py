"""The disk below a memory tier fails in the middle of a run of two processes: both end in order with a sentence, or
wait, and the bits are the same after it."""

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rowcast.prefetcher.stores.cold.segments import BLOCK_BYTES
from rowcast.trainer.report.report_json import read_report
from tests.recovery.restarted import END_TIMEOUT_S, NUM_TRAIN, TIERED, Outcome, Recovering, end_well, sections
from tests.support.processes import Process, Session
from tests.support.small_disk import small_disk

TRANSPORT = {"ring": "1MiB", "connect_timeout": "60s"}
COLD: dict[str, Any] = {"store": TIERED, "lookahead": {"depth": 1}}  # few rows wait to leave, so most are cold
RESTART = "then start again, from the newest checkpoint"
DAMAGED, ERROR = 4, 1


def cold_files(process: Process) -> list[int]:
    """Descriptors of the files of cold rows, which have no name, opened a second time."""
    found = []
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if re.search(r"/run/tables/.* \(deleted\)$", os.readlink(entry)):
                found.append(os.open(entry, os.O_RDWR))
    assert found, "no file of cold rows is open"
    return found


def flip_a_bit_of_each_page(file: int) -> None:
    for page in range(os.fstat(file).st_size // BLOCK_BYTES):
        at = page * BLOCK_BYTES + 1000
        os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 4]), at)


def cut_short(file: int) -> None:
    os.truncate(file, 0)


def test_a_disk_that_others_fill_ends_both_and_space_lets_the_run_go_on(session: Session, undisturbed: Outcome) -> None:
    with small_disk(session.folder / "small", 16 * BLOCK_BYTES) as folder:
        (folder / "of others").write_bytes(bytes(10 * BLOCK_BYTES))
        run = Recovering(session, transport=TRANSPORT, **COLD | {"store": TIERED | {"path": str(folder)}})
        trainer = run.start("trainer")
        trainer.until_logged("waiting for the prefetcher")  # it passes over what failed before it began
        sentence = run.start("prefetcher").ended(END_TIMEOUT_S).refused(ERROR)
        assert re.search(r"has no space for \d+ more bytes \(No space left on device\); free space there", sentence)
        assert sentence in trainer.ended(END_TIMEOUT_S).refused(ERROR)
        (folder / "of others").unlink()
        session.write_job(**sections(transport=TRANSPORT, **COLD))  # on a larger disk
        assert run.finish().differs(undisturbed) == []
        assert list(folder.iterdir()) == []


GATED = """
import os, threading, time
from rowcast.prefetcher.stores.cold.segment_file import SegmentFile
read = SegmentFile.read
def gated(self, *arguments):
    on_disk = arguments[1].min() // self._page.num_rows < self._first_page  # not in the buffer, as new rows are
    if threading.current_thread().name == "staging" and on_disk:
        open({reached!r}, "a").close()
        while os.path.exists({gate!r}):
            time.sleep(0.01)
        time.sleep({seconds})
    read(self, *arguments)
SegmentFile.read = gated
""".strip()


SETTLING_FAILS = """
from rowcast.prefetcher.run.attempt import PrefetcherAttempt
from rowcast.runtime.errors import DataError
def settle(self):
    raise DataError("the rows of a checkpoint cannot be read")
PrefetcherAttempt._settle_checkpoint = settle
""".strip()


def start_gated(session: Session, seconds: float = 0.0, patch: str = "") -> tuple[Path, Process, Process]:
    """Both processes on a disk that reads nothing ahead while there is a file, and each batch `seconds` late then.
    Returns once it was asked to. `patch`: more lines to run in the prefetcher first.
    """
    session.write_job(**sections(transport=TRANSPORT, **COLD))
    gate, reached = session.folder / "gate", session.folder / "reached"
    gate.touch()
    patch = GATED.format(gate=str(gate), reached=str(reached), seconds=seconds) + f"\n{patch}".rstrip()
    prefetcher, trainer = (
        session.start_patched("prefetcher", patch, f"--max-steps={NUM_TRAIN}"),
        session.start("trainer"),
    )
    prefetcher.until(reached.exists, "a read of the disk")
    return gate, prefetcher, trainer


@pytest.mark.parametrize(
    ("harm", "words"),
    [(flip_a_bit_of_each_page, "has other bytes than were written there"), (cut_short, "cannot be read at page ")],
)
def test_a_disk_that_loses_bytes_ends_both_and_a_restart_has_the_same_bits(
    harm: Callable[[int], None], words: str, session: Session, undisturbed: Outcome
) -> None:
    gate, prefetcher, trainer = start_gated(session)
    for file in cold_files(prefetcher):
        harm(file)
        os.close(file)
    gate.unlink()
    sentence = prefetcher.ended(END_TIMEOUT_S).refused(DAMAGED)
    assert re.search(
        r"the file of cold rows of group fp32_d\d_adagrad in .*/tables.* has row \d+ of table \w+", sentence
    )
    assert words in sentence
    assert sentence.endswith(RESTART)
    assert sentence in trainer.ended(END_TIMEOUT_S).refused(DAMAGED)
    assert Recovering(session, transport=TRANSPORT, **COLD).finish().differs(undisturbed) == []
    assert session.remains() == []


def test_a_checkpoint_in_progress_that_fails_as_well_leaves_both_with_the_first_sentence(session: Session) -> None:
    gate, prefetcher, trainer = start_gated(session, patch=SETTLING_FAILS)
    for file in cold_files(prefetcher):
        cut_short(file)
        os.close(file)
    gate.unlink()
    ended = prefetcher.ended(END_TIMEOUT_S)
    sentence = ended.refused(DAMAGED)
    assert "cannot be read at page " in sentence
    assert "the rows of a checkpoint cannot be read" in ended.stderr
    assert sentence in trainer.ended(END_TIMEOUT_S).refused(DAMAGED)


def test_a_disk_that_freezes_and_is_slow_then_makes_steps_wait_and_nothing_else(
    session: Session, undisturbed: Outcome
) -> None:
    gate, prefetcher, trainer = start_gated(session, seconds=0.02)
    trainer.until_counted("rowcast_train_steps_total", 1)
    assert prefetcher.asked("/healthz")[0] == trainer.asked("/healthz")[0] == 200
    gate.unlink()
    end_well(prefetcher, trainer)
    tier = read_report(session.run_dir / "report.json").tier
    assert tier is not None
    assert tier.rows_from_cold > 0
    assert Recovering(session, transport=TRANSPORT, **COLD).finish().differs(undisturbed) == []
    assert session.remains() == []


def test_a_run_on_a_frozen_disk_can_be_ended_and_goes_on_elsewhere(session: Session, undisturbed: Outcome) -> None:
    _, prefetcher, trainer = start_gated(session)
    prefetcher.insist(signal.SIGTERM)
    assert "stopping: " in prefetcher.stderr
    assert prefetcher.ended(END_TIMEOUT_S).code == 128 + signal.SIGTERM
    trainer.ended(END_TIMEOUT_S)
    assert Recovering(session, transport=TRANSPORT, **COLD).finish().differs(undisturbed) == []
    assert session.remains() == []
