"""A restart on other data or with other settings is refused by name, and one on the same data elsewhere is not."""

import msgspec
import numpy as np
import pytest
import xxhash

from rowcast.job.training_identity import digest_of_version_3
from rowcast.runtime.checkpoint_manifest import MANIFEST_NAME, ManifestOfVersion3
from tests.recovery.restarted import end_well
from tests.support.data_files import write_day
from tests.support.jobs import table
from tests.support.processes import Session

MISMATCH = 5


@pytest.fixture
def stopped(session: Session) -> Session:
    """After 5 of 25 steps over one day in the npy layout."""
    (session.folder / "days").mkdir()
    write_day(session.folder / "days", "day_0", 400, num_ids=30)
    write_job(session)
    end_well(*session.start_both("--max-steps=5"))
    return session


def write_job(
    session: Session, folder: str = "days", batch_size: int = 16, num_embeddings: int = 30, by_name: bool = False
) -> None:
    session.write_job(
        data={
            "format": "criteo-npy",
            "path": str(session.folder / folder),
            "by_name": by_name,
            "batch_size": batch_size,
            "synthetic": None,
        },
        tables=[table("narrow", num_embeddings, 4, "cat_0"), table("wide", 30, 4, "cat_1")],
        cache={"capacity": "50 rows"},
    )


def refused(session: Session) -> str:
    sentence = session.start("prefetcher").ended().refused(MISMATCH)
    assert "the checkpoint after 5 train steps" in sentence
    assert f"--from {session.run_dir}" in sentence
    return sentence


def test_a_restart_on_other_files_or_with_other_settings_is_refused_by_what_differs(stopped: Session) -> None:
    write_day(stopped.folder / "days", "day_1", 16, num_ids=30)
    assert f"{stopped.folder}/days/day_1_dense.npy is new" in refused(stopped)
    for path in (stopped.folder / "days").glob("day_1_*"):
        path.unlink()
    write_job(stopped, batch_size=32, num_embeddings=31)
    sentence = refused(stopped)
    assert "data.batch_size is 32, and was 16" in sentence
    assert 'table "narrow": num_embeddings is 31, and was 30' in sentence
    write_job(stopped)
    path = stopped.folder / "days" / "day_0_sparse.npy"
    np.save(path, np.load(path)[::-1])
    assert f"{path} has the same size as before, but other contents" in refused(stopped)


def test_a_run_that_began_in_the_order_of_names_continues_in_it(session: Session) -> None:
    (session.folder / "days").mkdir()
    for seed, day in enumerate((0, 2, 10)):
        write_day(session.folder / "days", f"day_{day}", 112, num_ids=30, seed=seed)
    write_job(session, by_name=True)
    end_well(*session.start_both("--max-steps=5"))
    write_job(session)
    prefetcher, trainer = session.start_both()
    end_well(prefetcher, trainer)
    days = session.folder / "days"
    for process in (prefetcher, trainer):
        assert (
            f'data="9 files in the order of their names, {days}/day_0_dense.npy to {days}/day_2_sparse.npy"'
            in process.stderr
        )
    assert session.manifest().train_steps == 21


def test_a_checkpoint_of_version_3_continues_with_a_warning_and_compares_sizes(stopped: Session) -> None:
    rewrite_as_version_3(stopped)
    labels = stopped.folder / "days" / "day_0_labels.npy"
    before = labels.read_bytes()
    np.save(labels, np.load(labels).astype(np.int64))
    assert "the size of a data file differs" in refused(stopped)
    labels.write_bytes(before)
    prefetcher, trainer = stopped.start_both()
    end_well(prefetcher, trainer)
    assert "only the sizes of data files are compared" in prefetcher.stderr
    assert stopped.manifest().train_steps == 25
    assert stopped.manifest().trained_on is not None


def rewrite_as_version_3(session: Session) -> None:
    newest = session.manifest()
    assert newest.trained_on is not None
    content = msgspec.to_builtins(newest)
    del content["trained_on"], content["ahead"]
    digest = digest_of_version_3(newest.job, newest.trained_on)
    unsealed = msgspec.json.encode(content | {"version": 3, "checksum": "", "training_digest": digest})
    checksum = xxhash.xxh3_64_hexdigest(unsealed).encode()
    path = session.run_dir / "checkpoints" / newest.name / MANIFEST_NAME
    path.write_bytes(unsealed.replace(b'"checksum":""', b'"checksum":"%b"' % checksum, 1))
    assert isinstance(session.manifest(), ManifestOfVersion3)
