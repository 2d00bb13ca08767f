"""What decides bits beside job and data: the threads of torch, and facts of the machine. Checkpoints record both."""

import msgspec

from rowcast.runtime.errors import ConfigError

MAX_THREADS = 2**12


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    threads: int = 0  # of torch; 0: not recorded
    facts: tuple[tuple[str, str], ...] = ()  # names and values, such as ("torch", "2.13.0")

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads = {self.threads} must be from 0 to {MAX_THREADS}")


UNRECORDED = Machine()


def threads_of_run(setting: int | str, first: int, recorded: int, *, trains: bool) -> int:
    """`setting`: trainer.threads. `first`: of a first start. `recorded`: 0 if no checkpoint names a number. `trains`:
    False for an evaluation, which may have another number. Raises ConfigError."""
    if isinstance(setting, str) or not recorded:
        return recorded or first
    if trains and setting != recorded:
        raise ConfigError(
            f"trainer.threads = {setting}, but this run computes with trainer.threads = {recorded}, and another number "
            f"gives other bits; set trainer.threads = {recorded} or remove it, or begin a new run with --fresh"
        )
    return setting


def differences(was: Machine, now: Machine) -> list[str]:
    """Names the facts that differ, with both values."""
    before, after = dict(was.facts), dict(now.facts)
    return [
        f"{name} is {after.get(name, 'not set')}, and was {before.get(name, 'not set')}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]
