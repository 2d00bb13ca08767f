"""torch's dense optimizers without torch._dynamo, whose import takes as long as that of torch itself.

torch.optim imports it when the first optimizer is made and when it first steps, also if nothing is compiled: decorators
of these methods do. The methods below the decorators are torch's own, and so are bits, hooks and state dictionaries.
"""

from collections.abc import Callable
from functools import cache
from inspect import unwrap

import torch
from torch.optim import Optimizer

METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


@cache
def without_dynamo(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    """Returns a kind of torch.optim, under its name, whose methods import no torch._dynamo."""
    own = {name: unwrap(getattr(kind, name)) for name in METHODS}
    return type(kind.__name__, (kind,), {**own, "step": torch.no_grad()(unwrap(kind.step))})
