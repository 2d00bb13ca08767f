import os
import subprocess
import sys

import pytest

from rowcast.runtime.errors import ConfigError, DataError, Diverged, Mismatch, PeerLost, RowcastError
from rowcast.runtime.process import run_command

pytestmark = pytest.mark.usefixtures("own_logs")


def failing(error: BaseException) -> int:
    def main() -> None:
        raise error

    return run_command("prefetcher", main)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(ConfigError, 2), (PeerLost, 3), (DataError, 4), (Mismatch, 5), (Diverged, 1), (RowcastError, 1)],
)
def test_an_error_for_a_person_is_one_line_and_its_exit_code(
    kind: type[RowcastError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(kind("job.toml: seed\nis missing")) == code
    assert capsys.readouterr() == ("", "rowcast prefetcher: job.toml: seed is missing\n")


def test_success_is_zero_and_a_code_of_its_own_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("trainer", lambda: None) == 0
    assert run_command("trainer", lambda: 3) == 3
    assert capsys.readouterr().err == ""


def test_an_interrupt_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "rowcast prefetcher: interrupted\n"


def test_our_own_bugs_show_their_traceback_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(ZeroDivisionError("slots")) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "raise error" in err
    assert err.endswith("rowcast prefetcher: unexpected error: ZeroDivisionError: slots\n")


def without_a_reader(stream: str, main: str) -> subprocess.CompletedProcess[str]:
    script = (
        "import sys; from rowcast.runtime.process import run_command; "
        "from rowcast.runtime.telemetry.logs import get_logger; "
        f"sys.exit(run_command('trainer', lambda: {main}))"
    )
    read_end, write_end = os.pipe()
    os.close(read_end)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=write_end if stream == "stdout" else subprocess.PIPE,
        stderr=write_end if stream == "stderr" else subprocess.PIPE,
        env=environment,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write_end)
    return done


def test_a_reader_that_goes_after_the_work_does_not_change_the_exit_code() -> None:
    done = without_a_reader("stdout", "print('line')")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_goes_during_the_work_is_a_sentence() -> None:
    done = without_a_reader("stdout", "print('line', flush=True)")
    expected = "rowcast trainer: stdout was closed before everything was written\n"
    assert (done.returncode, done.stderr) == (1, expected)


@pytest.mark.parametrize("main", ["print('line')", "print('line', flush=True)", "print('line' * 10_000)"])
def test_a_full_stdout_is_a_sentence(main: str) -> None:
    script = f"import sys; from rowcast.runtime.process import run_command as run; sys.exit(run('p', lambda: {main}))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, env=environment, text=True, check=False
        )
    expected = "rowcast p: stdout cannot be written (No space left on device); free space there\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_work_goes_on_when_nobody_reads_the_log() -> None:
    done = without_a_reader("stderr", "get_logger().info('one') or get_logger().info('two') or print('the end')")
    assert (done.returncode, done.stdout) == (0, "the end\n")
