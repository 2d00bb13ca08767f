"""Compiled loops and kernels of other users are not loaded: watched by what runs, not by what our source says."""

import grp
import importlib.util
import os
import pickle
import pwd
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from rowcast.runtime import compiled
from rowcast.runtime.disk import is_private, unsafe_below, use_safe_caches

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
LOOP = """
from rowcast.runtime.compiled import compiled_loop

@compiled_loop
def total(values):
    total = 0
    for value in values:
        total += value
    return total
"""


class Evil:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


class Cached:
    """A loop that was compiled into a cache folder, and what another process would load of it."""

    def __init__(self, folder: Path) -> None:
        self.marker, self._module = folder / "ran", folder / "kept_loop.py"
        self._module.write_text(LOOP)
        assert self.total().stats.cache_misses
        [self.index] = folder.rglob("*.nbi")
        [self.data] = folder.rglob("*.nbc")

    def total(self) -> Any:
        spec = importlib.util.spec_from_file_location("kept_loop", self._module)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["kept_loop"] = module
        spec.loader.exec_module(module)
        assert module.total(np.arange(5)) == 10
        return module.total

    @property
    def is_loaded(self) -> bool:
        return bool(self.total().stats.cache_hits)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cached]:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "LOOPS", [*compiled.LOOPS])
    monkeypatch.delenv(compiled.TOLD, raising=False)
    is_private.cache_clear()
    compiled.notes.cache_clear()
    yield Cached(tmp_path)
    is_private.cache_clear()
    monkeypatch.delenv(compiled.TOLD, raising=False)
    sys.modules.pop("kept_loop", None)


def of_group(path: Path) -> None:
    os.chown(path, 0, 77)
    path.chmod(path.stat().st_mode | 0o020)


def as_link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to(path.with_name("aside"))


OTHERS: dict[str, Callable[[Cached], None]] = {
    "the index of another user": lambda own: os.chown(own.index, NOBODY, 0),
    "the loop of another user": lambda own: os.chown(own.data, NOBODY, 0),
    "the folder of another user": lambda own: os.chown(own.index.parent, NOBODY, 0),
    "an index that all may write": lambda own: own.index.chmod(0o666),
    "a loop that all may write": lambda own: own.data.chmod(0o602),
    "a folder that all may write": lambda own: own.index.parent.chmod(0o777),
    "a sticky folder that all may write": lambda own: own.index.parent.chmod(0o1777),
    "an index that another group may write": lambda own: of_group(own.index),
    "a folder that another group may write": lambda own: of_group(own.index.parent),
    "a link in place of the index": lambda own: as_link(own.index),
    "a link in place of the folder": lambda own: as_link(own.index.parent),
}


@needs_root
@pytest.mark.parametrize("change", OTHERS)
def test_what_another_user_could_have_written_does_not_run(
    change: str, cached: Cached, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grp, "getgrgid", lambda number: grp.struct_group(("staff", "x", number, ["anna"])))
    assert cached.is_loaded
    evil = cached.data if "loop" in change else cached.index
    evil.write_bytes(pickle.dumps(Evil(cached.marker)))
    OTHERS[change](cached)
    capsys.readouterr()
    assert not cached.is_loaded
    assert not cached.marker.exists()
    assert capsys.readouterr().err.count("compiled loops are not loaded") == ("loop" not in change)


def test_what_the_tests_put_there_would_run(cached: Cached) -> None:
    cached.index.write_bytes(pickle.dumps(Evil(cached.marker)))
    assert not cached.is_loaded
    assert cached.marker.exists()


def test_ones_own_are_loaded_and_private(cached: Cached) -> None:
    assert cached.is_loaded
    assert {path.stat().st_mode & 0o777 for path in (cached.index, cached.data)} == {0o600}
    assert {path.stat().st_mode & 0o077 for path in cached.index.parent.glob("rowcast.loops")} == {0}
    for path in (cached.index, cached.data):
        path.chmod(0o644)  # as those of earlier versions
    assert cached.is_loaded
    cached.index.parent.parent.chmod(
        0o777
    )  # an emptyDir of Kubernetes: what is in it is looked at, not where it stands
    assert cached.is_loaded


@needs_root
def test_a_group_of_ones_own_may_write(cached: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Kubernetes volume with fsGroup: kubelet gives all files to a group that has no name here."""

    def unknown(number: int) -> Any:
        raise KeyError(number)

    for path in (cached.index.parent, cached.index, cached.data):
        os.chown(path, -1, 10001)
        path.chmod(path.stat().st_mode | 0o2060)
    monkeypatch.setattr(grp, "getgrgid", unknown)
    assert cached.is_loaded


def test_a_group_is_ones_own_if_nobody_else_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    me = pwd.getpwuid(os.geteuid())
    for name, members, expected in (
        (me.pw_name, [], True),
        (me.pw_name, [me.pw_name], True),
        (me.pw_name, ["anna"], False),
        ("staff", [], False),
        ("root", [], True),
    ):
        group = grp.struct_group((name, "x", 4321, members))
        monkeypatch.setattr(grp, "getgrgid", lambda number, group=group: group)
        is_private.cache_clear()
        assert is_private(4321) is expected
    anna = pwd.struct_passwd(("anna", "x", 4242, 4321, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwall", lambda: [me, anna])
    is_private.cache_clear()
    assert not is_private(4321)
    is_private.cache_clear()


@needs_root
@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_kernels_of_another_user_are_not_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setenv(name, str(tmp_path))
    kernel = tmp_path / "key" / "cuda_utils.so"
    kernel.parent.mkdir()
    kernel.touch(0o644)
    use_safe_caches()
    assert os.environ[name] == str(tmp_path)
    for path in (kernel, kernel.parent, tmp_path):
        for owner, mode in ((NOBODY, 0o755), (0, 0o777)):
            os.chown(path, owner, 0)
            path.chmod(mode)
            assert unsafe_below(tmp_path).startswith(str(path))
            use_safe_caches()
            assert os.environ[name] != str(tmp_path)
            assert Path(os.environ[name]).stat().st_mode & 0o077 == 0
            assert str(path) in capsys.readouterr().err
            monkeypatch.setenv(name, str(tmp_path))
            os.chown(path, 0, 0)
            path.chmod(0o755)
    assert unsafe_below(tmp_path) == ""
