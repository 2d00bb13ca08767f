"""The number of torch's threads is the run's, on any machine; what else may change bits is named."""

from typing import Any

import pytest
import torch

from rowcast.protocol.messages import Mode
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import UNRECORDED, Machine, threads_of_run
from rowcast.trainer.kernels import torch_ops
from rowcast.trainer.run.machine import (
    facts_of,
    refuse_fewer_threads,
    settle,
    warn_of_overridden,
)
from tests.support import jobs
from tests.support.facts import facts

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def same_threads() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("setting", "ranks", "cores", "threads"),
    [
        ("auto", {}, 8, 8),
        ("auto", {"parts": 4}, 8, 1),
        ("auto", {"parts": 4, "count": 2}, 4, 1),
        ("auto", {"count": 2}, 1, 1),
        (3, {}, 8, 3),
        (3, {"parts": 4, "count": 4}, 2, 3),
    ],
)
def test_a_first_start_depends_on_the_host_only_without_parts(
    setting: int | str, ranks: dict[str, int], cores: int, threads: int
) -> None:
    assert jobs.job(trainer={"threads": setting}, ranks=ranks).first_threads(cores) == threads


@pytest.mark.parametrize(
    ("setting", "first", "recorded", "mode", "threads"),
    [
        ("auto", 2, 0, "train", 2),
        ("auto", 2, 5, "train", 5),
        ("auto", 5, 2, "eval", 2),
        (3, 3, 0, "train", 3),
        (3, 3, 3, "train", 3),
        (3, 3, 5, "eval", 3),
        (3, 3, 5, "train", None),
    ],
)
def test_a_restart_has_the_recorded_number_or_is_refused(
    setting: int | str, first: int, recorded: int, mode: Mode, threads: int | None
) -> None:
    if threads is None:
        with pytest.raises(ConfigError, match=facts("trainer.threads", setting, recorded, "--fresh")):
            threads_of_run(setting, first, recorded, trains=mode == "train")
    else:
        assert threads_of_run(setting, first, recorded, trains=mode == "train") == threads


RECORDED = (("torch", "1.0"), ("vectors", "AVX2"))


@pytest.mark.parametrize(
    ("parts", "mode", "setting", "recorded", "threads", "said"),
    [
        (1, "train", "auto", UNRECORDED, 4, []),
        (1, "train", "auto", Machine(threads=2), 2, ["its 2 threads; a new run would have 4"]),
        (4, "train", "auto", UNRECORDED, 1, ["1 of 4 cores"]),
        (4, "train", 2, UNRECORDED, 2, []),
        (4, "train", "auto", Machine(threads=2), 2, ["its 2 threads; a new run would have 1"]),
        (1, "eval", 3, Machine(threads=2), 3, ["trainer.threads = 3 evaluates, and the run trains with 2"]),
        (1, "train", "auto", Machine(threads=4, facts=RECORDED), 4, ["torch is 2.0, and was 1.0; vectors is AVX512"]),
    ],
)
def test_each_difference_is_said_in_one_line_with_both_values(
    parts: int, mode: Mode, setting: int | str, recorded: Machine, threads: int, said: list[str], capfd: Any
) -> None:
    job = jobs.job(ranks={"parts": parts}, trainer={"threads": setting})
    facts_here = (("torch", "2.0"), ("vectors", "AVX512")) if recorded.facts else ()
    own = Machine(threads=job.first_threads(4), facts=facts_here)
    assert settle(job, mode, own, 4, recorded) == Machine(threads=threads, facts=facts_here)
    assert torch.get_num_threads() == threads
    lines = "".join(capfd.readouterr()).splitlines()
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert words in line


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({}, None),
        ({"OMP_THREAD_LIMIT": "4", "OMP_DYNAMIC": "false"}, None),
        ({"OMP_THREAD_LIMIT": "3"}, ("OMP_THREAD_LIMIT", 3, 4)),
        ({"OMP_DYNAMIC": "TRUE"}, ("OMP_DYNAMIC",)),
    ],
)
def test_an_environment_that_gives_torch_other_threads_is_refused(
    environment: dict[str, str], refused: tuple[str | int, ...] | None
) -> None:
    if refused is None:
        refuse_fewer_threads(4, environment)
    else:
        with pytest.raises(ConfigError, match=facts(*refused)):
            refuse_fewer_threads(4, environment)


@pytest.mark.parametrize(
    ("trainers", "environment", "said"),
    [
        (1, {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}, 0),
        (1, {"OMP_NUM_THREADS": "1"}, 1),
        (2, {"OMP_NUM_THREADS": "1"}, 0),  # torchrun has set it
        (2, {"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "3"}, 2),
    ],
)
def test_a_variable_that_does_not_count_is_named(
    trainers: int, environment: dict[str, str], said: int, capfd: Any
) -> None:
    warn_of_overridden(2, trainers, environment)
    lines = "".join(capfd.readouterr()).splitlines()
    assert len(lines) == said
    assert all("trainer.threads" in line and any(name in line for name in environment) for line in lines)


def test_the_facts_name_what_chooses_code() -> None:
    found = dict(facts_of(CPU, torch_ops, {"MKL_CBWR": "AVX2", "HOME": "/"}))
    assert found["torch"] == torch.__version__
    assert found["vectors"] == torch.backends.cpu.get_cpu_capability()
    assert found["float32 products"] == "whole"
    assert found["MKL_CBWR"] == "AVX2"
    assert "HOME" not in found
