"""Two real processes over tcp on one host: the same bits as over shared memory, and a trainer without an allowed key ends with a sentence."""

from pathlib import Path
from typing import Any

from prefetcher.keys import make_keys
from tests.protocol.tcp import free_port
from tests.system.processes import Session

SMALL: dict[str, Any] = {"data": {"synthetic": {"samples": 4000}}}


def tcp(keys: Path, port: int) -> dict[str, Any]:
    return {"transport": {"endpoint": f"tcp://127.0.0.1:{port}", "keys": str(keys)}}


def test_a_run_over_tcp_has_the_losses_of_one_in_shared_memory(session: Session, other: Session, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["trainer"])
    losses = []
    for each, transport in ((session, tcp(tmp_path / "keys", free_port())), (other, {})):
        each.write_job(**SMALL, **transport)
        prefetcher, trainer = each.start_both()
        trainer.ended().quiet()
        prefetcher.ended().quiet()
        losses.append((each.run_dir / "losses.f32").read_bytes())
        assert not each.remains()
    assert losses[0] == losses[1]
    assert len(losses[0]) > 4 * 50


def test_the_prefetcher_may_listen_everywhere_and_each_side_may_keep_its_keys_elsewhere(session: Session, tmp_path: Path) -> None:
    port = free_port()
    make_keys(tmp_path / "server", ["trainer"])
    clients = tmp_path / "client" / "clients"
    clients.mkdir(parents=True, mode=0o700)
    (tmp_path / "server" / "clients" / "trainer.key_secret").rename(clients / "trainer.key_secret")
    (tmp_path / "client" / "server.key").write_bytes((tmp_path / "server" / "server.key").read_bytes())
    session.write_job(**SMALL, **tcp(tmp_path / "client", port))
    everywhere = [f"--set=transport.endpoint=tcp://0.0.0.0:{port}", f"--set=transport.keys={tmp_path / 'server'}"]
    prefetcher, trainer = session.start_both(*everywhere)
    trainer.ended().quiet()
    prefetcher.ended().quiet()


def test_a_trainer_whose_key_is_not_allowed_ends_with_a_sentence(session: Session, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["trainer"])
    (tmp_path / "keys" / "clients" / "trainer.key").unlink()
    session.write_job(**tcp(tmp_path / "keys", free_port()))
    prefetcher, trainer = session.start_both()
    assert "refuses this trainer's key; put its public part into clients/" in trainer.ended().refused(2)
    prefetcher.until_logged("refused a caller whose key is not in clients/")
    assert prefetcher.running
