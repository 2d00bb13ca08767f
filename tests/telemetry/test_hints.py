"""Hints at the end of a run: one sentence for a figure that nobody wants, none for a good run."""

from typing import Any

import pytest
from msgspec.structs import replace

from rowcast.trainer.models.evaluate import TaskEvaluation
from rowcast.trainer.report.report_json import make_report
from rowcast.trainer.report.summary import hints, summary_rows
from tests.support.three_steps import facts, run_of_three_steps

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
