"""`rowcast train` with the options that refusals advise, and what a mistyped command is told."""

import pytest
from typer.testing import CliRunner

from rowcast.command_line import prefetcher, rowcast, trainer
from rowcast.job.file import load_job
from rowcast.job.tables import group_specs
from rowcast.trainer.report.report_json import read_report
from tests.support.processes import Session

DATA = {"eval_fraction": 0.25, "synthetic": {"samples": 64 * 40}}


def test_one_command_trains_evaluates_and_goes_on_from_a_run(session: Session) -> None:
    session.write_job(data=DATA)
    session.start("train").ended().quiet()
    report = read_report(session.run_dir / "report.json")
    copies, record_bytes = report.row_copies, group_specs(load_job(session.config))[0].record_bytes
    assert copies.bytes_read == report.rows_fetched * record_bytes
    assert copies.bytes_written == report.rows_written_back * record_bytes
    assert copies.memory_bytes >= copies.huge_page_bytes
    assert (report.read_gb_s or 0) > 0
    assert (report.write_gb_s or 0) > 0
    session.start("train", "--eval").ended().quiet()
    evaluated = read_report(session.run_dir / "eval.json")
    assert (evaluated.auc, evaluated.train_steps, evaluated.steps) == (report.auc, report.train_steps, 0)
    next_day = session.folder / "next"
    session.start(
        "train", f"--from={session.run_dir}", f"--set=job.run_dir={next_day}", "--max-steps=32"
    ).ended().quiet()
    assert read_report(next_day / "report.json").train_steps == 32
    assert "begins with" in (next_day / "prefetcher.log").read_text()


def test_old_names_of_commands_work_and_are_not_advertised() -> None:
    help = CliRunner().invoke(prefetcher.app, ["-h"])
    assert "simulate" not in help.stdout
    assert {"export", "simulate", "new"} < prefetcher.SUBCOMMANDS.keys() & rowcast.SUBCOMMANDS.keys()


def test_options_of_training_do_not_go_with_eval(session: Session) -> None:
    assert (
        session.start("train", "--eval", "--max-steps=3").ended().refused(2)
        == "--eval trains nothing, but --max-steps=3 is about training; remove one of them"
    )


@pytest.mark.parametrize(
    ("app", "typed", "answer"),
    [
        (rowcast.app, "trian", "the nearest is train"),
        (rowcast.app, "simulte", "the nearest is simulate"),
        (trainer.app, "simulate", "the nearest is rowcast simulate"),
        (prefetcher.app, "evla", "the nearest is trainer eval"),
        (prefetcher.app, "xyzzy", "no command 'xyzzy' "),
    ],
)
def test_a_mistyped_command_is_told_the_nearest(app: object, typed: str, answer: str) -> None:
    said = CliRunner().invoke(app, [typed])  # type: ignore[arg-type]
    assert said.exit_code == 2
    assert answer in said.stderr
