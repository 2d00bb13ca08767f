"""Which lines does only a CUDA device reach, and which of them does no test run?

    python -m benchmarks.device_lines [tests...]

Method: lines of the trainer in classes of CUDA streams, in branches that ask for `"cuda"`, and after a branch that
leaves a function elsewhere. The tests of TESTS run in this process, and a trace notes which of these lines they run.
Both ways of an expression on one line count as one.
"""

import ast
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/trainer/test_cuda.py",
    "tests/trainer/test_staging.py",
    "tests/trainer/test_torch_collectives.py",
    "tests/kernels/test_choose.py",
    "tests/kernels/test_triton_interaction.py::test_a_cuda_device_gets_triton_and_torch_with_a_warning_where_it_fails",
    "tests/system/test_device_order.py::test_without_any_one_wait_some_order_gives_wrong_bits[gathered-run_on_cuda]",
    "tests/system/test_bad_input.py::test_a_device_that_is_not_there_is_refused",
    "tests/system/test_bad_input.py::test_a_device_beyond_those_that_are_there_is_refused",
)
Lines = dict[str, set[int]]  # by file


def device_lines(file: Path) -> set[int]:
    """The first lines of statements that only a CUDA device reaches."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and "Cuda" in node.name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    found |= set(first_lines(method.body))
        if isinstance(node, ast.If):
            found |= set(first_lines(branch(node)))
        for body in (getattr(node, "body", []), getattr(node, "orelse", [])):
            for number, statement in enumerate(body if isinstance(body, list) else []):
                if isinstance(statement, ast.If) and says(statement.test, ast.NotEq) and leaves(statement.body):
                    found |= set(first_lines(body[number + 1 :]))
    return found


def branch(node: ast.If) -> list[ast.stmt]:
    if says(node.test, ast.Eq):
        return node.body
    return node.orelse if says(node.test, ast.NotEq) else []


def says(test: ast.expr, operator: type[ast.cmpop]) -> bool:
    """Whether a condition compares with "cuda", by that operator."""
    compared = [own for own in ast.walk(test) if isinstance(own, ast.Compare) and isinstance(own.ops[0], operator)]
    return any(
        isinstance(value, ast.Constant) and value.value == "cuda" for own in compared for value in own.comparators
    )


def leaves(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise)


def first_lines(body: Sequence[ast.stmt]) -> Iterator[int]:
    for statement in body:
        for node in ast.walk(statement):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.stmt) and not is_text and not isinstance(node, ast.Import | ast.ImportFrom):
                yield node.lineno


def tests_run(files: Sequence[str], tests: Sequence[str]) -> Lines:
    """Lines of these files that the tests run, in any thread."""
    ran: Lines = {name: set() for name in files}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        lines = ran.get(frame.f_code.co_filename)
        if lines is None:
            return None

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        if pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]) != 0:
            raise SystemExit("a test failed, so the count would be wrong")
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return ran


def main() -> None:
    files = {file: lines for file in sorted((ROOT / "trainer").rglob("*.py")) if (lines := device_lines(file))}
    # the packages are reached through links, so a file's code has the name of the link
    named = {str(ROOT / "rowcast" / file.relative_to(ROOT)): file for file in files}
    ran = tests_run([*named], sys.argv[1:] or TESTS)
    missed = 0
    for name, file in named.items():
        own = sorted(files[file] - ran[name])
        missed += len(own)
        source = file.read_text().splitlines()
        for number in own:
            print(f"{file.relative_to(ROOT)}:{number}: {source[number - 1].strip()}")
    print(f"{sum(map(len, files.values()))} lines that only a CUDA device reaches; no test runs {missed} of them")


if __name__ == "__main__":
    main()
