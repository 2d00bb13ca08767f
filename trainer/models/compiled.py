"""Compiles a model by torch.compile so that its bits are a function of the job: one graph, nothing timed.

A compiled model has other bits than the plain model, and other shapes would have other graphs. So only train batches
of `data.batch_size` samples run compiled; smaller batches and evaluation use the plain model (`job_model.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rowcast.runtime.errors import ConfigError

# otherwise kernels that sum in different orders are timed on the device, and the fastest is chosen
OPTIONS: dict[str, Any] = {"deterministic": True}


def compile_model(model: nn.Module, device: torch.device) -> Callable[..., Tensor]:
    """The model, compiled at its first call; it shares the model's parameters, which keep their names.

    Raises ConfigError if this machine lacks what torch.compile needs.
    """
    torch.compiler.reset()  # graphs of an earlier attempt would count as variants of this model
    # beyond the limit a model would run uncompiled, with other bits than a restarted run
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    check_compiler(device)
    return torch.compile(model, dynamic=False, options=OPTIONS)


def check_compiler(device: torch.device) -> None:
    """Compiles one kernel without the cache. Raises ConfigError if that fails."""
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
            f"model.compile: torch.compile does not work on {device} here ({type(error).__name__}: {sentence}); it "
            f"needs {needs}; install that or remove model.compile"
        ) from None
