"""Who may import whom, read from the source."""

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OTHERS = (
    "deploy",
    "analysis",
    "trainer",
    "serving",
    "prefetcher",
    "protocol",
    "job",
    "runtime",
)  # from the top floor down
FORBIDDEN = {  # package -> what it may not import
    "runtime": ("torch", *OTHERS[:7]),
    "job": ("torch", *OTHERS[:6]),
    "protocol": ("torch", *OTHERS[:5]),
    "prefetcher": ("torch", "deploy", "analysis", "trainer", "serving"),
    "serving": ("torch", "zmq", "socket", "deploy", "analysis", "trainer"),
    "trainer": ("deploy", "analysis", "serving", "prefetcher"),
    "analysis": ("torch", "deploy", "trainer", "serving"),
    "rowcast/command_line": ("torch",),
}
FLOORS = {  # package -> its rooms, folders and files, from the bottom up; rooms of one line do not import each other
    "protocol": (
        "released_rows",
        "batch first_values plan_layout",
        "parts",
        "messages plan",
        "counters order",
        "session",
        "transport",
        "attempts conversation scrape",
    ),
    "prefetcher": ("planner readers stores", "pipeline", "checkpoints", "run", "__main__"),
    "serving": (
        "row_layout",
        "index_loops",
        "version_file",
        "raw_ids",
        "snapshot",
        "model version_writer",
        "publisher",
        "command",
    ),
    "trainer": ("device", "kernels", "models", "step", "report", "run", "adopt", "__main__"),
    "analysis": ("show", "scan", "simulate", "check timeline", "advise", "estimate new"),
}
MOST_ARROWS = 18  # pairs of the trainer's rooms of which one imports the other
GUEST = "analysis/estimate/"  # nobody imports it but the command line, tests and benchmarks
MEASURES = (f"{GUEST}measure.py", f"{GUEST}overheads.py")  # run the trainer's kernels
COMMAND_LINE = "command_line"  # above all rooms: it imports each by name, when its command is called
FILES = {
    "numba": "runtime/compiled.py runtime/compiled.py",
    "llvmlite": "runtime/compiled.py",
    "matplotlib": "runtime/drawing.py",
}
CUDA_FILES = {"trainer/device/streams.py", "trainer/device/cuda.py"}


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports would hide who is imported"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(name: str) -> str:
    """The room of ours that a module is in, or the library."""
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if first == "rowcast" else first


def test_a_docstring_names_arguments_that_the_function_has() -> None:
    for file in chain.from_iterable(map(source_files, (*FORBIDDEN, "deploy"))):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
                named = re.findall(r"(?:^|[.;)] |\n\s*)`(\w+)`:", ast.get_docstring(node) or "")
                assert {*named} <= given, f"{file.name}: {node.name} explains {sorted({*named} - given)}"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_each_package_imports_only_what_it_may(package: str) -> None:
    files = source_files(package)
    assert len(files) > 2
    for file in files:
        path = str(file.relative_to(ROOT))
        for name in imported(ast.parse(file.read_text())):
            if package_of(name) == COMMAND_LINE:
                assert path.endswith("/__main__.py") or package == f"rowcast/{COMMAND_LINE}", f"{path} imports {name}"
            if package_of(name) in ("torch", "trainer") and path.startswith(MEASURES):
                continue
            assert package_of(name) not in FORBIDDEN[package], f"{path} imports {name}"


def rooms_of(package: str) -> dict[str, list[Path]]:
    rooms: dict[str, list[Path]] = {}
    for file in source_files(package):
        rooms.setdefault(file.relative_to(ROOT / package).with_suffix("").parts[0], []).append(file)
    return rooms


def arrows(package: str) -> set[tuple[str, str]]:
    """(room, room that it imports); what is imported for type checkers or in a function counts."""
    return {
        (room, name.split(".")[2])
        for room, files in rooms_of(package).items()
        if room != "__init__"  # a package's face may name any room
        for file in files
        for name in imported(ast.parse(file.read_text()))
        if name.startswith(f"rowcast.{package}.") and name.split(".")[2] != room
    }


@pytest.mark.parametrize("package", FLOORS)
def test_each_room_imports_only_rooms_on_lower_floors(package: str) -> None:
    floors = {room: floor for floor, rooms in enumerate(FLOORS[package]) for room in rooms.split()}
    assert set(floors) == set(rooms_of(package)) - {"__init__"}
    assert not {arrow for arrow in arrows(package) if floors[arrow[0]] <= floors[arrow[1]]}


def test_few_rooms_of_the_trainer_are_tied_to_each_other() -> None:
    assert len(arrows("trainer")) <= MOST_ARROWS


def test_nobody_imports_the_guest() -> None:
    users = {
        path
        for package in (*OTHERS, "examples")
        for file in source_files(package)
        if not (path := str(file.relative_to(ROOT))).startswith(GUEST)
        for name in imported(ast.parse(file.read_text()))
        if f"{name.replace('.', '/')}/".startswith(f"rowcast/{GUEST}")
    }
    assert users == set()


def test_every_import_of_ours_goes_through_the_one_name() -> None:
    for package in (*OTHERS, "examples", "benchmarks", "tests"):
        for file in source_files(package):
            for name in imported(ast.parse(file.read_text())):
                assert name.partition(".")[0] not in OTHERS, (
                    f"{file.relative_to(ROOT)} imports {name}, not rowcast.{name}"
                )


def test_every_package_is_reached_through_a_link() -> None:
    assert {path.name for path in (ROOT / "rowcast").iterdir() if path.is_symlink()} == set(OTHERS)
    assert all((ROOT / "rowcast" / package).resolve() == ROOT / package for package in OTHERS)


def test_no_test_module_is_imported_by_another() -> None:
    for package in ("benchmarks", "examples", "tests"):
        for file in source_files(package):
            for name in imported(ast.parse(file.read_text())):
                assert not any(part.startswith("test_") for part in name.split(".")[:-1]), (
                    f"{file.relative_to(ROOT)} imports {name}: what suites share is in tests/support"
                )


@pytest.mark.parametrize("library", FILES)
def test_some_libraries_are_known_to_few_files(library: str) -> None:
    users = {
        str(file.relative_to(ROOT))
        for package in OTHERS
        for file in source_files(package)
        if library in {name.partition(".")[0] for name in imported(ast.parse(file.read_text()))}
    }
    assert users == set(FILES[library].split())


def test_cuda_is_touched_only_by_streams_and_rings() -> None:
    for package in OTHERS:
        for file in source_files(package):
            uses = [
                node
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.Attribute) and node.attr == "cuda"
            ]
            assert not uses or str(file.relative_to(ROOT)) in CUDA_FILES, f"{file.relative_to(ROOT)} uses torch.cuda"


def test_the_plain_loop_is_short_enough_to_be_read_as_the_promise_it_is() -> None:
    """Its table of stock optimizers may grow; what a step does may not. The rule that ends training has 12 lines."""
    tree = ast.parse((ROOT / "examples" / "plain_loop.py").read_text())
    nodes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    lines = {name: node.end_lineno - node.lineno + 1 for name, node in nodes.items() if name != "main"}  # type: ignore[operator]
    assert lines["PlainTable"] + lines["run_plain_loop"] <= 110
    assert sum(lines.values()) <= 145


def test_a_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for package in OTHERS:
        for file in source_files(package):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name.lstrip("_"), []).append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


VAGUE = ("own", "found")
MOST_VAGUE = 5  # bindings in a file


def bound(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_variables_have_the_fields_words() -> None:
    counts = {
        str(file.relative_to(ROOT)): sum(name in VAGUE for name in bound(ast.parse(file.read_text())))
        for package in OTHERS
        for file in source_files(package)
    }
    assert {file: count for file, count in counts.items() if count > MOST_VAGUE} == {}


RECIPES = {"CONTRIBUTING.md", "CHANGELOG.md"}  # name files that a reader writes, or that left


def test_every_file_that_a_page_or_a_sentence_names_exists() -> None:
    product = [path for room in OTHERS for path in (ROOT / room).rglob("*.py")]
    others = [path for room in ("rowcast", "tests", "benchmarks", "examples") for path in (ROOT / room).rglob("*.py")]
    files = [f"/{path.relative_to(ROOT)}" for path in [*product, *others]]
    named = {
        name: path.name
        for path in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), *product]
        if path.name not in RECIPES
        for name in re.findall(r"`([a-z_/]+\.py)`", path.read_text(encoding="utf-8"))
    }
    assert "trainer/step/sender.py" in named
    assert {name: page for name, page in named.items() if not any(file.endswith(f"/{name}") for file in files)} == {}
