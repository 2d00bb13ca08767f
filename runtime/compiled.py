"""The one place that knows numba: loops compiled on first use, cached on disk where that is possible, run without the GIL."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])

BYTE_POINTER, INT = ir.IntType(8).as_pointer(), ir.IntType(32)


def compiled(function: Function) -> Function:
    """Compiles `function` for the types it is first called with. A read-only install without a home compiles in memory."""
    return compile_with(function)


def compiled_loop(function: Function) -> Function:
    """As `compiled`, for loops that make no arrays: they are compiled without reference counts, which otherwise may cost more than
    the work that a loop does for a row (docs/experiments.md). Where numba has no such option, they are only slower.
    """
    try:
        return compile_with(function, _nrt=False)
    except KeyError:  # numba: unrecognized option
        return compile_with(function)


def compiled_arithmetic(function: Function) -> Function:
    """As `compiled_loop`, for loops over floats, in which a division by zero gives what the processor gives, as in torch.

    Every product and every sum is rounded by itself, in the order written: nothing is joined or reordered, as exact results need it.
    """
    try:
        return compile_with(function, error_model="numpy", _nrt=False)
    except KeyError:  # numba: unrecognized option
        return compile_with(function, error_model="numpy")


def compile_with(function: Function, **options: bool | str) -> Function:
    try:
        return cast(Function, numba.njit(nogil=True, cache=True, **options)(function))
    except RuntimeError:  # numba: no locator available for the cache
        return cast(Function, numba.njit(nogil=True, **options)(function))


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """In compiled loops: asks the processor for the cache line of array[index], without waiting for it. `array` has one dimension.

    A hint only: it changes no value, and an index beyond the end does no harm.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        view = context.make_array(kind)(context, builder, arguments[0])
        element = cgutils.get_item_pointer(context, builder, kind, view, [arguments[1]], wraparound=False)
        llvm_prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [BYTE_POINTER], ir.FunctionType(ir.VoidType(), [BYTE_POINTER, INT, INT, INT])
        )
        read, keep, data = INT(0), INT(3), INT(1)
        builder.call(llvm_prefetch, [builder.bitcast(element, BYTE_POINTER), read, keep, data])
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """In compiled loops: a * b + c of float32, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    float32 = numba.types.float32
    return float32(float32, float32, float32), generate
