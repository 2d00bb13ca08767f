"""Builds a user's model: `model.kind = "package.module:factory"`."""

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError


def build_custom(job: Job, num_dense: int) -> nn.Module:
    """Calls `factory(job, num_dense, **job.model.options)` with torch's random state seeded by job.seed.

    Raises ConfigError."""
    factory = load_factory(job.model.kind)
    try:
        inspect.signature(factory).bind(job, num_dense, **job.model.options)
    except TypeError as error:
        raise ConfigError(
            f"model.kind = {job.model.kind!r}: the factory cannot be called with (job, num_dense, **model.options): "
            f"{error}"
        ) from None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(job.job.seed)
        model = factory(job, num_dense, **job.model.options)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.kind = {job.model.kind!r} returned {type(model).__name__}; the factory must return a "
            "torch.nn.Module"
        )
    return model


def load_factory(kind: str) -> Any:
    """Imports the callable that "package.module:factory" names. Raises ConfigError."""
    module_name, _, factory_name = kind.partition(":")
    if str(Path.cwd()) not in sys.path:  # as for readers, modules in the working folder are found
        sys.path.append(str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"model.kind = {kind!r}: cannot import {module_name} ({error}); put its folder on PYTHONPATH"
        ) from None
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise ConfigError(
            f"model.kind = {kind!r}: module {module_name} has no function {factory_name!r}; name one that returns a "
            "model"
        )
    return factory
