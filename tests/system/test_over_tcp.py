"""Two real processes over tcp on one host: the bits are those of shared memory; no key, no training."""

from pathlib import Path
from typing import Any

from rowcast.prefetcher.run.make_keys import make_keys
from tests.support.array_models import array_content
from tests.support.jobs import laid_over
from tests.support.processes import Session
from tests.support.tcp_run import free_port

ARRAYS = laid_over(array_content("timed"), {"data": {"options": {"num_batches": 60}, "synthetic": None}})


def tcp(keys: Path, port: int) -> dict[str, Any]:
    return {"transport": {"endpoint": f"tcp://127.0.0.1:{port}", "keys": str(keys)}}


def split_keys(folder: Path) -> tuple[Path, Path]:
    """The prefetcher's folder and the trainer's, each with no more than it needs."""
    server, clients = folder / "server", folder / "client" / "clients"
    make_keys(server, ["trainer"])
    clients.mkdir(parents=True, mode=0o700)
    (server / "clients" / "trainer.key_secret").rename(clients / "trainer.key_secret")
    (clients.parent / "server.key").write_bytes((server / "server.key").read_bytes())
    return server, clients.parent


def test_a_run_with_arrays_has_the_same_losses_over_tcp_and_in_shared_memory(
    session: Session, other: Session, tmp_path: Path
) -> None:
    """The prefetcher listens everywhere, which the trainer's job file need not say."""
    port = free_port()
    server, client = split_keys(tmp_path)
    everywhere = [f"--set=transport.endpoint=tcp://0.0.0.0:{port}", f"--set=transport.keys={server}"]
    losses = []
    for each, transport, options in ((session, tcp(client, port), everywhere), (other, {}, [])):
        each.write_job(**ARRAYS, **transport)
        prefetcher, trainer = each.start_both(*options)
        trainer.ended().quiet()
        prefetcher.ended().quiet()
        losses.append((each.run_dir / "losses.f32").read_bytes())
        assert not each.remains()
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4 * 60


def test_a_trainer_whose_key_is_not_allowed_ends_with_a_sentence(session: Session, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["trainer"])
    (tmp_path / "keys" / "clients" / "trainer.key").unlink()
    session.write_job(**tcp(tmp_path / "keys", free_port()))
    prefetcher = session.start("prefetcher")
    # on its own machine: in the prefetcher's run directory, its failure would end the prefetcher
    trainer = session.start("trainer", f"--set=job.run_dir={tmp_path / 'elsewhere'}")
    assert "refuses this trainer's key; put its public part into clients/" in trainer.ended().refused(2)
    prefetcher.until_logged("refused a caller whose key is not in clients/")
    assert prefetcher.running
