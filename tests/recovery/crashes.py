"""How each crash point is reached: what is armed at the first start of both processes, and at the start after it."""

import ast
from collections.abc import Mapping
from functools import cache

from rowcast.runtime.crash_points import CRASH_POINTS
from tests.recovery.restarted import Role
from tests.support.processes import ROOT

Armed = Mapping[Role, str]
PACKAGES: tuple[Role, Role] = ("prefetcher", "trainer")

TIMES = {  # it is passed so often until the process ends, so that a checkpoint lies behind; 1 where nothing is said
    "plan made": 26,
    "PlanReady not sent": 24,
    "PlanReady sent": 24,
    "rows not written": 16,
    "rows written": 16,
    "rows loaded": 3,
    "rows spilled": 10,
    "Flush sent": 3,
    "rows not collected": 3,
    "rows collected": 3,
    "dense piece taken": 3,
    "row file written": 4,
    "dense file synced": 3,
    "manifest not renamed": 3,
    "manifest renamed": 3,
    "manifest durable": 3,
    "step not begun": 24,
    "step computed": 24,
    "RowsBack not sent": 16,
    "RowsBack sent": 16,
    "loss not written": 10,
    "loss written": 10,
    "dense side not packed": 3,
    "Saved not sent": 3,
    "Saved sent": 3,
}
BEFORE: dict[str, Armed] = {  # passed only at a restart, which this one brings about
    "file restored": {"prefetcher": "manifest durable:3"},
    "layer restored": {"prefetcher": "manifest durable:3"},
    "model restored": {"trainer": "loss written:10"},
}
# passed only where the other one is lost
BESIDE: dict[str, Armed] = {"changed rows restored": {"trainer": "loss written:10"}}
NEEDS_REJOIN = set(BESIDE)
NEEDS_TIER = {"rows loaded", "rows spilled"}
OF_RANKS = {"shard not renamed", "shard file written", "shards agree", "manifest seen"}  # passed only by several ranks


@cache
def called(package: str) -> list[str]:
    """Names of the crash points in a package, as often as they are called there."""
    names = []
    for file in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "crash_point":
                [argument] = node.args
                assert isinstance(argument, ast.Constant), f"{file}: a crash point is named where it is called"
                assert isinstance(argument.value, str)
                names.append(argument.value)
    return names


def starts_of(name: str, role: Role) -> tuple[Armed, ...]:
    armed: Armed = {role: f"{name}:{TIMES.get(name, 1)}", **BESIDE.get(name, {})}
    return (BEFORE[name], armed) if name in BEFORE else (armed,)


OF_A_PUBLISHER = called("serving")
OF_ONE_PAIR = [name for name in CRASH_POINTS if name not in OF_RANKS.union(OF_A_PUBLISHER)]
CRASHES = {name: starts_of(name, role) for role in PACKAGES for name in CRASH_POINTS if name in called(role)}
