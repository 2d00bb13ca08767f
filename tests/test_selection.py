"""What `make test` leaves out: tests that start processes are found, and those that the lists name exist."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.jobs import write_job
from tests.support.processes import Session
from tests.support.starter import Starter
from tests.support.uses import STARTERS, reached

ROOT = Path(__file__).parent.parent
NAMED = [line for file in ("smoke.txt", "long.txt") for line in (ROOT / "tests" / file).read_text("utf-8").splitlines()]


def in_a_function_of_its_own() -> None:
    def run() -> None:
        with Session(ROOT):
            pass

    run()


@pytest.mark.parametrize(
    ("calls", "starts"),
    [(Session, True), (Starter, True), (in_a_function_of_its_own, True), (write_job, False)],
)
def test_what_starts_processes_is_found_wherever_it_is_called(calls: Callable[..., object], starts: bool) -> None:
    assert bool(STARTERS & reached([calls])) == starts


@pytest.mark.parametrize("line", [line for line in NAMED if line and not line.startswith("#")])
def test_the_tests_that_are_named_exist(line: str) -> None:
    file, name = re.fullmatch(r"(tests/\S+\.py)::(\w+)(?:\[.*\])?", line).groups()  # type: ignore[union-attr]
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
