"""Compiles loops with numba on first use, caches them on disk if possible, and runs them without the GIL."""

import platform
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from rowcast.runtime.errors import ConfigError
from rowcast.runtime.loop_cache import LoopCache

if numba.config.DISABLE_JIT:
    raise ConfigError("NUMBA_DISABLE_JIT is set, but rowcast's loops run only compiled; unset it")

Function = TypeVar("Function", bound=Callable[..., Any])

LOOPS: list[Any] = []  # all loops of the imported modules
BYTE_POINTER, INT = ir.IntType(8).as_pointer(), ir.IntType(32)
LINE = ir.VectorType(ir.IntType(64), 8)  # of a processor's cache
ZEROS = ir.Constant(LINE, [LINE.element(0)] * 8)
STORES_PAST_CACHES = platform.machine() in ("x86_64", "AMD64")  # whether `store_line` and `end_stores` exist here

# Functions of the C library, for compiled loops. Arrays are passed by address: array.ctypes.data.
C_INT, OFFSET, SIZE = numba.types.int32, numba.types.int64, numba.types.uintp
# (descriptor, address, nbytes, offset) -> bytes read, or -1
c_pread = numba.types.ExternalFunction("pread", numba.types.intp(C_INT, SIZE, SIZE, OFFSET))
# (descriptor, offset, nbytes, advice) -> 0, or the error's number
c_posix_fadvise = numba.types.ExternalFunction("posix_fadvise", C_INT(C_INT, OFFSET, OFFSET, C_INT))
# (address, nbytes, advice) -> 0, or -1; whole pages of a mapped file
c_madvise = numba.types.ExternalFunction("madvise", C_INT(SIZE, SIZE, C_INT))
# (target's address, source's address, nbytes) -> the target's address
c_memcpy = numba.types.ExternalFunction("memcpy", SIZE(SIZE, SIZE, SIZE))
# (address, nbytes, address of a byte per page, with bit 0 set if it is in memory) -> 0, or -1; whole pages
c_mincore = numba.types.ExternalFunction("mincore", C_INT(SIZE, SIZE, SIZE))


def compiled(function: Function) -> Function:
    """Compiles `function` for the types it is first called with. Without a writable folder it compiles in memory."""
    return compile_with(function)


def compiled_loop(function: Function) -> Function:
    """Compiles a loop that allocates no arrays, without reference counts.

    Counting may cost more than the loop's work per row (docs/log/planner.md). numba without the option only runs it
    more slowly."""
    try:
        return compile_with(function, _nrt=False)
    except KeyError:  # numba: unrecognized option
        return compile_with(function)


def compiled_arithmetic(function: Function) -> Function:
    """Compiles a loop over floats like `compiled_loop`; a division by zero returns the processor's result, as in torch.

    Every product and every sum is rounded separately, in the written order: exact results allow no fusing or
    reordering."""
    try:
        # inlined: a call per row would copy each array's description, which takes as long as adding up a row
        return compile_with(function, error_model="numpy", _nrt=False, forceinline=True)
    except KeyError:  # numba: unrecognized option
        return compile_with(function, error_model="numpy")


def inlined(function: Function) -> Function:
    """Compiles a function that becomes part of the loops that call it, so that they can compute several at once."""
    return compile_with(function, inline="always")


def compiled_part(function: Function) -> Function:
    """Compiles what only compiled loops call, like `compiled_loop`: in half the time, because Python cannot call it."""
    loop = cast(Any, compiled_loop(function))
    loop.targetoptions["no_cpython_wrapper"] = True
    return cast(Function, SimpleNamespace(_numba_type_=loop._numba_type_))  # numba asks any object for its type


def compile_with(function: Function, **options: bool | str) -> Function:
    loop = numba.njit(nogil=True, no_cfunc_wrapper=True, **options)(function)
    with suppress(RuntimeError):  # numba: no locator available for the cache
        loop._cache = LoopCache(function)
    LOOPS.append(loop)
    return cast(Function, loop)


def arrays_of(dtype: Any) -> Any:
    kind = numba.types.Array(numba.from_dtype(np.dtype(dtype)), 1, "C")

    @intrinsic  # type: ignore[untyped-decorator]
    def array_at(typing_context: Any, address: Any, size: Any) -> Any:
        """In a compiled loop, the array of `size` elements at an address, whose memory the caller keeps."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            element = context.get_data_type(kind.dtype)
            array, nbytes = context.make_array(kind)(context, builder), context.get_abi_sizeof(element)
            pointer, step = (
                builder.inttoptr(arguments[0], element.as_pointer()),
                context.get_constant(numba.types.intp, nbytes),
            )
            populate_array(array, data=pointer, shape=[arguments[1]], strides=[step], itemsize=step, meminfo=None)
            return array._getvalue()

        return kind(numba.types.uint64, numba.types.intp), generate

    return array_at


def loading(kind: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing_context: Any, address: Any, offset: Any) -> Any:
        """In a compiled loop, the number of this type that begins `offset` bytes after an address."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = context.get_value_type(kind).as_pointer()
            return builder.load(builder.inttoptr(builder.add(*arguments), pointer))

        return kind(numba.types.uint64, numba.types.int64), generate

    return load


load_u8, load_u16, load_u32 = map(loading, (numba.types.uint8, numba.types.uint16, numba.types.uint32))
load_i64, load_f32 = map(loading, (numba.types.int64, numba.types.float32))


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_at(typing_context: Any, address: Any, offset: Any) -> Any:
    """In a compiled loop, `prefetch` of the line `offset` bytes after an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call_prefetch(builder, builder.inttoptr(builder.add(*arguments), BYTE_POINTER), 0)
        return context.get_dummy_value()

    return numba.types.void(numba.types.uint64, numba.types.int64), generate


def element_pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    view = context.make_array(kind)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, kind, view, [index], wraparound=False)


def call_prefetch(builder: Any, address: Any, access: int) -> None:
    llvm_prefetch = builder.module.declare_intrinsic(
        "llvm.prefetch", [BYTE_POINTER], ir.FunctionType(ir.VoidType(), [BYTE_POINTER, INT, INT, INT])
    )
    keep, data = INT(3), INT(1)
    builder.call(llvm_prefetch, [address, INT(access), keep, data])


def prefetching(access: int) -> Any:
    """`access`: 0 to read the line, 1 to write it."""

    @intrinsic  # type: ignore[untyped-decorator]
    def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
        """In a compiled loop, prefetches the cache line of array[index]; `array` is 1-D.

        It is only a hint: it changes no value, and an index beyond the end is harmless."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            element = element_pointer(context, builder, signature.args[0], *arguments)
            call_prefetch(builder, builder.bitcast(element, BYTE_POINTER), access)
            return context.get_dummy_value()

        return numba.types.void(array, numba.types.intp), generate

    return prefetch


prefetch, prefetch_to_write = prefetching(0), prefetching(1)


@intrinsic  # type: ignore[untyped-decorator]
def store_line(typing_context: Any, target: Any, at: Any, source: Any, first: Any, count: Any) -> Any:
    """In a compiled loop, stores source[first : first + count] in the line of target[at] past the caches, and zeros in
    the rest of its 8 words; both are u64 and 1-D. A `count` above 8 is 8.

    target[at] begins a cache line. Other threads may read it after `end_stores`. Only where STORES_PAST_CACHES."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        line = element_pointer(context, builder, kinds[0], arguments[0], arguments[1])
        words = element_pointer(context, builder, kinds[2], arguments[2], arguments[3])
        counts = builder.insert_element(ZEROS, arguments[4], INT(0))
        counts = builder.shuffle_vector(counts, ZEROS, ir.Constant(ir.VectorType(INT, 8), [INT(0)] * 8))
        chosen = builder.icmp_signed("<", ir.Constant(LINE, list(map(LINE.element, range(8)))), counts)
        kind = ir.FunctionType(LINE, [LINE.as_pointer(), INT, chosen.type, LINE])
        load = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.load.v8i64.p0")
        value = builder.call(load, [builder.bitcast(words, LINE.as_pointer()), INT(8), chosen, ZEROS])
        stored = builder.store(value, builder.bitcast(line, LINE.as_pointer()), align=64)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(INT, 1)]))
        return context.get_dummy_value()

    return numba.types.void(target, numba.types.intp, source, numba.types.intp, numba.types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def end_stores(typing_context: Any) -> Any:
    """In a compiled loop, makes the lines stored by `store_line` visible before anything stored later."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(
            builder.module.declare_intrinsic("llvm.x86.sse.sfence", (), ir.FunctionType(ir.VoidType(), [])), []
        )
        return context.get_dummy_value()

    return numba.types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """In a compiled loop, a * b + c in float32, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    float32 = numba.types.float32
    return float32(float32, float32, float32), generate
