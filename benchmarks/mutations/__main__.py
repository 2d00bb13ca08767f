"""Would a test notice? One line of the product is broken on purpose, and the tests named for it must fail: `make mutants`.

    python -m benchmarks.mutations [--only NAME] [--list] [--jobs 2]

The lines and their tests are in `mutants.py`. The tree is copied to a temporary folder; all the tests must pass there before anything
is broken. Then each mutant gets a copy of its own. One line for each: what became of it, its seconds, its name:

    killed      a test failed
    timed out   the tests were still running after LIMIT_S; this counts as killed
    SURVIVED    every test passed: nobody would notice
    BROKEN      pytest could not run the tests, so they have shown nothing

Ends with 1 where any mutant survived or could not be tried.

numba keeps what it compiled in `__pycache__` and does not notice a change in a function that another file imports. So a mutant of a file
with compiled loops begins without any of it, and every other mutant begins with what the unbroken tree has compiled.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.mutations.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
NOT_PRODUCT = ("tests", "benchmarks", "examples", "docs")
LIMIT_S = 120.0
COMPILED = re.compile(r"^@\w*(?:compiled|jit)", re.MULTILINE)
TOKEN = re.compile(r"\w+|\S")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutations")
    parser.add_argument("--only", metavar="NAME", help="the mutants whose name contains this")
    parser.add_argument("--list", action="store_true", help="say which there are, and try none")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time; default 2")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if (options.only or "") in mutant.name]
    places = [place_of(mutant) for mutant in chosen]  # refuses before anything runs
    if options.list or not chosen:
        print("\n".join(f"{mutant.name}: {mutant.tests}" for mutant in chosen) or "no mutant has such a name")
        return int(not chosen)
    began_s = time.perf_counter()
    with TemporaryDirectory(prefix="rowcast-mutants-") as folder:
        unbroken = Path(folder) / "unbroken"
        copy_tree(unbroken)
        tests = sorted({test for mutant in chosen for test in mutant.tests.split()})
        verdict = outcome(unbroken, [*tests, "-n", str(options.jobs)], limit_s=LIMIT_S * len(chosen))
        print(f"{'unbroken':10} {time.perf_counter() - began_s:6.1f} s  {len(tests)} tests: {verdict}", flush=True)
        if verdict != "SURVIVED":
            return 1
        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = list(pool.map(lambda own: try_mutant(*own, unbroken), zip(chosen, places, strict=True)))
    bad = [verdict for verdict in verdicts if verdict.isupper()]
    print(f"{len(verdicts) - len(bad)} of {len(verdicts)} mutants dead after {time.perf_counter() - began_s:.0f} s")
    return int(bool(bad))


def try_mutant(mutant: Mutant, place: Path, unbroken: Path) -> str:
    """Breaks a copy of the tree and runs the mutant's tests in it."""
    began_s = time.perf_counter()
    source = (unbroken / place).read_text()
    without = shutil.ignore_patterns("__pycache__") if COMPILED.search(source) else None
    with TemporaryDirectory(dir=unbroken.parent) as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(unbroken, tree, symlinks=True, ignore=without)
        (tree / place).write_text(pattern_of(mutant).sub(lambda found: mutant.replace, source))
        verdict = outcome(tree, ["-x", *mutant.tests.split()], LIMIT_S)
    print(f"{verdict:10} {time.perf_counter() - began_s:6.1f} s  {mutant.name}", flush=True)
    return verdict


def outcome(tree: Path, arguments: Sequence[str], limit_s: float) -> str:
    """What pytest makes of the tree; a crash of the interpreter is a failed test."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header", *arguments]
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "timed out"
    if process.returncode > 1:
        print(said)
        return "BROKEN"
    return "killed" if process.returncode else "SURVIVED"


def copy_tree(target: Path) -> None:
    for name in known_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def known_files() -> list[Path]:
    """Those that git knows or would know, relative to the tree; links are links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")[:-1]
    return [Path(name) for name in names if os.path.lexists(ROOT / name)]


def place_of(mutant: Mutant) -> Path:
    """The file that holds the mutant's text, relative to the tree. Ends the program where the text is not there exactly once."""
    places = [path for path, text in product().items() for _ in pattern_of(mutant).findall(text)]
    if len(places) != 1:
        where = ", ".join(map(str, places)) or "nowhere"
        sys.exit(f"mutant {mutant.name!r}: its text must stand in the product once and is found {where}: {mutant.find}")
    return places[0]


def product() -> dict[Path, str]:
    own = [path for path in known_files() if path.suffix == ".py" and path.parts[0] not in NOT_PRODUCT]
    return {path: (ROOT / path).read_text() for path in own if not (ROOT / path).is_symlink()}


def pattern_of(mutant: Mutant) -> re.Pattern[str]:
    """The text with any whitespace between its words and signs, so that a formatter may break its line elsewhere."""
    tokens = TOKEN.findall(mutant.find)
    return re.compile(r"\s*".join(rf"\b{token}\b" if re.match(r"\w", token) else re.escape(token) for token in tokens))


if __name__ == "__main__":
    sys.exit(main())
