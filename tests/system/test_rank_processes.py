"""Ranks as real processes: they have the bits of the plain loop in as many parts."""

import os
import re
import signal

import pytest

from rowcast.prefetcher.run.commands import verify
from rowcast.trainer.report.report_json import read_report
from tests.support.comparisons import assert_trained_as_the_plain_loop
from tests.support.jobs import table
from tests.support.processes import Process, Session
from tests.support.repeats import count as times

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 12
SMALL = {
    "data": {"batch_size": 50, "synthetic": {"samples": 20_000}},
    "optimizer": {"dense": {"kind": "adam", "lr": 0.01}},
}


def rank_pid(session: Session, role: str, rank: int) -> int:
    """0 while there is none."""
    lock = session.run_dir / f"rank-{rank:03d}" / f"{role}.lock"
    return int(lock.read_text() or 0) if lock.exists() else 0


@pytest.mark.parametrize(("count", "parts"), [(2, 4), (3, 3), (4, 4)][: times(2, 3)])
def test_several_ranks_have_the_bits_of_the_plain_loop(count: int, parts: int, session: Session) -> None:
    session.write_job(**SMALL, ranks={"count": count, "parts": parts})
    session.start("local", "--max-steps", str(STEPS)).ended(300).quiet()
    assert_trained_as_the_plain_loop(session, STEPS, parts)
    assert session.remains() == []


def test_one_rank_then_four_then_two_have_the_bits_of_the_plain_loop(session: Session) -> None:
    stores = ({"kind": "memory"}, {"kind": "tiered", "memory": "128 rows"}, {"kind": "memory"})
    for ranks, steps, store in zip((1, 4, 2), (5, 8, STEPS), stores, strict=True):
        own = {"ranks": {"count": ranks, "parts": 4}, "store": store}
        session.write_job(**SMALL, cache={"capacity": "4KiB"}, checkpoint={"every": 3}, **own)
        session.start("local", "--max-steps", str(steps)).ended(300).quiet()
        manifest = session.manifest()
        assert (manifest.train_steps, len(manifest.shards)) == (steps, ranks)
    assert_trained_as_the_plain_loop(session, STEPS, 4)
    assert verify(session.run_dir, None) == 0
    assert session.remains() == []


def test_tables_that_one_rank_owns_change_no_bit_and_may_be_others_at_a_restart(session: Session) -> None:
    last = 66  # more than the 32 batches that every rank reads whole, and those that decoders are ahead
    for ranks, steps, placements in ((4, 5, ("table", "rows", "table")), (2, last, ("table", "table", "rows"))):
        tables = [
            table(name, rows, 4, *features, placement=placement)
            for name, rows, features, placement in zip(
                "abc", (2000, 300, 5000), (("cat_0",), ("cat_1", "cat_2"), ("cat_3",)), placements, strict=True
            )
        ]
        session.write_job(**SMALL, tables=tables, checkpoint={"every": 3}, ranks={"count": ranks, "parts": 4})
        session.start("local", "--max-steps", str(steps)).ended(300).quiet()
        report = read_report(session.run_dir / "report.json")
        assert sum(own.bytes_sent for own in report.ranks) == sum(own.bytes_received for own in report.ranks) > 0
    assert_trained_as_the_plain_loop(session, last, 4)
    assert verify(session.run_dir, None) == 0
    assert session.remains() == []


def test_column_pieces_on_two_ranks_and_then_one_have_the_bits_of_the_plain_loop(session: Session) -> None:
    tables = [table("t", 2000, 8, "cat_0", "cat_1", placement="columns:2")]
    for ranks, steps in ((2, 6), (1, STEPS)):
        own = {"tables": tables, "ranks": {"count": ranks, "parts": 2}, "model": {"bottom_mlp": [8]}}
        session.write_job(**SMALL, **own, checkpoint={"every": 3})
        session.start("local", "--max-steps", str(steps)).ended(300).quiet()
        assert len(session.manifest().points) == (ranks > 1)
        assert verify(session.run_dir, None) == 0
    assert_trained_as_the_plain_loop(session, STEPS, 2)


def test_auto_cuts_a_table_into_pieces_keeps_them_and_cuts_anew_for_other_ranks(session: Session) -> None:
    """Its single look-ups of rows that seldom come twice send less as bf16 vectors."""
    tables = [table("t", 5000, 64, "cat_0", placement="auto"), table("u", 4, 64, "cat_1", placement="auto")]
    data = {"batch_size": 400, "synthetic": {"samples": 20_000, "zipf": 0}}
    stores = ({"kind": "memory"}, {"kind": "tiered", "memory": "2000 rows"}, {"kind": "memory"})
    own = {"tables": tables, "data": data, "model": {"bottom_mlp": [64]}, "cache": {"capacity": "128KiB"}}
    for ranks, steps, store in zip((4, 4, 2), (3, 5, STEPS), stores, strict=True):
        of_ranks = {"count": ranks, "parts": 4, "gradients": "bf16"}
        session.write_job(**SMALL | own, checkpoint={"every": 2}, store=store, ranks=of_ranks)
        session.start("local", "--max-steps", str(steps)).ended(300).quiet()
        assert [len(points) for points in session.manifest().points] == [ranks, 0]
        assert all(found.vector_bytes_sent > 0 for found in read_report(session.run_dir / "report.json").ranks)
    assert_trained_as_the_plain_loop(session, STEPS, 4)
    assert verify(session.run_dir, None) == 0
    assert session.remains() == []


def test_a_killed_trainer_and_all_killed_prefetchers_come_back_and_change_nothing(session: Session) -> None:
    session.write_job(**SMALL, ranks={"count": 3}, checkpoint={"every": "1s"})
    steps = 800
    local = session.start("local", "--max-steps", str(steps))
    for role, ranks in (("trainer", [1]), ("prefetcher", [0, 1, 2])):
        begun = local.stderr.count("event=training ")
        local.until(lambda begun=begun: local.stderr.count("event=training ") == begun + 3, "an attempt", 120)  # type: ignore[misc]
        local.until_counted("rowcast_train_steps_total", 100)  # counted by a trainer of this attempt
        pids = [rank_pid(session, role, rank) for rank in ranks]
        for pid in pids:
            session.kill(pid)
    ended = local.ended(300)
    assert ended.code == 0, ended.stderr
    assert re.search(
        rf"rowcast trainer: the prefetcher of rank . \(process ({'|'.join(map(str, pids))})\) was killed by SIGKILL; "
        rf".* \[{session.run_dir}/prefetcher.log\]",
        ended.stderr,
    )
    assert_trained_as_the_plain_loop(session, steps, 3)
    assert session.remains(killed=True) == []


@pytest.mark.parametrize("point", ["Bye not sent", "run not marked complete", "Bye sent"][: times(1, 3)])
def test_a_first_rank_that_is_killed_after_the_last_step_comes_back_or_is_not_missed(
    point: str, session: Session
) -> None:
    session.write_job(
        **SMALL, ranks={"count": 2, "timeout": "20s"}
    )  # so long the other waits until the run is complete
    crash = f"{point}:1:SIGKILL:{session.folder / 'once'}"
    ended = session.start("local", "--max-steps", str(STEPS), ROWCAST_CRASH=crash).ended(300)
    assert ended.code == 0, ended.stderr
    assert (session.folder / "once").exists(), "nothing was killed"
    assert_trained_as_the_plain_loop(session, STEPS, 2)
    assert (session.run_dir / "report.json").exists()
    assert (session.run_dir / "complete").exists()
    assert session.remains(killed=True) == []


def test_a_signal_to_one_process_stops_all_in_order_after_the_same_step(session: Session) -> None:
    session.write_job(**SMALL, ranks={"count": 2})
    steps = 400
    local = session.start("local", "--max-steps", str(steps))
    local.until(lambda: local.stderr.count("event=training ") == 2, "both train", 120)
    local.until_counted("rowcast_train_steps_total", 20)
    os.kill(rank_pid(session, "prefetcher", 1), signal.SIGTERM)
    ended = local.ended(120)
    assert ended.code == 0, ended.stderr
    done = session.manifest().train_steps
    assert 20 <= done < steps, "stopped in the middle"
    assert_trained_as_the_plain_loop(session, done, 2)
    assert session.remains() == []


def torchrun(session: Session, count: int, *options: str) -> Process:
    arguments = [f"--nproc-per-node={count}", "-m", "rowcast.trainer", "run", f"--config={session.config}", *options]
    return session.start_module("rowcast.deploy.torchrun", *arguments)


def test_trainers_of_another_job_file_than_their_prefetchers_are_refused_on_every_rank(session: Session) -> None:
    session.write_job(**SMALL, ranks={"count": 2})
    prefetchers = session.start("prefetcher", "--set=job.seed=2")
    trainers = torchrun(session, 2).ended()
    assert trainers.code == 5
    assert len(trainers.sentences) == 2
    assert len(set(trainers.sentences)) == 1, trainers.sentences
    assert "the two processes were started with different job files" in trainers.sentences[0]
    assert prefetchers.ended().code == 5
