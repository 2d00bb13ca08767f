"""The result of one run of one contestant: a line of JSON on its standard output."""

import sys

import msgspec

LOSSES = 100  # last steps whose mean loss is compared


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    samples: int
    steps: int
    wall_s: float  # from the start of the first step to the end of the last one, or to the last barrier
    loss: float  # mean of the last LOSSES steps
    cores: dict[str, float]  # processor seconds over wall seconds: by process, and by stage where known
    waited_share: float | None = None  # share of the time that the trainer waited for rows
    need: dict[str, float] = {}  # per second, at the measured speed: look-ups, rows and bytes each way
    device_bytes: int = 0
    phases: dict[str, float] = {}  # ms per step

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.wall_s


def tell(outcome: Outcome) -> None:
    sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")
