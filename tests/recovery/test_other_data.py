"""A restart on other data or with other settings is refused by name, and one on the same data elsewhere is not.

`--fresh`, typed by accident or on purpose, costs the model that was there nothing until a new one is on the disk.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

from rowcast.job.training_identity import digest_of_version_3
from rowcast.runtime.checkpoint_manifest import MANIFEST_NAME, ManifestOfVersion3
from tests.recovery.restarted import END_TIMEOUT_S, KILLED, ROLES, Outcome, Recovering, Role, end_well, outcome_of
from tests.support.data_files import write_day
from tests.support.jobs import table
from tests.support.processes import Session

MISMATCH = 5


@pytest.fixture
def stopped(session: Session) -> Session:
    """After 5 of 25 steps over one day in the npy layout."""
    (session.folder / "days").mkdir()
    write_day(session.folder / "days", "day_0", 400, num_ids=30)
    write_job(session)
    end_well(*session.start_both("--max-steps=5"))
    return session


def write_job(
    session: Session, folder: str = "days", batch_size: int = 16, num_embeddings: int = 30, by_name: bool = False
) -> None:
    session.write_job(
        data={
            "format": "criteo-npy",
            "path": str(session.folder / folder),
            "by_name": by_name,
            "batch_size": batch_size,
            "synthetic": None,
        },
        tables=[table("narrow", num_embeddings, 4, "cat_0"), table("wide", 30, 4, "cat_1")],
        cache={"capacity": "50 rows"},
    )


def refused(session: Session) -> str:
    sentence = session.start("prefetcher").ended().refused(MISMATCH)
    assert "the checkpoint after 5 train steps" in sentence
    assert f"--from {session.run_dir}" in sentence
    return sentence


def test_a_restart_on_other_files_or_with_other_settings_is_refused_by_what_differs(stopped: Session) -> None:
    write_day(stopped.folder / "days", "day_1", 16, num_ids=30)
    assert f"{stopped.folder}/days/day_1_dense.npy is new" in refused(stopped)
    for path in (stopped.folder / "days").glob("day_1_*"):
        path.unlink()
    write_job(stopped, batch_size=32, num_embeddings=31)
    sentence = refused(stopped)
    assert "data.batch_size is 32, and was 16" in sentence
    assert 'table "narrow": num_embeddings is 31, and was 30' in sentence
    write_job(stopped)
    path = stopped.folder / "days" / "day_0_sparse.npy"
    np.save(path, np.load(path)[::-1])
    assert f"{path} has the same size as before, but other contents" in refused(stopped)


def test_a_run_that_began_in_the_order_of_names_continues_in_it(session: Session) -> None:
    (session.folder / "days").mkdir()
    for seed, day in enumerate((0, 2, 10)):
        write_day(session.folder / "days", f"day_{day}", 112, num_ids=30, seed=seed)
    write_job(session, by_name=True)
    end_well(*session.start_both("--max-steps=5"))
    write_job(session)
    prefetcher, trainer = session.start_both()
    end_well(prefetcher, trainer)
    days = session.folder / "days"
    for process in (prefetcher, trainer):
        assert (
            f'data="9 files in the order of their names, {days}/day_0_dense.npy to {days}/day_2_sparse.npy"'
            in process.stderr
        )
    assert session.manifest().train_steps == 21


def test_a_checkpoint_of_version_3_continues_with_a_warning_and_compares_sizes(stopped: Session) -> None:
    rewrite_as_version_3(stopped)
    labels = stopped.folder / "days" / "day_0_labels.npy"
    before = labels.read_bytes()
    np.save(labels, np.load(labels).astype(np.int64))
    assert "the size of a data file differs" in refused(stopped)
    labels.write_bytes(before)
    prefetcher, trainer = stopped.start_both()
    end_well(prefetcher, trainer)
    assert "only the sizes of data files are compared" in prefetcher.stderr
    assert stopped.manifest().train_steps == 25
    assert stopped.manifest().trained_on is not None


def rewrite_as_version_3(session: Session) -> None:
    newest = session.manifest()
    assert newest.trained_on is not None
    content = msgspec.to_builtins(newest)
    del content["trained_on"], content["ahead"]
    digest = digest_of_version_3(newest.job, newest.trained_on)
    unsealed = msgspec.json.encode(content | {"version": 3, "checksum": "", "training_digest": digest})
    checksum = xxhash.xxh3_64_hexdigest(unsealed).encode()
    path = session.run_dir / "checkpoints" / newest.name / MANIFEST_NAME
    path.write_bytes(unsealed.replace(b'"checksum":""', b'"checksum":"%b"' % checksum, 1))
    assert isinstance(session.manifest(), ManifestOfVersion3)


KEPT = ("complete", "losses.f32", "report.json", "report.html")


def snapshot(run_dir: Path) -> dict[str, bytes]:
    """Everything of a run that a person may want back."""
    files = [run_dir / name for name in KEPT] + sorted((run_dir / "checkpoints").rglob("*"))
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files if path.is_file()}


@pytest.fixture
def complete(session: Session) -> Recovering:
    run = Recovering(session)
    run.finish()
    return run


def test_a_fresh_run_that_no_trainer_comes_to_leaves_the_model(complete: Recovering) -> None:
    session = complete.session
    before = snapshot(session.run_dir)
    refused = session.start("prefetcher", "--fresh", "--set=transport.connect_timeout=1s").ended().refused(3)
    assert refused.startswith("no trainer came within 1 s")
    assert snapshot(session.run_dir) == before


def test_a_trainer_that_was_not_told_of_the_fresh_run_leaves_its_report(complete: Recovering) -> None:
    session = complete.session
    (session.run_dir / "complete").unlink()  # as on the trainer's own host, where no prefetcher has written it
    before = {**snapshot(session.run_dir)}
    prefetcher, trainer = session.start("prefetcher", "--fresh"), session.start("trainer")
    sentence = trainer.ended(END_TIMEOUT_S).refused(2)
    assert "holds the report of an earlier one; add --fresh to this command too" in sentence
    assert prefetcher.ended(END_TIMEOUT_S).code != 0
    assert snapshot(session.run_dir) == before


@pytest.mark.parametrize(("role", "armed"), [("prefetcher", "PlanReady sent:2"), ("trainer", "loss written:2")])
def test_a_fresh_run_killed_before_its_first_checkpoint_gives_the_old_run_back(
    complete: Recovering, role: Role, armed: str, undisturbed: Outcome
) -> None:
    session = complete.session
    before = snapshot(session.run_dir)
    armed_by = {name: {"ROWCAST_CRASH": armed} if name == role else {} for name in ROLES}
    processes = {name: session.start(name, "--fresh", **armed_by[name]) for name in ROLES}
    codes = {name: process.ended(END_TIMEOUT_S).code for name, process in processes.items()}
    assert codes[role] == KILLED
    found = snapshot(session.run_dir)
    if role == "trainer":  # a process that was killed puts nothing back; its results are in the folder beside
        earlier = {
            path.name: path.read_bytes() for path in (session.run_dir / "earlier").iterdir() if path.name in KEPT
        }
        found = {**found, **earlier}
    assert found == before
    if role == "trainer":
        session.start("trainer", "--set=transport.connect_timeout=1s").ended(END_TIMEOUT_S)
        assert snapshot(session.run_dir) == before, "the next start brings them back, whatever comes of it"
    end_well(session.start("prefetcher", "--fresh", "--max-steps=20"), session.start("trainer", "--fresh"))
    assert outcome_of(session.run_dir).differs(undisturbed) == []
    assert not (session.run_dir / "earlier").exists()
    assert not list(session.run_dir.glob(".checkpoints.*"))


def test_a_fresh_run_with_nothing_to_train_does_not_complete_the_earlier_one(
    complete: Recovering, tmp_path: Path
) -> None:
    session = complete.session
    session.run_dir.rename(tmp_path / "day1")
    end_well(session.start("prefetcher", "--max-steps=5"), session.start("trainer"))
    (session.run_dir / "complete").unlink()  # as if it was stopped
    before = snapshot(session.run_dir)
    end_well(
        session.start("prefetcher", "--fresh", f"--from={tmp_path / 'day1'}", "--max-steps=9"),
        session.start("trainer", "--fresh"),
    )
    assert snapshot(session.run_dir) == before


def test_results_of_a_run_whose_place_was_taken_do_not_come_back(complete: Recovering) -> None:
    """The trainer of the run that took it was killed, so it could not give them up."""
    session = complete.session
    prefetcher, trainer = (
        session.start("prefetcher", "--fresh"),
        session.start("trainer", "--fresh", ROWCAST_CRASH="loss written:11"),
    )
    assert (prefetcher.ended(END_TIMEOUT_S).code, trainer.ended(END_TIMEOUT_S).code) == (3, KILLED)
    assert session.manifest().train_steps in (4, 8)
    losses = (session.run_dir / "losses.f32").read_bytes()
    armed = {"ROWCAST_CRASH": "PlanReady sent:2"}
    prefetcher, trainer = session.start("prefetcher", "--fresh", **armed), session.start("trainer", "--fresh")
    assert (prefetcher.ended(END_TIMEOUT_S).code, trainer.ended(END_TIMEOUT_S).code) == (KILLED, 3)
    assert (session.run_dir / "losses.f32").read_bytes() == losses
    assert not (session.run_dir / "report.json").exists(), "it is of the run that was replaced"
