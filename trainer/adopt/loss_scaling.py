"""Refuses gradient scalers, because rows would be trained on scaled gradients.

Rows are updated in the backward pass, before the scaler divides its factor out. While a loader is open,
`torch.amp.GradScaler.scale` checks this first; otherwise the class is unchanged.
"""

from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler

SCALED = (
    "a GradScaler scales this loss, but rows are updated in its backward pass, before the scale is divided out again: "
    "use torch.autocast(..., dtype=torch.bfloat16), which needs no scaler, or GradScaler(enabled=False)"
)
_torch_scale = GradScaler.scale
_open: list["LossScaling"] = []


class LossScaling:
    def __init__(self, awaits_backward: Callable[[], bool]) -> None:
        """`awaits_backward`: whether a look-up that trains rows awaits its backward pass. Call `close` at the end."""
        self.awaits_backward = awaits_backward
        _open.append(self)
        GradScaler.scale = _checked_scale  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        if self in _open:
            _open.remove(self)
        if not _open:
            GradScaler.scale = _torch_scale  # type: ignore[method-assign]


def _checked_scale(scaler: GradScaler, outputs: Any) -> Any:
    """Raises RuntimeError before scaling."""
    if scaler.is_enabled() and any(scaling.awaits_backward() for scaling in _open):
        raise RuntimeError(SCALED)
    return _torch_scale(scaler, outputs)
