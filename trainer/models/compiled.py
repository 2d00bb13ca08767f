"""Compiles a model by torch.compile so that its bits are a function of the job: one graph, nothing timed.

A compiled model's bits differ from the plain model's, and each shape needs a separate graph. So only train batches of
`data.batch_size` samples run compiled; smaller batches and evaluation use the plain model (`job_model.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rowcast.runtime.errors import ConfigError

# otherwise torch times kernels that sum in different orders and chooses the fastest
OPTIONS: dict[str, Any] = {"deterministic": True}


def compile_model(model: nn.Module, device: torch.device) -> Callable[..., Tensor]:
    """Returns the model, compiled at its first call, with the same parameters under the same names.

    Raises ConfigError if this machine lacks what torch.compile needs."""
    torch.compiler.reset()  # graphs of an earlier attempt would count as variants of this model
    # beyond the limit a model would run uncompiled, with different bits than a restarted run
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
        sentence = " ".join(str(error).partition("\n\n")[0].split())[:200]  # without torch's advice
        raise ConfigError(
            f"model.compile: torch.compile does not work on {device} here ({type(error).__name__}: {sentence}); it "
            f"needs {needs}; install that or remove model.compile"
        ) from None
