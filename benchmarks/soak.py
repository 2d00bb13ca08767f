"""Does it hold over many repeats? The suites that kill, damage, simulate and attack, with large counts: `make soak`.

    python -m benchmarks.soak [pytest options]

tests/long.txt names tests that no other target of make runs. Each test that calls `tests.support.repeats.count`
repeats as often as its second number says. Two suites run at a time, one per core. Prints one line per suite: its
counts as in pytest's summary, and its seconds. Exits with 1 if anything failed.
"""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

SUITES = (  # the longest first
    "tests/recovery",
    "tests -m long",
    "tests/simulation",
    "tests/hostile",
    "tests/system/test_exact.py",
    "tests/system/test_follow.py",  # follows, publishes and forgets under kills: benchmarks/follow.py
    "tests/system/test_two_processes.py",
    "tests/system/test_rank_processes.py",
    "tests/system/test_group_stops.py",
    "tests/adopt/test_script_engine.py",
    "tests/adopt/test_adopted_runs.py",
    "tests/adopt/test_optimizers.py",
    "tests/adopt/test_whole_parameter.py",
    "tests/checkpoints",
    "tests/serving",
    "tests/protocol/test_tcp.py",
    "tests/protocol/test_attackers.py",
    "tests/estimate/test_pipeline.py",
)
AT_A_TIME = 2
TEST_LIMIT_S = 3000  # per test: large counts take longer than pytest's usual limit
COUNTS = re.compile(r"^(?:=+ )?((?:\d+ \w+(?:, )?)+) in [\d.]+s", re.MULTILINE)


def main() -> int:
    began_s = time.perf_counter()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        results = list(pool.map(lambda suite: run(suite, sys.argv[1:]), SUITES))
    print(f"\n{'suite':34} {'seconds':>8}  result")
    for suite, seconds, counts, _ in results:
        print(f"{suite:34} {seconds:8.0f}  {counts}")
    print(f"{'from the first to the last':34} {time.perf_counter() - began_s:8.0f}")
    return max(code for *_, code in results)


def run(suite: str, options: list[str]) -> tuple[str, float, str, int]:
    """Returns the suite, its seconds, its counts, and 0 or 1."""
    began_s = time.perf_counter()
    limit = f"--timeout={TEST_LIMIT_S}"
    command = [sys.executable, "-m", "pytest", *suite.split(), "-v", limit, "--no-header", *options]
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "ROWCAST_SOAK": "1"}
    ) as process:
        assert process.stdout is not None, "a pipe"
        for line in process.stdout:
            print(f"{suite}: {line}", end="", flush=True)
            lines.append(line)
    found = COUNTS.findall("".join(lines[-3:]))
    return suite, time.perf_counter() - began_s, found[-1] if found else "no result", int(process.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
