import io
import json
import re
import sys
import time
from datetime import UTC, datetime

import pytest

from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import get_logger, said_if_slow, setup_logging
from rowcast.trainer.run.launch import rank_in_log
from tests.support.facts import facts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


pytestmark = pytest.mark.usefixtures("own_logs")


def test_a_pipe_gets_key_value_lines_with_time_level_and_process(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("prefetcher")
    get_logger(stage="fetcher").info("ring is full", used_bytes=4096)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(
        r'time=\S+Z level=info process=prefetcher event="ring is full" stage=fetcher used_bytes=4096\n', err
    )


def test_json_lines_parse_and_their_time_is_utc(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("trainer", json=True)
    get_logger().warning("not pinned", ring="back")
    line = json.loads(capsys.readouterr().err)
    assert datetime.fromisoformat(line.pop("time")).tzinfo == UTC
    assert line == {"level": "warning", "process": "trainer", "event": "not pinned", "ring": "back"}


def test_a_terminal_gets_columns_unless_a_format_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    setup_logging("trainer")
    get_logger().info("connected")
    assert re.match(r"\S+Z \[info +\] connected +process=trainer\n", terminal.getvalue())
    setup_logging("trainer", json=False)
    get_logger().info("again")
    assert "event=again" in terminal.getvalue()


def test_events_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    logger = get_logger()
    setup_logging("trainer", "warning")
    logger.info("hidden")
    logger.warning("shown")
    setup_logging("trainer", "debug")
    logger.debug("now shown")
    err = capsys.readouterr().err
    assert "hidden" not in err
    assert "event=shown" in err
    assert 'event="now shown"' in err


def test_lines_go_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    setup_logging("trainer")
    logger = get_logger()
    monkeypatch.setattr(sys, "stderr", later := io.StringIO())
    logger.info("above the live line")
    assert "above the live line" in later.getvalue()


def test_one_of_several_processes_says_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("trainer", rank=3)
    get_logger().info("connected")
    assert "level=info process=trainer rank=3 event=connected\n" in capsys.readouterr().err
    assert rank_in_log({"RANK": "3", "WORLD_SIZE": "4"}) == 3
    assert rank_in_log({}) is rank_in_log({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert rank_in_log({"RANK": "first", "WORLD_SIZE": "4"}) is None, "which is refused later, with a sentence"


def test_an_unknown_level_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=facts("loud", "debug, info, warning, error")):
        setup_logging("trainer", "loud")


def test_only_what_takes_long_is_said_and_while_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("trainer")
    with said_if_slow(60.0, "compiling"):
        pass
    assert capsys.readouterr().err == ""
    said = ""
    with said_if_slow(0.01, "compiling"):
        deadline_s = time.monotonic() + 10
        while not said and time.monotonic() < deadline_s:
            time.sleep(0.01)
            said = capsys.readouterr().err
    assert "level=info process=trainer event=compiling" in said
