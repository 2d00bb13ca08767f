"""Random mutants of a room: what share of them do the tests of that room kill? `--random 40 --seed 1 --room readers`.

A mutant changes one place inside a function: a comparison, `and` and `or`, a whole number by one, a `not`, a call whose
result nobody uses, or a `raise`. Seed and product decide which ones, so the shares before and after a change of tests
compare. Files with compiled loops have none, because each would compile for minutes. A mutant meets the tests that call
its function in their process, the quickest first; if there is none, nobody has looked. It has survived, too, if the
limit runs out. Tests that `make test` leaves out are left out here.

Each mutant is tried in a fork of this process, which has imported other packages but nothing of rowcast.
"""

import ast
import importlib
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple

import msgspec
import pytest

ROOMS = {  # name -> its tests, its product code
    "readers": ("tests/readers", "prefetcher/readers"),
    "stores": ("tests/stores", "prefetcher/stores"),
    "planner": ("tests/planner", "prefetcher/planner"),
    "protocol": ("tests/protocol tests/hostile", "protocol"),
    "serving": ("tests/serving", "serving"),
    "analysis": ("tests/analysis", "analysis/advise", "analysis/check", "analysis/new", "analysis/scan.py",
                 "analysis/simulate", "analysis/timeline.py"),
    "hostile": ("tests/hostile", "trainer/step/plan_check.py"),
    "simulation": ("tests/simulation", "protocol/session.py", "protocol/order.py", "prefetcher/pipeline"),
}  # fmt: skip
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
PACKAGES = ("torch", "numba", "pandas", "pyarrow.parquet", "structlog", "zmq")
SECONDS_A_TEST = 60
LIMIT_OF_ONE_S = 180.0
HAS_LOOPS = re.compile(r"^@\w*(?:compiled|jit|intrinsic)", re.MULTILINE)
LIMIT_S = 900.0  # for a room's tests on the unbroken product


class Change(NamedTuple):
    path: str
    line: int  # where it begins
    function: int  # first line of the innermost function around it
    old: str
    new: str
    text: str  # the whole file, with the change


@dataclass(slots=True, eq=False)  # pytest keeps plugins in sets
class Calls:
    """Plugin: notes which functions below `root` each test calls, by file and first line, and how long it takes. What a
    fixture of several tests calls, every test of its file calls."""

    root: str
    places: tuple[str, ...]
    called: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began_s = time.perf_counter()
        with self._noting(item.nodeid):
            yield
        self.seconds[item.nodeid] = time.perf_counter() - began_s

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        if request.scope == "function":
            return (yield)
        with self._noting(request.node.nodeid.partition("::")[0], request._pyfuncitem.nodeid):
            return (yield)

    @contextmanager
    def _noting(self, name: str, around: str = "") -> Iterator[None]:
        sets = [self.called.setdefault(one, set()) for one in (name, around) if one]

        def note(frame: FrameType, event: str, _: Any) -> None:
            file = frame.f_code.co_filename
            if file.startswith(self.root):
                short = file[len(self.root) :].removeprefix("rowcast/")
                if short.startswith(self.places):
                    for one in sets:
                        one.add((short, frame.f_code.co_firstlineno))

        before = sys.gettrace()
        sys.settrace(note)
        threading.settrace(note)
        try:
            yield
        finally:
            sys.settrace(before)


@dataclass(slots=True, eq=False)  # pytest keeps plugins in sets
class Callers:
    """Plugin: only these tests, the quickest first. Notes the test that fails."""

    names: set[str]
    seconds: dict[str, float]
    failed: str = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if self.names & {item.nodeid, item.nodeid.partition("::")[0]}),
            key=lambda item: self.seconds.get(item.nodeid, 0),
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid


def try_random(room: str, count: int, seed: int, root: Path, copy_tree: Callable[[Path], None]) -> int:
    """Prints a line for each mutant, and the share that was killed. The exit code is 1 if the tests fail unbroken."""
    tests, *places = ROOMS[room]
    for name in PACKAGES:
        importlib.import_module(name)
    with TemporaryDirectory(prefix="rowcast-random-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        for cache in [*root.glob("*/**/__pycache__")]:  # compiled loops, which take minutes
            for kept in cache.glob("*.nb[ic]"):
                target = tree / cache.relative_to(root)
                target.mkdir(exist_ok=True, parents=True)
                shutil.copy2(kept, target)
        calls = Calls(f"{tree}/", tuple(places))
        began_s = time.perf_counter()
        said = in_fork(tree, Path(folder), lambda: [run(tests.split(), calls), *told_calls(calls)], LIMIT_S)
        if not said or said[0]:
            print((Path(folder) / "said").read_text())
            return 1
        calls.called = {name: {(file, line) for file, line in called} for name, called in said[1].items()}
        calls.seconds = said[2]
        print(f"{len(calls.seconds)} tests of {tests}, {time.perf_counter() - began_s:.0f} s", flush=True)
        callers = defaultdict[tuple[str, int], set[str]](set)
        for name, called in calls.called.items():
            for place in called:
                callers[place].add(name)
        pool = [change for path in files(tree, places) for change in changes(tree, path)]
        chosen = random.Random(seed).sample(pool, min(count, len(pool)))
        verdicts = Counter(
            try_change(change, tree, Callers(callers[change.path, change.function], calls.seconds)) for change in chosen
        )
    told = f"{verdicts['killed']} of {len(chosen)} killed, {verdicts['NOT CALLED']} not called"
    print(f"{room}: {told}; {len(pool)} are possible; {time.perf_counter() - began_s:.0f} s")
    return 0


def told_calls(calls: Calls) -> list[Any]:
    return [{name: sorted(called) for name, called in calls.called.items()}, calls.seconds]


def try_change(change: Change, unbroken: Path, callers: Callers) -> str:
    began_s = time.perf_counter()
    what = f"{change.path}:{change.line}: {change.old} => {change.new}"
    if not callers.names:
        print(f"NOT CALLED       {what}", flush=True)
        return "NOT CALLED"
    with TemporaryDirectory(dir=unbroken.parent) as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(unbroken, tree, symlinks=True)
        (tree / change.path).write_text(change.text)
        tests = sorted({name.partition("::")[0] for name in callers.names})
        said = in_fork(tree, Path(folder), lambda: [run([*tests, "-x"], callers), callers.failed], LIMIT_OF_ONE_S)
    verdict = "killed" if said and said[0] else "SURVIVED" if said else "SURVIVED (limit)"
    seconds, by = time.perf_counter() - began_s, said[1] if said else ""
    print(f"{verdict:9} {seconds:4.0f} s  {what}   {by}", flush=True)
    return verdict


def run(arguments: list[str], plugin: Calls | Callers) -> int:
    options = [
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "-m",
        "not rest",
        "--tb=short",
        f"--timeout={SECONDS_A_TEST}",
        "--basetemp=../pytest",
    ]
    return int(pytest.main([*options, *arguments], plugins=[plugin]))


def in_fork(tree: Path, folder: Path, work: Callable[[], list[Any]], limit_s: float) -> list[Any] | None:
    """What the work returns in a child that imports rowcast from the tree. None: it was killed after the limit. A child
    that dies has failed."""
    answer = folder / "answer"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            os.chdir(tree)
            sys.path.insert(0, str(tree))
            os.environ["PYTHONPATH"] = str(tree)
            sys.dont_write_bytecode = True
            answer.write_bytes(msgspec.json.encode(work()))
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end_s, ended = time.monotonic() + limit_s, 0
    while not ended and time.monotonic() < end_s:
        ended, _ = os.waitpid(child, os.WNOHANG)
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and what its tests have started
    if not ended:
        os.waitpid(child, 0)
        return None
    return list(msgspec.json.decode(answer.read_bytes())) if answer.exists() else [1, "the process"]


def files(tree: Path, places: list[str]) -> list[str]:
    paths = [tree / place for place in places]
    every = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return sorted(str(file.relative_to(tree)) for file in every if not HAS_LOOPS.search(file.read_text()))


def changes(tree: Path, path: str) -> Iterator[Change]:
    text = (tree / path).read_text()
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for function, node in inside(ast.parse(text), 0):
        new = mutant_of(node)
        if function and new:
            begin = lines[node.lineno - 1] + node.col_offset
            end = lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            content = text.encode()
            old = " ".join(content[begin:end].decode().split())[:70]
            broken = (content[:begin] + new.encode() + content[end:]).decode()
            yield Change(path, node.lineno, function, old, new[:70], broken)


def inside(node: ast.AST, function: int) -> Iterator[tuple[int, ast.expr | ast.stmt]]:
    """All below it, each with the first line of the function that it is in. Formatted strings are left as they are."""
    for child in ast.iter_child_nodes(node):
        own = function
        if isinstance(child, ast.FunctionDef):
            own = min([child.lineno, *(one.lineno for one in child.decorator_list)])
        if isinstance(child, ast.expr | ast.stmt) and not isinstance(child, ast.JoinedStr):
            yield own, child
        if not isinstance(child, ast.JoinedStr | ast.arguments) and child not in getattr(node, "decorator_list", []):
            yield from inside(child, own)


def mutant_of(node: ast.expr | ast.stmt) -> str:
    match node:
        case ast.Compare(ops=[only]) if type(only) in FLIPPED:
            changed: ast.AST = ast.Compare(node.left, [FLIPPED[type(only)]()], node.comparators)
        case ast.BoolOp():
            changed = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            changed = node.operand
        case ast.Constant(value=int() as value) if type(value) is int and value < 100:
            return str(value + 1)
        case ast.Expr(value=ast.Call()) | ast.Raise():
            return "pass"
        case _:
            return ""
    return f"({ast.unparse(changed)})"
