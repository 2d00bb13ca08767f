"""A process that has imported both commands once and forks one for each start: the command runs the same code, without
the seconds that its imports take.

    test -> stdin    {"arguments": ["-m", "rowcast.trainer", "run"], "out": path, "err": path, "environment": {...}}
    test <- stdout   {"started": pid}   and, when it has ended,   {"ended": pid, "code": -9}

Tests that are about the start of a process start it themselves, and so do the kills at random times.
"""

import gc
import importlib
import json
import os
import runpy
import selectors
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import IO, Any, NoReturn

POLL_S = 0.01
# torch.optim imports the first one when it is first used, the page about a run the second
MODULES = (
    "torch._dynamo",
    "matplotlib.backends.backend_svg",
    "rowcast.prefetcher.run.attempt",
    "rowcast.prefetcher.run.script",
    "rowcast.trainer.run.attempt",
)
OWN_SESSION = "rowcast.prefetcher.run.script"  # begins a session itself


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nobody else may write there
    prepare()
    say(answers, started=os.getpid())
    for request in requests(answers):
        pid = os.fork()
        if pid == 0:
            answers.close()
            become(request)
        say(answers, started=pid)


def prepare() -> None:
    """Everything that takes long and begins no thread."""
    for module in MODULES:
        importlib.import_module(module)
    importlib.import_module("rowcast.prefetcher.run.warm_up").warm_up(is_divided=True)
    gc.freeze()


def requests(answers: IO[str]) -> Iterator[dict[str, Any]]:
    """Until the test closes its end; meanwhile says which processes have ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            report_ended(answers)
            if not selector.select(POLL_S):
                continue
            line = read_line()
            if not line:
                return
            yield json.loads(line)


def read_line() -> bytes:
    """Unbuffered, so that nothing is left for whoever is forked."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line


def report_ended(answers: IO[str]) -> None:
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            say(answers, ended=pid, code=os.waitstatus_to_exitcode(status))
    except ChildProcessError:
        return


def say(answers: IO[str], **content: int) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def become(request: dict[str, Any]) -> NoReturn:
    """The forked process becomes the command, and ends without the slow release of everything that was imported."""
    if request["arguments"][1] != OWN_SESSION:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    for path, descriptor in ((os.devnull, 0), (request["out"], 1), (request["err"], 2)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)

    from rowcast.runtime import crash_points as faults

    faults.ARMED = faults.Armed(os.environ.get(faults.VARIABLE, ""))
    sys.path.extend(request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    dash_m, module, *arguments = request["arguments"]
    assert dash_m == "-m", request["arguments"]
    sys.argv = [module, *arguments]
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as Python itself ends then
        traceback.print_exc()
        code = 1
    left = [
        thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()
    ]
    if left:  # Python would wait for them
        sys.stderr.write(f"threads are left: {left}\n")
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
