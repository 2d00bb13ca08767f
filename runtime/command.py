"""Ends every command with an exit code and one sentence, without a traceback for errors that the user can correct."""

import os
import sys
from collections.abc import Callable

from rowcast.runtime.errors import RowcastError
from rowcast.runtime.telemetry.logs import get_logger, setup_logging, write_error_line

INTERRUPTED = 130  # 128 + SIGINT, as in shells


def run_command(process: str, main: Callable[[], int | None]) -> int:
    """Runs `main` and returns the exit code of the process: what `main` returned, or 0 for None.

    A RowcastError becomes one line on stderr and its own exit code; an interrupt becomes 130. Any other exception is
    our bug: its traceback is logged and the code is 1. Logging works before `main` has set it up.
    """
    setup_logging(process)
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
        get_logger().exception("unexpected error")
        say(process, f"unexpected error: {type(error).__name__}: {error}")
    flush_stdout()
    return code


def say(process: str, sentence: str) -> None:
    line = " ".join(sentence.splitlines())
    write_error_line(f"rowcast {process}: {line}")


def flush_stdout() -> None:
    """Flushes stdout; a reader that has ended (`| head`) must not turn the exit code into the interpreter's 120."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
