"""Who may import whom, read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {  # package -> what it may not import
    "protocol": ("prefetcher", "trainer", "deploy", "examples", "torch"),
    "prefetcher": ("trainer", "deploy", "examples", "torch"),
    "trainer": ("prefetcher", "deploy", "examples"),
}
NUMBA_FILE = "protocol/compiled.py"
CUDA_FILES = {"trainer/streams.py", "trainer/pinning.py"}


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports would hide who is imported"
            yield node.module or ""


@pytest.mark.parametrize("package", FORBIDDEN)
def test_each_package_imports_only_what_it_may(package: str) -> None:
    files = source_files(package)
    assert len(files) > 5
    for file in files:
        for name in imported(ast.parse(file.read_text())):
            assert name.partition(".")[0] not in FORBIDDEN[package], f"{file.relative_to(ROOT)} imports {name}"


def test_numba_is_known_to_one_file_only() -> None:
    users = {
        str(file.relative_to(ROOT))
        for package in FORBIDDEN
        for file in source_files(package)
        if {name.partition(".")[0] for name in imported(ast.parse(file.read_text()))} & {"numba", "llvmlite"}
    }
    assert users == {NUMBA_FILE}


def test_cuda_is_touched_only_by_streams_and_pinning() -> None:
    for package in FORBIDDEN:
        for file in source_files(package):
            uses = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute) and node.attr == "cuda"]
            assert not uses or str(file.relative_to(ROOT)) in CUDA_FILES, f"{file.relative_to(ROOT)} uses torch.cuda"


def test_the_plain_loop_is_short_enough_to_be_read_as_the_promise_it_is() -> None:
    assert len((ROOT / "examples" / "plain_loop.py").read_text().splitlines()) < 120
