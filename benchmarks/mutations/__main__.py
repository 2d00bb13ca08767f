"""Would a test notice? A line of the product is broken on purpose, and the test named for it must fail: `make mutants`.

    python -m benchmarks.mutations [--only NAME] [--list] [--jobs 2] [--limit 120]
    python -m benchmarks.mutations --random 40 [--seed 1] --room ROOM     mutants by chance: `at_random.py`

The lines and their tests are in `mutants.py`. Only cases that `make test` runs count, and each mutant must have one.
The tree is copied to a temporary folder, where all the tests must pass before anything is broken. Then each mutant gets
a copy of its own, and a line here with its seconds:

    killed      the test failed
    timed out   the test was still running after the limit; this counts as killed
    SURVIVED    the test passed: nobody would notice
    BROKEN      pytest could not run the test, which has shown nothing

The exit code is 1 where any mutant survived or could not be tried.

numba keeps compiled loops in `__pycache__` and does not notice a change in a function that another file imports. So a
mutant of a file with compiled loops begins with none; every other one begins with those of the unbroken tree.
"""

import argparse
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired, check_output
from tempfile import TemporaryDirectory

from benchmarks.mutations.at_random import HAS_LOOPS, ROOMS, try_random
from benchmarks.mutations.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
NOT_PRODUCT = ("tests", "benchmarks", "examples", "docs")
TOKEN = re.compile(r"\w+|\S")
VERDICTS = {"passed": "SURVIVED", "failed": "killed"}
DEAD = {"killed", "timed out"}
MAKE_TEST = ("-m", "not rest")  # its selection
LISTED = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutations")
    parser.add_argument("--only", metavar="NAME", default="", help="the mutants whose name contains this")
    parser.add_argument("--list", action="store_true", help="say which mutants there are, and try none")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time; default 2")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a mutant's test may take; default 120")
    parser.add_argument("--random", type=int, metavar="N", default=0, help="try N random mutants of a room")
    parser.add_argument("--room", choices=ROOMS, help="which room")
    parser.add_argument("--seed", type=int, default=1, help="of the random choice; default 1")
    options = parser.parse_args()
    if options.random:
        if options.room is None:
            parser.error("--random needs --room")
        return try_random(options.room, options.random, options.seed, ROOT, copy_tree)
    chosen, stale = placed([mutant for mutant in MUTANTS if options.only in mutant.name])
    if stale:
        print(*stale, sep="\n")
        return 1
    if options.list or not chosen:
        print("\n".join(f"{mutant.name}\n    {place}\n    {mutant.test}" for mutant, place in chosen))
        return int(not chosen)
    began_s = time.perf_counter()
    with TemporaryDirectory(prefix="rowcast-mutants-") as folder:
        unbroken = Path(folder) / "unbroken"
        copy_tree(unbroken)
        tests = sorted({mutant.test for mutant, _ in chosen})
        if left_out := not_selected(unbroken, tests, options.limit):
            print("`make test` runs no case of these; tests/smoke.txt must name one of each:", *left_out, sep="\n")
            return 1
        outcome, said = run_tests(unbroken, [*tests, "-n", str(options.jobs)], options.limit * len(chosen))
        show(outcome, began_s, f"{len(tests)} tests of the unbroken tree")
        if outcome != "passed":
            print(said)
            return 1
        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = Counter(pool.map(lambda own: try_one(unbroken, own[0], own[1], options.limit), chosen))
    told = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    print(f"{len(chosen)} mutants: {told}; {time.perf_counter() - began_s:.0f} s")
    return int(not verdicts.keys() <= DEAD)


def not_selected(tree: Path, tests: Sequence[str], limit_s: float) -> list[str]:
    _, said = run_tests(tree, [*tests, "--collect-only"], limit_s)
    return [test for test in tests if not re.search(rf"^{re.escape(test)}(\[|/|::|$)", said, re.MULTILINE)]


def try_one(unbroken: Path, mutant: Mutant, place: Path, limit_s: float) -> str:
    """Breaks a copy of the tree and runs the mutant's test there; the verdict."""
    began_s = time.perf_counter()
    source = (unbroken / place).read_text()
    with TemporaryDirectory(dir=unbroken.parent) as folder:
        tree = Path(folder) / "tree"
        left_out = shutil.ignore_patterns("__pycache__") if HAS_LOOPS.search(source) else None
        shutil.copytree(unbroken, tree, symlinks=True, ignore=left_out)
        (tree / place).write_text(pattern_of(mutant).sub(lambda found: mutant.replace, source))
        outcome, said = run_tests(tree, [mutant.test, "-x"], limit_s)
    verdict = VERDICTS.get(outcome, outcome)
    show(verdict, began_s, mutant.name)
    if verdict == "BROKEN":
        print(said)
    return verdict


def show(verdict: str, began_s: float, what: str) -> None:
    print(f"{verdict:10} {time.perf_counter() - began_s:6.1f} s  {what}", flush=True)


def run_tests(tree: Path, arguments: Sequence[str], limit_s: float) -> tuple[str, str]:
    """How they end, and what pytest says. A crash of the interpreter is a failure."""
    variables = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    variables["PYTHONPATH"] = str(tree)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *MAKE_TEST, *arguments]
    # a session of its own, so that all that the tests have started can be killed
    with Popen(command, cwd=tree, env=variables, stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True) as run:
        try:
            said, _ = run.communicate(timeout=limit_s)
        except TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return "timed out", ""
    return "BROKEN" if run.returncode > 1 else "failed" if run.returncode else "passed", said


def known_files() -> list[Path]:
    """Files that git knows or would know, relative to the tree; links are links."""
    names = check_output(LISTED, cwd=ROOT, text=True).split("\0")[:-1]
    return [Path(name) for name in names if os.path.lexists(ROOT / name)]


def copy_tree(target: Path) -> None:
    for name in known_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def product() -> dict[Path, str]:
    """The words and signs of each file."""
    own = [path for path in known_files() if path.suffix == ".py" and path.parts[0] not in NOT_PRODUCT]
    return {path: spaced((ROOT / path).read_text()) for path in own if not (ROOT / path).is_symlink()}


def spaced(text: str) -> str:
    return f" {' '.join(TOKEN.findall(text))} "


def placed(mutants: Sequence[Mutant]) -> tuple[list[tuple[Mutant, Path]], list[str]]:
    """Mutants with the files that hold their texts. And a sentence for each other one: the product does not hold its
    text exactly once, or its test is gone."""
    sources, found, stale = product(), list[tuple[Mutant, Path]](), list[str]()
    for mutant in mutants:
        places = [path for path, source in sources.items() for _ in range(source.count(spaced(mutant.find)))]
        if len(places) != 1:
            where = ", ".join(map(str, places)) or "nowhere"
            stale.append(f"{mutant.name}: the product must hold its text once, but it is in {where}: {mutant.find}")
        elif not is_test(mutant.test):
            stale.append(f"{mutant.name}: there is no test {mutant.test}")
        else:
            found.append((mutant, places[0]))
    return found, stale


def is_test(name: str) -> bool:
    """Whether it is defined; a case is known only to pytest."""
    file, _, function = name.partition("[")[0].partition("::")
    defined = rf"^def {function}\(" if function else ""
    return (ROOT / file).is_file() and re.search(defined, (ROOT / file).read_text(), re.MULTILINE) is not None


def pattern_of(mutant: Mutant) -> re.Pattern[str]:
    """The text with any whitespace between its words and signs, so that a formatter may break its line elsewhere."""
    tokens = TOKEN.findall(mutant.find)
    return re.compile(r"\s*".join(rf"\b{token}\b" if re.match(r"\w", token) else re.escape(token) for token in tokens))


if __name__ == "__main__":
    sys.exit(main())
