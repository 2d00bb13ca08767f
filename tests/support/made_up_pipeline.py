"""A made-up pipeline: every step moves one piece, and each task takes a time that is easy to add up."""

from dataclasses import replace

from rowcast.analysis.estimate.pipeline import PlannedPiece, PlannedStep, Wiring

STEPS, DEPTH, HORIZON = 200, 4, 8
MIB = 2**20
SECONDS = {
    "decode": 2.0,
    "read": 1.0,
    "plan": 1.0,
    "fetch": 1.0,
    "send": 0.1,
    "copy in": 0.1,
    "fill": 0.1,
    "step": 3.0,
    "copy out": 0.1,
    "write back": 0.5,
    "barrier": 0.0,
    "write": 0.0,
    "rows sent": 0.05,
    "rows back": 0.05,
    "ring room": 0.05,
    "step done": 0.05,
    "rows filled": 0.0,
    "rows home": 0.0,
}
WIRING = Wiring(depth=DEPTH, num_decoders=1, decoded_ahead=8, measured=4, ring_bytes=64 * MIB, staging_bytes=16 * MIB)
PIECE = PlannedPiece(ring_bytes=MIB, row_bytes=MIB // 2, back_bytes=MIB // 2)


def plan(**changes: object) -> list[PlannedStep]:
    steps = [
        PlannedStep(
            step=step,
            known_through=min(step + HORIZON, STEPS - 1),
            after_step=None,
            fill_after=step - DEPTH if step >= DEPTH else None,
            pieces=(PIECE,),
            barrier=False,
        )
        for step in range(STEPS)
    ]
    return [replace(planned, **changes) for planned in steps]  # type: ignore[arg-type]
