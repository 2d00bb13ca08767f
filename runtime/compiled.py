"""Compiles loops with numba on first use, caches them on disk if possible, and runs them without the GIL."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])

BYTE_POINTER, INT = ir.IntType(8).as_pointer(), ir.IntType(32)

# Functions of the C library, for compiled loops. They take an array's address: array.ctypes.data.
C_INT, OFFSET, SIZE = numba.types.int32, numba.types.int64, numba.types.uintp
# (descriptor, address, nbytes, offset) -> bytes read, or -1
c_pread = numba.types.ExternalFunction("pread", numba.types.intp(C_INT, SIZE, SIZE, OFFSET))
# (descriptor, offset, nbytes, advice) -> 0, or the error's number
c_posix_fadvise = numba.types.ExternalFunction("posix_fadvise", C_INT(C_INT, OFFSET, OFFSET, C_INT))
# (address, nbytes, advice) -> 0, or -1; whole pages of a mapped file
c_madvise = numba.types.ExternalFunction("madvise", C_INT(SIZE, SIZE, C_INT))
# (address, nbytes, address of a byte for each page, whose bit 0 says that it is in memory) -> 0, or -1; whole pages
c_mincore = numba.types.ExternalFunction("mincore", C_INT(SIZE, SIZE, SIZE))


def compiled(function: Function) -> Function:
    """Compiles `function` for the types it is first called with. Without a writable folder it compiles in memory."""
    return compile_with(function)


def compiled_loop(function: Function) -> Function:
    """Compiles a loop that makes no arrays, without reference counts.

    Counting may cost more than the loop's work for a row (docs/experiments.md). Without the option it is only slower.
    """
    try:
        return compile_with(function, _nrt=False)
    except KeyError:  # numba: unrecognized option
        return compile_with(function)


def compiled_arithmetic(function: Function) -> Function:
    """Compiles a loop over floats like `compiled_loop`; a division by zero gives the processor's result, as in torch.

    Every product and every sum is rounded separately, in the order written: exact results need that nothing is fused or
    reordered.
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
    """In a compiled loop, asks the processor for the cache line of array[index] without waiting; `array` is 1-D.

    It is only a hint: it changes no value, and an index beyond the end does no harm.
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
    """In a compiled loop, a * b + c in float32, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    float32 = numba.types.float32
    return float32(float32, float32, float32), generate
