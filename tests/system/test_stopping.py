"""SIGINT and SIGTERM at any time to either process or the launcher: all end in order, and a stopped run can be used."""

import signal
import time
from pathlib import Path
from typing import Literal

import pytest

from rowcast.runtime.process import UNTRAINED
from tests.support.comparisons import exported
from tests.support.processes import Process, Session, launch, proc_text

SIGINT, SIGKILL, SIGTERM = signal.SIGINT, signal.SIGKILL, signal.SIGTERM
STOP_LIMIT_S = 30.0  # that the design allows a stop in order


def ends_in_order(*processes: Process, untrained: int = 0) -> None:
    """`untrained`: how often each says that it was stopped before the first step."""
    for process in processes:
        assert process.ended(STOP_LIMIT_S).quiet().stderr.count(UNTRAINED) == untrained


def test_a_stop_before_the_peer_has_come_ends_either_process(session: Session, other: Session) -> None:
    prefetcher, trainer = session.start("prefetcher"), other.start("trainer")
    prefetcher.until_logged("serving metrics")
    trainer.until_logged("waiting for the prefetcher")
    prefetcher.signal(SIGTERM)
    trainer.signal(SIGINT)
    ends_in_order(prefetcher, trainer, untrained=1)
    assert (session.remains(), other.remains()) == ([], [])
    assert not (session.run_dir / "checkpoints").exists()
    assert not (other.run_dir / "report.json").exists()


def test_a_prefetcher_that_is_stopped_before_it_greets_a_waiting_trainer_lets_it_go(session: Session) -> None:
    session.write_job(data={"format": "tests.system.odd_parts:hanging_reader", "options": {"num_batches": 5}})
    trainer = session.start("trainer")
    trainer.until_logged("waiting for the prefetcher")
    prefetcher = session.start("prefetcher")
    prefetcher.until(lambda: len(session.children()) > 0, "decoding process")
    time.sleep(1.0)  # a trainer that waits calls again within 0.1 s; until then nobody knows of it
    prefetcher.signal(SIGTERM)
    prefetcher.ended(STOP_LIMIT_S).quiet()
    assert "the prefetcher was stopped before the run had begun" in trainer.ended(STOP_LIMIT_S).quiet().stderr
    assert session.remains() == []


@pytest.mark.parametrize("name", ["prefetcher", "trainer", "local"])
def test_a_stop_while_a_process_still_imports_ends_it(
    name: Literal["prefetcher", "trainer", "local"], tmp_path: Path
) -> None:
    with Session(tmp_path, launch) as session:
        process = session.start(name)
        process.until_it_holds_signals()
        process.signal(SIGINT)
        ends_in_order(process, untrained=1)
        assert session.remains() == []


@pytest.mark.parametrize(("stopped", "number"), [("prefetcher", SIGINT), ("trainer", SIGTERM)])
def test_a_stopped_run_can_be_exported_and_goes_on_with_the_same_commands(
    stopped: str, number: signal.Signals, session: Session
) -> None:
    prefetcher, trainer = session.start_training()
    (prefetcher if stopped == "prefetcher" else trainer).signal(number)
    ends_in_order(prefetcher, trainer)
    assert session.remains() == []
    manifest, losses = session.manifest(), session.run_dir / "losses.f32"
    steps = manifest.train_steps
    assert (manifest.finished, manifest.reason) == (False, f"{number.name} to the {stopped}")
    assert losses.stat().st_size == 4 * steps >= 4 * 20
    tensors = exported(session)
    assert tensors["embedding_bags.t.weight"].shape == (2000, 4)
    assert "bottom_mlp.0.weight" in tensors
    prefetcher, trainer = session.start("prefetcher", f"--max-steps={steps + 5}"), session.start("trainer")
    prefetcher.ended().quiet()
    assert f"finished after {steps + 5} steps (5 of this process)" in trainer.ended().quiet().stdout
    assert session.manifest().train_steps == steps + 5
    assert losses.stat().st_size == 4 * (steps + 5)


# the launcher


def test_the_launcher_ends_well_where_both_do_and_begins_a_finished_run_only_afresh(session: Session) -> None:
    launched = session.start("local", "--max-steps=3").ended().quiet()
    assert "finished after 3 steps" in launched.stdout
    assert session.remains() == []
    refused = session.start("local", "--max-steps=3").ended()
    assert refused.code == 2
    assert "(process " in refused.sentences[-1]
    assert f"the run in {session.run_dir} finished after 3 train steps (--max-steps 3)" in refused.sentences[-1]
    assert "Traceback" not in refused.stderr
    log = (session.run_dir / "prefetcher.log").read_text()
    assert log.count("event=finished") == 1, "the log of the finished run stays"
    assert f"rowcast prefetcher: the run in {session.run_dir} finished after 3 train steps" in log
    session.start("local", "--max-steps=4", "--fresh").ended().quiet()
    assert session.manifest().train_steps == 4


def test_the_launcher_passes_on_the_code_and_the_sentence_of_the_prefetcher(session: Session, tmp_path: Path) -> None:
    (tmp_path / "day_0.tsv").write_text("1\t2\t3\n")
    session.write_job(data={"format": "criteo-tsv", "path": str(tmp_path / "day_0.tsv")})
    ended = session.start("local").ended()
    assert ended.code == 4
    assert ended.sentences[-1].startswith("the prefetcher (process ")
    assert "line 1: 3 fields between tabs instead of 40" in ended.sentences[-1]
    assert {path.name for path in session.run_dir.iterdir()} == {"prefetcher.lock", "prefetcher.log", "trainer.lock"}
    assert session.remains() == []


def test_the_launcher_names_a_killed_trainer_and_ends_the_prefetcher(session: Session) -> None:
    launcher = session.start("local")
    launcher.until(lambda: "waiting for the prefetcher" in launcher.stderr, "a trainer")
    [trainer] = [pid for pid in session.children() if "\0rowcast.trainer\0" in proc_text(pid, "cmdline")]
    log = session.run_dir / "prefetcher.log"
    launcher.until(lambda: "trainer connected" in log.read_text(), "a conversation")
    session.kill(trainer)
    ended = launcher.ended()
    assert ended.code == 128 + SIGKILL
    assert ended.sentences == [
        f"the trainer (process {trainer}) was killed by SIGKILL; unless you sent it, the machine ran out of memory"
    ]
    assert session.remains() == []
