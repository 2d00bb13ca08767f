"""What a test uses, found out from what it calls: its code and its fixtures, and the functions and classes of `tests`
that these name. So a new test needs no mark for it.
"""

import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from inspect import unwrap
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

from tests.support import redis_server
from tests.support.redis_server import needs_redis

STARTERS = {
    *(subprocess.Popen, subprocess.run, subprocess.check_output, subprocess.check_call, subprocess.call),
    *(multiprocessing.get_context, multiprocessing.Process, os.fork),
}
EXTERNAL = {  # Prometheus, sandboxes, other languages' validators, a browser, a notebook's kernel, Triton's compiler
    "tests.deploy.test_monitoring.promtool",
    "tests.deploy.manifests.compose_fault",
    "tests.deploy.manifests.kubernetes_verdicts",
    "tests.system.test_run_report.browser",
    "tests.test_tutorial.executed",
    "tests.kernels.test_triton_compiled.compiled",
    "tests.kernels.test_triton_compiled.launches",
    "tests.kernels.test_triton_fallback.variants",
    "tests.system.test_dense_settings.test_a_compiled_model_has_the_bits_of_the_plain_loop_with_a_compiled_model",
}
RANKED = "tests.support.ranked_run.RankedRun"


def uses(test: pytest.Function) -> set[str]:
    """The markers `processes`, `external` and `ranks`, those that apply."""
    fixtures = test._fixtureinfo.name2fixturedefs
    own = [test.function, *(fixtures[name][-1].func for name in test.fixturenames if name in fixtures)]
    called = reached(own)
    names = {f"{one.__module__}.{one.__qualname__}" for one in called if isinstance(one, FunctionType | type)}
    applies = {
        "processes": called & STARTERS,
        "external": names & EXTERNAL or needs_redis.mark in test.iter_markers(),
        "ranks": RANKED in names,
    }
    return {name for name, found in applies.items() if found}


def reached(functions: Iterable[Callable[..., Any]]) -> set[object]:
    """Those functions, and all functions and classes that they name, directly or through each other."""
    found: set[object] = set()
    coming = list(functions)
    while coming:
        one = unwrap(coming.pop())
        if isinstance(one, FunctionType | MethodType | type) and one not in found:
            found.add(one)
            coming += named_by(one)
    return found


@cache
def named_by(one: Callable[..., Any]) -> list[Callable[..., Any]]:
    """In its code and as defaults. Stops at other packages, and at `redis_server`: the suites of all stores name it."""
    if not one.__module__.startswith(("tests.", "benchmarks.")) or one.__module__ == redis_server.__name__:
        return []
    if isinstance(one, type):
        members = [getattr(member, "__func__", getattr(member, "fget", member)) for member in vars(one).values()]
        return [*filter(callable, members), *one.__bases__]
    names = {name for code in codes(one.__code__) for name in code.co_names}
    values = [one.__globals__[name] for name in names & one.__globals__.keys()]
    modules = [vars(value) for value in values if isinstance(value, ModuleType)]
    values += [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
    return list(filter(callable, values + [module[name] for module in modules for name in names & module.keys()]))


def codes(code: CodeType) -> Iterator[CodeType]:
    """With those of the functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)
