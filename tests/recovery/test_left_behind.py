"""What kills and a full /dev/shm leave behind: nothing that the next run minds, and in the end nothing at all."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from rowcast.prefetcher.stores.cold.redis_keys import Note, note_path
from rowcast.runtime.crash_points import VARIABLE
from tests.recovery.restarted import END_TIMEOUT_S, Outcome, Recovering, end_well, outcome_of, sections
from tests.support.processes import ROOT, Session, proc_text

SHARED_MEMORY = Path("/dev/shm")
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
SMALL_DEV_SHM = "mount -t tmpfs -o size=4m tmpfs /dev/shm && "


def test_a_start_looks_for_what_ranks_and_other_stores_have_left(session: Session) -> None:
    """In tests/stores/test_left_tables.py is what it then does."""
    for tables in (session.run_dir / "tables", session.run_dir / "rank-001" / "tables"):
        tables.mkdir(parents=True)
        left = Note(server="127.0.0.1:1", name="0123456789ab", folder=tables.stat().st_ino)
        note_path(tables, "fp32_d4_adam").write_bytes(msgspec.json.encode(left))
    prefetcher = session.start("prefetcher")
    prefetcher.until_logged("event=ready")
    assert prefetcher.stderr.count("rows of an earlier process may remain on a Redis server") == 2
    prefetcher.signal(signal.SIGTERM)
    prefetcher.ended().quiet()


def may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*NAMESPACE, "sh", "-c", f"{SMALL_DEV_SHM} true"], capture_output=True, check=False)
    return tried.returncode == 0


needs_mounts = pytest.mark.skipif(not may_mount(), reason="this user may not mount a small /dev/shm of its own")


def test_rings_that_do_not_fit_are_refused_with_a_sentence(session: Session) -> None:
    free = shutil.disk_usage(SHARED_MEMORY).free
    session.write_job(**sections(transport={"ring": f"{free // 2**20}MiB"}))
    sentence = session.start("prefetcher").ended().refused(2)
    assert "bytes of /dev/shm" in sentence
    assert "make transport.ring smaller or enlarge /dev/shm" in sentence
    assert session.remains() == []


def in_small_dev_shm(
    arguments: list[str], out: Path, err: Path, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    return launch_in(["sh", "-c", f'{SMALL_DEV_SHM} exec "$@"', "sh"], arguments, out, err, environment)


def launch_in(
    shell: list[str], arguments: list[str], out: Path, err: Path, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    command = [*NAMESPACE, *shell, sys.executable, *arguments]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen(
            command, stdout=stdout, stderr=stderr, cwd=ROOT, env=environment, start_new_session=True
        )


@needs_mounts
def test_a_dev_shm_that_fills_up_during_the_run_is_nobodys_concern(tmp_path: Path, undisturbed: Outcome) -> None:
    """Rings are allocated whole at the start."""
    with Session(tmp_path, in_small_dev_shm) as session:
        run = Recovering(session)
        launcher = session.start("local", "--max-steps=20", **{VARIABLE: "step computed:24:SIGSTOP"})
        launcher.until(lambda: bool(stopped_children(session)), "stopped trainer", END_TIMEOUT_S)
        [trainer] = stopped_children(session)
        fill(Path(f"/proc/{trainer}/root/dev/shm/else"))
        os.kill(trainer, signal.SIGCONT)
        end_well(launcher)
        assert run.complete
        assert outcome_of(session.run_dir).differs(undisturbed) == []


def stopped_children(session: Session) -> list[int]:
    return [pid for pid in session.children() if "T (stopped)" in proc_text(pid, "status")]


def fill(path: Path) -> None:
    """Takes every byte of the file system."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    usage = os.statvfs(path)
    assert usage.f_bavail == 0, f"{usage.f_bavail} blocks are free in {path.parent}"
