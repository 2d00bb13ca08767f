"""What a run reports at its end: `report.json`, the summary, and a hint for a figure that nobody wants."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from rowcast.protocol.messages import DataDelay, RowCopies, TierTotals
from rowcast.runtime.errors import RowcastError
from rowcast.runtime.telemetry.format_numbers import (
    human_bytes,
    human_count,
    human_seconds,
    metric_text,
    percent_number,
)
from rowcast.trainer.models.evaluate import Evaluation, TaskEvaluation
from rowcast.trainer.report.page import hints, print_summary, summary_rows
from rowcast.trainer.report.report_json import ADDED, Report, make_report, read_report, report_of_all, write_report
from rowcast.trainer.step.metrics import new_counters
from tests.support import three_steps
from tests.support.sample_messages import row_copies, tier_totals
from tests.support.three_steps import facts, run_of_three_steps


def report(run: dict[str, Any] | None = None) -> Report:
    _, counters = three_steps.run_of_three_steps()
    counters.stalled("rows", 0.5)
    return make_report(counters, **(run or facts()))


def test_a_report_says_what_the_counters_say() -> None:
    made = report()
    assert (made.steps, made.eval_steps, made.samples, made.samples_per_s) == (2, 1, 64, 16.0)
    assert (made.lookups, made.unique_rows, made.rows_fetched, made.rows_evicted) == (120, 60, 24, 18)
    assert (made.rows_written_back, made.rows_flushed) == (6, 3)
    assert made.hit_ratio == 36 / 60
    assert (made.trainer_wait_s, made.stall_share) == (0.5, 0.125)
    assert made.bytes_to_device == 4 * 64 + 4 * 128 + 1000 + 24
    assert made.bytes_from_device == 3 * 64 + 3 * 128
    assert made.waits_s["prefetcher"] == {"credit": 1.5, "store": 0.25}
    assert made.waits_s["trainer"] == {"rows": 0.5, "ring": 0.0, "results": 0.0, "barrier": 0.0, "ranks": 0.0}
    assert set(made.versions) == {"rowcast", "torch", "numpy", "python"}


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    made = report(facts(evaluation=Evaluation(train_step=2, auc=0.75, logloss=0.5, accuracy=0.8)))
    write_report(path, made)
    assert read_report(path) == made
    assert [evaluation.train_step for evaluation in made.evaluations] == [2]
    assert read_report(path).row_copies == row_copies()
    with_tier = report(facts(tier=tier_totals()))
    write_report(path, with_tier)
    assert read_report(path).tier == tier_totals()
    write_report(path, made)
    content = json.loads(path.read_text())
    assert content["auc"] == 0.75
    assert content["pinned"] is False
    assert list(tmp_path.iterdir()) == [path]


def test_what_did_not_happen_is_null_not_a_number(tmp_path: Path) -> None:
    write_report(tmp_path / "report.json", make_report(new_counters(three_steps.groups()), **facts()))
    content = json.loads((tmp_path / "report.json").read_text())
    assert [content[name] for name in ("auc", "logloss", "accuracy", "hit_ratio", "stopped_by", "tier")] == [None] * 6
    assert content["samples_per_s"] == 0


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    (tmp_path / "report.json.partial").mkdir()
    with pytest.raises(RowcastError, match="cannot write the report"):
        write_report(path, report())
    assert path.read_text() == "old"


def test_the_summary_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(report(facts(evaluation=Evaluation(train_step=2, auc=None, logloss=0.5, accuracy=0.8))))
    text = capsys.readouterr().out
    assert "rowcast: finished after 2 steps in 4.0 s" in text
    assert re.search(r"evaluation +AUC undefined, log loss 0.500000, accuracy 0.800000\n", text)
    assert re.search(r"rows +24 fetched, 18 evicted, 6 written back\n", text)
    assert re.search(r"device memory +512 KiB rows, 1 MiB staging, 512 KiB plans; all 3 MiB\n", text)
    assert re.search(r"host memory +5 GiB in the prefetcher\n", text)
    assert re.search(r"each step +lookup 0.0, forward 0.0 ms\nmoving rows +gather 0.0, fill 0.0 ms\n", text)
    assert "\x1b" not in text
    assert "cold tier" not in text, "all rows are in memory"


OWN_LOSS = Evaluation(train_step=2, auc=None, logloss=2.5, is_own_loss=True, accuracy=None)
EARLY = facts() | {
    "evaluations": (msgspec.structs.replace(OWN_LOSS, train_step=1, logloss=2.25), OWN_LOSS),
    "ended_early": "eval.patience = 1: why",
}
SUMMARIES: list[tuple[dict[str, Any], str]] = [
    (facts(), r"\ntables +16 GiB in all, 3 MiB on the device \(0.0 %\)\n"),
    (facts() | {"table_bytes": 2**20}, r"\ntables +1 MiB in all, 3 MiB on the device\n"),
    (facts(tier=tier_totals()), r"\ncold tier +1,234,567 rows from it, 7 late, 45,678 to it\n"),
    (
        facts(data_delay=DataDelay(waiting_files=3, last_s=1.5, longest_s=2.5)),
        r"\nnew files +3 waiting; the last was trained after 1\.5 s, the slowest 2\.5 s\n",
    ),
    (
        facts(data_delay=DataDelay(waiting_files=1, last_s=None, longest_s=0.0)),
        r"\nnew files +1 waiting; none trained to its end\n",
    ),
    (facts(tier=tier_totals()), r"\nits traffic +3 GiB read, 512 MiB written; 2 GiB of disk\n"),
    (facts(evaluation=OWN_LOSS), r"\nevaluation +loss 2.500000\n"),
    (EARLY, r"rowcast: ended early after 2 steps in 4.0 s"),
    (EARLY, r"\nevaluation +loss 2.500000\nbest evaluation +after 1 train steps, loss 2.250000\n"),
    (EARLY, r"\nended early +eval.patience = 1: why\n"),
    (facts(train_steps=7), r"rowcast: finished after 7 steps \(2 of this process\) in 4.0 s"),
]


@pytest.mark.parametrize(("own", "line"), SUMMARIES, ids=[line for _, line in SUMMARIES])
def test_a_summary_has_the_lines_of_its_run(own: dict[str, Any], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(report(own))
    assert re.search(line, capsys.readouterr().out)


def test_the_summary_of_a_stopped_run_says_what_stopped_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(report(facts(finished=False, stopped_by="SIGTERM")), Console(force_terminal=True, width=40))
    text = capsys.readouterr().out
    assert "rowcast: stopped by SIGTERM after 2 steps in 4.0 s; start it again to continue\x1b" in text
    assert "\x1b[1m" in text
    assert "evaluation" not in text


def test_the_summary_says_where_the_page_is_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path("/a/very/long/" * 8) / "[run]" / "report.html"
    print_summary(report(facts()), Console(width=60), page=page)
    text = capsys.readouterr().out
    assert f"\nreport           {page}\n" in text
    assert re.search(r"\nwaited for rows  ", text), "in line with the other rows"


def of_rank(rank: int) -> Report:
    """Every rank has the same steps and a share of the rest."""
    _, counters = three_steps.run_of_three_steps()
    counters.rank = rank
    counters.stalled("rows", 0.5 + rank)
    counters.stalled("ranks", 2.0 - rank)
    counters.spent("forward", 1.0 + rank)
    group = next(iter(counters.groups.values()))
    group.rows_sent, group.bytes_sent, group.rows_received, group.bytes_received = 10 + rank, 100 + rank, 11, 102
    for _ in range(2):
        counters.balanced(1.5)
    return make_report(counters, **facts(tier=tier_totals()))


def test_the_report_of_all_ranks_adds_what_they_share_out_and_keeps_what_each_did() -> None:
    ranks = [of_rank(rank) for rank in range(3)]
    made = report_of_all(ranks)
    for name in ADDED:
        assert getattr(made, name) == 3 * getattr(ranks[0], name), name
    assert (made.steps, made.train_steps, made.wall_s, made.loss) == (2, 2, 4.0, 0.6)
    assert made.samples_per_s == 3 * ranks[0].samples_per_s
    assert made.hit_ratio == ranks[0].hit_ratio == 36 / 60
    assert (made.trainer_wait_s, made.stall_share) == (2.5, 2.5 / 4), "of the rank that waited longest"
    assert (made.waits_s["trainer"]["rows"], made.waits_s["trainer"]["ranks"]) == (2.5, 2.0)
    assert made.phase_ms["forward"] == 1000.0, "the mean over ranks of 1, 2 and 3 s, in 2 steps"
    assert made.tier is not None
    assert made.tier.late_rows == 3 * tier_totals().late_rows
    assert made.row_copies.huge_page_bytes == 3 * row_copies().huge_page_bytes
    assert (made.read_gb_s, made.write_gb_s) == (ranks[0].read_gb_s, ranks[0].write_gb_s) == (4.0, 3.0)
    assert made.rank_imbalance == 1.5
    assert [own.rank for own in made.ranks] == [0, 1, 2]
    assert [own.waited_for_ranks_s for own in made.ranks] == [2.0, 1.0, 0.0]
    assert sum(own.samples for own in made.ranks) == made.samples


def test_rates_of_rows_need_rows() -> None:
    made = report(facts() | {"row_copies": RowCopies(read_s=0.1)})
    assert (made.read_gb_s, made.write_gb_s) == (None, None)


def test_the_page_of_the_report_names_every_count_of_the_stores() -> None:
    page = Path(__file__, "../../../docs/report.md").resolve().read_text()
    named = set(re.findall(r"`(\w+)`", page))
    assert {*TierTotals.__struct_fields__, *RowCopies.__struct_fields__, "read_gb_s", "write_gb_s"} <= named


def test_the_report_of_a_trainer_that_is_alone_is_its_own() -> None:
    made = of_rank(0)
    assert report_of_all([made]) == made
    assert [own.rank for own in made.ranks] == [0]


def test_the_summary_of_several_ranks_has_a_table_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(report_of_all([of_rank(0), of_rank(1)]), Console(width=60))
    text = capsys.readouterr().out
    assert re.search(r"exchanged +21 rows and their gradients, 201 B\n", text)
    assert re.search(r"rows of a rank +1\.500, the most over the mean\n", text)
    assert re.search(r"processes +2 prefetchers, 2 trainers\n", text)
    assert [line.split() for line in text.splitlines() if line.endswith("11, 12")] == [
        ["0", "64", "60", "0.5", "s", "2.0", "s", "100", "B", "102", "B", "11,", "12"],
        ["1", "64", "60", "1.5", "s", "1.0", "s", "101", "B", "102", "B", "11,", "12"],
    ]
    assert "rank  samples  rows owned  waited for rows  waited for ranks   sent  received  processes\n" in text
    print_summary(of_rank(0), Console(width=60))
    assert "rank" not in capsys.readouterr().out


def test_units_are_human() -> None:
    assert [human_count(n) for n in (0, 7.25, 999.4, 999.6, 48_213, 1.5e9, 2e12)] == [
        "0",
        "7.25",
        "999",
        "1k",
        "48.2k",
        "1.5G",
        "2T",
    ]
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536, 2**40)] == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "1 TiB"]
    shares = {0.0: "0.0", 1.0: "100.0", 0.00012: "0.01", 0.99996: "99.996", 3.127: "312.7"}
    assert {share: percent_number(share) for share in shares} == shares, "told from nothing and everything"
    assert [human_seconds(s) for s in (0.04, 59.94, 72, 3725)] == ["0.0 s", "59.9 s", "1 min 12 s", "1 h 02 min"]


GOOD: dict[str, Any] = {"auc": 0.8, "logloss": 0.5, "accuracy": 0.7, "normalized_entropy": 0.9, "first_loss": 0.7}
EQUAL, WORSE, FIRST = "all labels of the evaluation are equal", "normalized entropy is above 1", "the first loss was"
BUY = TaskEvaluation(label="buy", num_labels=9, auc=0.8, logloss=0.5, normalized_entropy=0.9)


def tasks(**changed: Any) -> dict[str, Any]:
    return {"tasks": (replace(BUY, label="click"), replace(BUY, **changed))}


@pytest.mark.parametrize(
    ("found", "begin"),
    [
        ({}, []),
        ({"auc": None, "normalized_entropy": None}, [EQUAL]),
        ({"normalized_entropy": 1.01}, [WORSE]),
        ({"first_loss": 1234.5}, [f"{FIRST} 1,234.5"]),
        ({"first_loss": 10.0, "normalized_entropy": 1.0}, []),
        ({"first_loss": 11.0, "normalized_entropy": 2.0}, [FIRST, WORSE]),
        ({"first_loss": 99.0, "normalized_entropy": 2.0, "auc": None, "is_own_loss": True}, []),
        ({"first_loss": 99.0, "auc": None, "logloss": None, "accuracy": None, "normalized_entropy": None}, []),
        (tasks(auc=None), [f"label buy: {EQUAL}"]),
        (tasks(normalized_entropy=1.5), [f"label buy: {WORSE}"]),
        (tasks(auc=None, logloss=None, num_labels=0), []),
    ],
)
def test_a_figure_that_nobody_wants_ends_in_one_sentence(found: dict[str, Any], begin: list[str]) -> None:
    report = replace(make_report(run_of_three_steps()[1], **facts()), **GOOD | found)
    said = list(hints(report))
    assert len(said) == len(begin)
    assert all(sentence.startswith(own) for sentence, own in zip(said, begin, strict=True))
    assert [value for name, value in summary_rows(report) if name == "hint"] == said


@pytest.mark.parametrize(
    ("value", "num_samples", "text"),
    [(0.886925, 452, "0.887"), (0.0283123, 1500, "0.0283"), (1.0, 9, "1.00"), (12104.3, 1339, "12,104"),
     (0.7123456, 10**7, "0.71235"), (0.5, 0, "0.500000"), (None, 9, "undefined"), (float("nan"), 9, "nan")],
)  # fmt: skip
def test_a_metric_has_the_digits_that_its_samples_carry(value: float | None, num_samples: int, text: str) -> None:
    assert metric_text(value, num_samples) == text
