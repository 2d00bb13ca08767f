"""The one place that knows numba: loops compiled on first use, cached on disk where that is possible, run without the GIL."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compiles `function` for the types it is first called with. A read-only install without a home compiles in memory."""
    try:
        return cast(Function, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # numba: no locator available for the cache
        return cast(Function, numba.njit(nogil=True)(function))
