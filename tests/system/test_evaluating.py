"""`prefetcher run --eval` with `trainer eval`: a checkpoint gives training's result at its step and stays as it is."""

import re

from rowcast.runtime.checkpoint_manifest import read_manifest
from rowcast.trainer.report.report_json import Report, read_report
from tests.support.processes import Ended, Process, Session

DATA = {"eval_fraction": 0.25, "synthetic": {"samples": 64 * 40}}


def trained(session: Session, **sections: dict[str, object]) -> str:
    """What the terminal showed of a whole run of 30 steps with an evaluation after 10, 20 and at its end."""
    session.write_job(**{"data": DATA, "eval": {"every": 10}, "checkpoint": {"every": 10, "keep": 9}, **sections})
    prefetcher, trainer = session.start_both()
    prefetcher.ended().quiet()
    return trainer.ended().quiet().stdout


def evaluated(session: Session, *options: str) -> Report:
    prefetcher, trainer = session.start("prefetcher", "--eval", *options), session.start("eval")
    prefetcher.ended().quiet()
    assert "rowcast: evaluated in" in trainer.ended().quiet().stdout
    return read_report(session.run_dir / "eval.json")


def refused(code: int, *processes: Process) -> set[str]:
    return {process.ended().refused(code) for process in processes}


def test_any_checkpoint_gives_the_result_that_training_had_there_and_nothing_changes(session: Session) -> None:
    shown = trained(session)
    assert re.findall(r"eval after (\d+) train steps?: AUC 0\.\d", shown) == ["10", "20", "30"]
    evaluations = read_report(session.run_dir / "report.json").evaluations
    results = {evaluation.train_step: evaluation.auc for evaluation in evaluations}
    before = {
        path: path.read_bytes() for path in session.run_dir.rglob("*") if path.is_file() and "lock" not in path.name
    }
    for train_steps, auc in results.items():
        name = next(n for n in checkpoints(session) if manifest_train_steps(session, n) == train_steps)
        report = evaluated(session, f"--checkpoint={name}")
        assert (report.train_steps, report.steps, report.eval_steps, report.auc) == (train_steps, 0, 10, auc)
        assert report.rows_written_back == 0
    assert evaluated(session).train_steps == 30
    for path, content in before.items():
        assert path.read_bytes() == content, f"{path} was changed by an evaluation"


def checkpoints(session: Session) -> list[str]:
    return [path.parent.name for path in (session.run_dir / "checkpoints").glob("*/manifest.json")]


def manifest_train_steps(session: Session, name: str) -> int:
    return read_manifest(session.run_dir / "checkpoints" / name).train_steps


def ended(session: Session, *options: str) -> Ended:
    return session.start("prefetcher", *options).ended()


def test_what_cannot_be_evaluated_is_said_in_a_sentence(session: Session) -> None:
    session.write_job(data=DATA)
    assert ended(session, "--eval").refused(2).endswith("holds no checkpoint; a run writes one at its end")
    assert (
        ended(session, "--checkpoint=step-000000000010")
        .refused(2)
        .startswith("--checkpoint chooses what --eval evaluates")
    )
    trained(session, data={**DATA, "eval_fraction": 0.0})
    assert "holds no checkpoint ../elsewhere; there is step-" in ended(
        session, "--eval", "--checkpoint=../elsewhere"
    ).refused(2)
    assert (
        ended(session, "--eval").refused(2)
        == "there are no evaluation batches; set data.eval_fraction or data.eval_path"
    )


def test_a_trainer_that_would_train_does_not_go_with_a_prefetcher_that_evaluates(session: Session) -> None:
    trained(session)
    (sentence,) = refused(5, session.start("prefetcher", "--eval"), session.start("trainer", "--fresh"))
    assert sentence.startswith("the prefetcher was started to evaluate and the trainer to train; ")
