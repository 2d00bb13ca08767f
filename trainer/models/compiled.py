"""torch.compile of a model, so that its bits are a function of the job: one graph for one batch size, and nothing timed on the device.

A compiled model has other bits than the model itself, and other shapes would have other graphs. So only train batches of
`data.batch_size` samples run compiled; shorter ones and evaluation run the model as it is (`side.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rowcast.runtime.errors import ConfigError

# kernels are otherwise tried out where the model runs, and the fastest of several that sum in different orders is taken
OPTIONS: dict[str, Any] = {"deterministic": True}


def compile_model(model: nn.Module, device: torch.device) -> Callable[..., Tensor]:
    """The model, compiled at its first call; it shares the model's parameters, which keep their names. Raises ConfigError where this
    machine lacks what torch.compile needs.
    """
    torch.compiler.reset()  # what an earlier incarnation of the run compiled counts as a variant of this model
    torch._dynamo.config.fail_on_recompile_limit_hit = (
        True  # behind it a model would run uncompiled: other bits than those of a run that was restarted
    )
    check_compiler(device)
    return torch.compile(model, dynamic=False, options=OPTIONS)


def check_compiler(device: torch.device) -> None:
    """Compiles one kernel, from nothing, to see."""
    kernel = torch.compile(torch.sigmoid, dynamic=False, options={**OPTIONS, "fx_graph_cache": False})
    try:
        kernel(torch.zeros(64, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        needs = (
            "a C++ compiler, such as g++, on the PATH"
            if device.type == "cpu"
            else "Triton and a C compiler, such as gcc, on the PATH"
        )
        sentence = " ".join(str(error).partition("\n\n")[0].split())[:200]  # without torch's own advice
        raise ConfigError(
            f"model.compile: torch.compile does not work on {device} here ({type(error).__name__}: {sentence}); it needs {needs}; "
            "install that or remove model.compile"
        ) from None
