"""Ends every command with an exit code and one sentence, without a traceback for errors that the user can correct."""

import errno
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress

from rowcast.runtime.errors import RowcastError, advice, printable
from rowcast.runtime.stops import release
from rowcast.runtime.telemetry.lasting_output import make_lasting, write_error_line
from rowcast.runtime.telemetry.logs import get_logger, setup_logging

INTERRUPTED = 130  # 128 + SIGINT, as in shells


def run_command(process: str, main: Callable[[], int | None]) -> int:
    """Runs `main` until a signal interrupts it. Returns the exit code of the process."""

    def interruptible() -> int | None:
        release()
        return main()

    return exit_code_of(process, interruptible)


def exit_code_of(process: str, main: Callable[[], int | None]) -> int:
    """Runs `main` and returns the exit code of the process: what `main` returned, or 0 for None.

    A RowcastError becomes one line on stderr and its exit code; an interrupt becomes 130. Any other exception is our
    bug: its traceback is logged and the code is 1. Logging works before `main` sets it up."""
    make_lasting("stderr")
    setup_logging(process)
    allow_open_files()
    try:
        code = main() or 0
    except RowcastError as error:
        code = error.exit_code
        say(process, str(error))
    except BrokenPipeError:  # as under `| head`
        code = 1
        say(process, "stdout was closed before everything was written")
    except KeyboardInterrupt:
        code = INTERRUPTED
        say(process, "interrupted")
    except Exception as error:  # noqa: BLE001 - logged with its traceback, and the process ends
        code = 1
        if not isinstance(error, OSError) or stdout_errno(after="\n") != error.errno:
            get_logger().exception("unexpected error")
            say(process, f"unexpected error: {type(error).__name__}: {error}")
    if unwritten := stdout_errno(after=""):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter exits with 120
        if unwritten not in (errno.EPIPE, errno.EIO):  # a reader that has ended (`| head`) changes no code
            code = code or 1
            say(process, f"stdout cannot be written ({os.strerror(unwritten)}); {advice(unwritten, 'redirect it')}")
    return code


def allow_open_files() -> None:
    """Raises the soft limit of open files, which is often 1,024, to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # the host does not allow it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def say(process: str, sentence: str) -> None:
    line = " ".join(sentence.splitlines())
    write_error_line(f"rowcast {process}: {printable(line)}")


def stdout_errno(*, after: str) -> int:
    """Writes `after` and flushes. Returns why stdout cannot be written, or 0. What failed may be in no buffer now."""
    try:
        sys.stdout.write(after)
        sys.stdout.flush()
    except OSError as error:
        return error.errno or errno.EIO
    return 0
