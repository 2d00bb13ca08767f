"""`--verify` between two real processes says what it looked at; a wrong row ends both with code 4 and a sentence."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Session
from tests.support.starter import Starter

WRONG_SLOTS = (
    "import rowcast.trainer.device.streams as s; own = s.scatter; "
    "s.scatter = lambda source, slots, rows: own(source, slots.roll(1), rows)"
)
LOST_WRITES = (
    "import sys; sys.argv += ['--verify-share=1']; from rowcast.prefetcher.stores import memory_store, store; "
    "memory_store.MemoryStore.write_numbered = lambda self, keys, numbers, rows: store.FINISHED"
)
ROW = r"^row [0-9]+ of table t is stale"


@pytest.fixture
def session(tmp_path: Path, starter: Starter) -> Iterator[Session]:
    with Session(tmp_path, starter.launch) as session:
        session.write_job(cache={"capacity": "8KiB"}, checkpoint={"every": 10})
        yield session


@pytest.mark.parametrize("option", ["--verify", "--verify-share=1"])
def test_a_run_in_which_nothing_is_wrong_ends_well_and_says_what_was_looked_at(session: Session, option: str) -> None:
    prefetcher, trainer = session.start_both(option, "--max-steps=25")
    trainer.ended().quiet()
    found = re.findall(r'event="verified, in rows" (.*)', prefetcher.ended().quiet().stderr)
    assert len(found) == 1
    assert re.fullmatch(r"given=[1-9]\d* filled=[1-9]\d* returned=[1-9]\d* dropped=\d+ kept=[1-9]\d*\W*", found[0])
    assert session.remains() == []


def test_rows_in_wrong_slots_end_both_processes(session: Session) -> None:
    prefetcher, trainer = session.start("prefetcher", "--verify-share=1"), session.start_patched("trainer", WRONG_SLOTS)
    refusals = [process.ended().refused(4) for process in (prefetcher, trainer)]
    assert refusals[0] in refusals[1]
    assert re.search(rf"{ROW} or torn: its slot at step 0 does not hold the bytes that the store gave", refusals[0])
    assert session.remains() == []


def test_writes_that_are_lost_end_both_processes(session: Session) -> None:
    prefetcher, trainer = session.start_patched("prefetcher", LOST_WRITES), session.start("trainer")
    refusals = [process.ended().refused(4) for process in (prefetcher, trainer)]
    assert refusals[0] in refusals[1]
    assert re.search(
        rf"{ROW}, torn or lost: the store gives other bytes at .*step [0-9]+ than it took after step [0-9]+ ",
        refusals[0],
    )
    assert not list(session.run_dir.glob("checkpoints/step-*/manifest.json")), "a checkpoint holds verified rows"
    assert session.remains() == []
