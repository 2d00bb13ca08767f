"""Compiles loops with numba on first use, caches them on disk if possible, and runs them without the GIL.

Keeps compiled loops on disk, as numba does; of processes that start together, one compiles a loop.

The others wait until it is in the cache. A lock is a byte of a file, for each loop another, and ends with its process:

    <cache folder>/rowcast.loops     a line for what `rowcast prepare` has compiled these loops for; also the lock file

numba's files are pickles, and loading one can run any code. So only files that no other user could write are loaded.
"""

import fcntl
import os
import platform
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from rowcast.runtime.disk import opened_safely
from rowcast.runtime.errors import ConfigError

WAIT_S, POLL_S = 120.0, 0.05  # a loop takes some seconds; a holder that is stopped keeps the others no longer
SHOWN = 200  # characters of a signature
NOTES_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


TOLD = "ROWCAST_TOLD_OF_LOOPS"  # in the environment, so that a child does not log it again


class SafeFiles(IndexDataCacheFile):  # type: ignore[misc]
    _index_path: str

    def _load_index(self) -> Any:
        named = self._index_path
        try:
            with opened_safely(named) as self._index_path:
                return super()._load_index()
        except FileNotFoundError:
            return {}
        except OSError as error:
            if TOLD not in os.environ:
                os.environ[TOLD] = "1"
                sys.stderr.write(
                    f"rowcast: compiled loops are not loaded, but compiled: {error.filename}: {error.strerror}\n"
                )  # a reader of versions has no structlog
            return {}
        finally:
            self._index_path = named

    def _load_data(self, name: str) -> Any:
        with opened_safely(self._data_path(name)) as path:
            return super()._load_data(path)

    @contextmanager
    def _open_for_write(self, path: str) -> Iterator[Any]:
        with super()._open_for_write(path) as file:
            os.fchmod(file.fileno(), 0o600)
            yield file


class LoopCache(FunctionCache):  # type: ignore[misc]
    """numba calls both under its lock: first `load_overload`, and `save_overload` once it has compiled."""

    say: Callable[..., None] | None = None  # called for the first loop that should have been prepared
    lost: OSError | None = None  # why a loop could not be kept

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = SafeFiles(self._cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        whole = self._whole(sig, target_context)
        if whole is not None:
            return whole
        until = time.monotonic() + WAIT_S
        while not self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB) and time.monotonic() < until:
            time.sleep(POLL_S)
            if (whole := self._whole(sig, target_context)) is not None:
                return whole
        whole = self._whole(sig, target_context)  # another process may have compiled it in between
        if whole is not None:
            self._locked(fcntl.LOCK_UN)
        else:
            self._explain(sig)
        return whole

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            LoopCache.lost = error
        finally:
            self._locked(fcntl.LOCK_UN)

    def _whole(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # noqa: BLE001 - pickle raises errors of many types where a file is damaged
            self.flush()
            return None

    def _locked(self, operation: int) -> bool:
        """Returns whether nobody else has the loop's lock, or nobody can have one here."""
        try:
            file = notes(self.cache_path)
        except OSError:  # that of another user, or a link
            return True
        try:
            fcntl.lockf(file, operation, 1, zlib.crc32(self._impl.filename_base.encode()))
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a file system without locks
            return True
        return True

    def _explain(self, sig: Any) -> None:
        prepared = prepared_for(self.cache_path)
        if LoopCache.say is None or not prepared:
            return
        cause = "its code or its types are not those of then" if here() in prepared else f"this is {here()}"
        LoopCache.say(
            "a loop is compiled, although they were prepared",
            loop=f"{self._py_func.__module__}.{self._py_func.__name__}",
            signature=", ".join(map(str, sig))[:SHOWN],
            prepared="; ".join(prepared),
            cause=cause,
        )
        LoopCache.say = None


@cache
def notes(folder: str) -> int:
    """Returns a descriptor that stays open: closing one would end all locks of this process. Raises OSError."""
    return os.open(os.path.join(folder, "rowcast.loops"), NOTES_FLAGS, 0o600)


def prepared_for(folder: str) -> list[str]:
    try:
        return os.pread(notes(folder), 2**16, 0).decode(errors="replace").splitlines()
    except OSError:
        return []


def note_prepared(folder: str) -> None:
    """Raises OSError."""
    if here() not in prepared_for(folder):
        os.write(notes(folder), f"{here()}\n".encode())


@cache
def here() -> str:
    """Names what a compiled loop depends on, besides its source."""
    _, processor, features = cpu_target.target_context.codegen().magic_tuple()
    kind = f"{processor} {zlib.crc32(features.encode()):08x}"
    return f"numba {numba.__version__}, processor {kind}"


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
