"""A killed run loses minutes; a complete one goes on with more epochs or new files as if it had not ended."""

import signal
from pathlib import Path
from typing import Any

import pytest

from rowcast.runtime.checkpoint_manifest import newest_checkpoint, read_manifest
from rowcast.trainer.report.report_json import Report, read_report
from tests.recovery.restarted import Outcome, end_well, outcome_of
from tests.support.data_files import write_day
from tests.support.jobs import job_content, write_job
from tests.support.processes import Session
from tests.support.starter import Starter

BATCH_SIZE = 16
TABLES = [
    {"name": "narrow", "num_embeddings": 500, "embedding_dim": 4, "features": ["cat_0", "cat_1"]},
    {"name": "wide", "num_embeddings": 300, "embedding_dim": 8, "features": ["cat_2"]},
]
MODEL = {"kind": "tests.recovery.parts:model", "bottom_mlp": None, "top_mlp": None}
OPTIMIZER = {"sparse": {"kind": "adam", "lr": 0.01}, "dense": {"kind": "adam", "lr": 0.01, "schedule": {"warmup": 25}}}


def test_a_killed_run_with_a_time_between_checkpoints_goes_on_after_the_newest(session: Session) -> None:
    session.write_job(checkpoint={"every": "1s"})
    prefetcher, trainer = session.start_both()
    prefetcher.until_counted("rowcast_checkpoints_total", 2)
    assert prefetcher.metric("rowcast_checkpoint_every_seconds") == 1
    trainer.signal(signal.SIGKILL)
    trainer.reap()
    prefetcher.ended()
    saved = session.manifest().train_steps
    assert saved > 0
    prefetcher, trainer = session.start_both()
    prefetcher.until_logged(f"after_train_steps={saved}")
    trainer.until_counted("rowcast_train_steps_total", 5)
    prefetcher.signal(signal.SIGINT)
    end_well(prefetcher, trainer)


def test_checkpoints_by_epoch_stand_at_the_end_of_each(session: Session) -> None:
    write_small_job(session, [0], epochs=3, checkpoint={"every": "epoch", "keep": 9})
    end_well(*session.start_both())
    manifests = [read_manifest(path.parent) for path in sorted(session.run_dir.glob("checkpoints/*/manifest.json"))]
    assert [(manifest.position.epoch, manifest.reason) for manifest in manifests] == [
        (0, "checkpoint"),
        (1, "checkpoint"),
        (2, "end of data"),
    ]


def small_data(session: Session, days: list[int]) -> dict[str, Any]:
    """Some days in the npy layout, each of a number of whole batches and unlike the others."""
    for day in days:
        write_day(session.folder, f"day_{day}", 12 * BATCH_SIZE, num_ids=300, seed=day)
    path = session.folder / f"day_[{''.join(map(str, days))}]_*"
    return {"format": "criteo-npy", "path": str(path), "batch_size": BATCH_SIZE, "synthetic": None}


def write_small_job(
    session: Session,
    days: list[int],
    run_dir: Path | None = None,
    epochs: int = 1,
    checkpoint: dict[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """`more`: of [data]."""
    data = {**small_data(session, days), "epochs": epochs, **more}
    content = job_content(
        run_dir or session.run_dir,
        data=data,
        tables=TABLES,
        model=MODEL,
        optimizer=OPTIMIZER,
        checkpoint=checkpoint or {},
        eval=evaluation or {},
    )
    write_job(session.config, content)


def trained(session: Session, *options: str) -> Outcome:
    end_well(session.start("prefetcher", *options), session.start("trainer"))
    return outcome_of(session.run_dir)


@pytest.mark.parametrize("eval_fraction", [0.0, 0.25])
def test_more_epochs_of_a_complete_run_are_those_of_a_longer_one(
    tmp_path: Path, starter: Starter, eval_fraction: float
) -> None:
    more: dict[str, Any] = {"eval_fraction": eval_fraction, "shuffle": "full"}
    (tmp_path / "long").mkdir()
    with Session(tmp_path / "long", starter.launch) as session:
        write_small_job(session, [0], epochs=3, **more)
        expected = trained(session)
    (tmp_path / "short").mkdir()
    with Session(tmp_path / "short", starter.launch) as session:
        write_small_job(session, [0], epochs=1, **more)
        assert trained(session).train_steps < expected.train_steps
        refused = session.start("prefetcher").ended().refused(2)
        assert "finished after" in refused
        assert "(data.epochs = 1); to train it further raise data.epochs; " in refused
        write_small_job(session, [0], epochs=3, **more)
        assert trained(session).differs(expected) == []
        write_small_job(session, [0], epochs=2, **more)
        assert "(data.epochs = 3)" in session.start("prefetcher").ended().refused(2)


def test_the_next_days_files_go_on_with_everything_as_if_both_days_were_one_run(
    tmp_path: Path, starter: Starter
) -> None:
    """Adam of rows and of dense weights, a schedule, dropout: all their state goes over."""
    (tmp_path / "both").mkdir()
    with Session(tmp_path / "both", starter.launch) as session:
        write_small_job(session, [0, 1])
        expected = trained(session)
    (tmp_path / "days").mkdir()
    with Session(tmp_path / "days", starter.launch) as session:
        write_small_job(session, [0])
        first = trained(session)
        before = {path: path.read_bytes() for path in sorted(session.run_dir.rglob("*")) if path.is_file()}
        earlier = session.run_dir
        small_data(session, [1])
        session.run_dir = session.folder / "next"
        write_small_job(session, [1], session.run_dir)
        second = trained(session, f"--from={earlier}")
        assert second.train_steps == expected.train_steps == 2 * first.train_steps
        assert second.differs(expected) == []
        assert {path: path.read_bytes() for path in sorted(earlier.rglob("*")) if path.is_file()} == before
        again = session.start("prefetcher", f"--from={earlier}").ended().refused(2)
        assert "finished after 24 train steps" in again, "the same command, started again, does not begin again"


def test_the_evaluation_of_each_next_file_changes_no_bit_of_training_and_outlives_a_kill(session: Session) -> None:
    write_small_job(session, [0, 1, 2])
    plain = trained(session)
    outcomes = list[Outcome]()
    for armed in ("", "PlanReady sent:34"):
        session.run_dir = session.folder / f"evaluated-{len(outcomes)}"
        write_small_job(session, [0, 1, 2], session.run_dir, checkpoint={"every": 4}, evaluation={"next": "file"})
        if armed:
            killed, trainer = session.start("prefetcher", ROWCAST_CRASH=armed), session.start("trainer")
            assert killed.ended().code == -signal.SIGKILL
            trainer.ended()
            assert session.manifest().train_steps > 0
        outcomes.append(trained(session))
        evaluations = read_report(session.run_dir / "report.json").evaluations
        assert [own.train_step for own in evaluations] == [0, 12, 24]
        assert len({own.logloss for own in evaluations}) == 3
        assert (outcomes[-1].losses, outcomes[-1].export) == (plain.losses, plain.export)
    assert outcomes[1].differs(outcomes[0]) == []


def test_a_day_of_other_tables_or_another_seed_is_refused_by_name(session: Session) -> None:
    write_small_job(session, [0])
    trained(session)
    earlier = session.run_dir
    content = job_content(
        session.folder / "next", data=small_data(session, [0]), tables=TABLES, model=MODEL, optimizer=OPTIMIZER
    )
    for changed, sentence in (
        ({"tables": [{**TABLES[0], "num_embeddings": 501}, TABLES[1]]}, "its rows are of table narrow [500, 4]"),
        ({"job": {**content["job"], "seed": 2}}, "job.seed = 1; set that instead of 2"),
        (
            {"optimizer": {**OPTIMIZER, "sparse": {"kind": "sgd", "lr": 0.1}}},
            "in records of weight, exp_avg, exp_avg_sq",
        ),
    ):
        write_job(session.config, {**content, **changed})
        assert sentence in session.start("prefetcher", f"--from={earlier}").ended().refused(2)
    assert newest_checkpoint(session.folder / "next") is None


def ended_early(session: Session, patience: int) -> Report:
    """Trains until evaluations after each third step end it."""
    content = job_content(
        session.run_dir,
        data={**small_data(session, [0]), "epochs": 20, "eval_fraction": 0.25},
        tables=TABLES,
        model=MODEL,
        optimizer=OPTIMIZER,
        eval={"every": 3, "patience": patience, "keep": "best"},
    )
    write_job(session.config, content)
    end_well(*session.start_both())
    return read_report(session.run_dir / "report.json")


def test_a_run_that_ended_early_is_complete_exported_by_its_best_model_and_goes_on_with_more_patience(
    session: Session,
) -> None:
    report = ended_early(session, 1)
    best, last = report.best_train_step, report.train_steps
    assert best is not None
    assert 0 < best < last < 20 * 9
    assert report.ended_early.startswith("eval.patience = 1: ")
    refused = session.start("prefetcher").ended().refused(2)
    facts = f"after {last} train steps", "eval.patience = 1", f"after {best} train steps, 0.", "raise eval.patience;"
    assert all(fact in refused for fact in facts), refused
    assert f"train_steps={best} " in session.export(session.folder / "model.safetensors").stderr
    longer = ended_early(session, 3)
    assert longer.train_steps > last
    assert longer.evaluations[: len(report.evaluations)] == report.evaluations
    session.write_job(data={"eval_fraction": 0.0}, eval={"patience": 1}, job={"run_dir": str(session.folder / "none")})
    assert "no evaluation batches" in session.start("prefetcher").ended().refused(2)
