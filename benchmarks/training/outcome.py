"""What one run of one contestant has to say: a line of JSON on its standard output."""

import sys

import msgspec

LOSSES = 100  # of the last steps, whose mean is compared


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    samples: int
    steps: int
    wall_s: float  # from the first step's begin to the last one's end, or to the last barrier
    loss: float  # mean of the last LOSSES steps
    cores: dict[str, float]  # processor seconds over wall seconds: by process, and by stage where it is known
    waited_share: float | None = None  # of the time, that the trainer waited for rows
    need: dict[str, float] = {}  # per second, at the speed measured: look-ups, rows and bytes each way
    device_bytes: int = 0
    phases: dict[str, float] = {}  # ms a step

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.wall_s


def tell(outcome: Outcome) -> None:
    sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")
