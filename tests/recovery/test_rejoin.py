"""`transport.rejoin_timeout`: one process is killed and started again, the other waits, both end with the same bits."""

import signal
from pathlib import Path

import msgspec
import pytest

from rowcast.job.schema import Transport
from rowcast.prefetcher.run.make_keys import make_keys
from rowcast.protocol.attempts import Patience, transport_of_ranks
from rowcast.runtime.errors import PeerLost, PeerNeverCame
from tests.recovery.crashes import CRASHES, NEEDS_TIER, OF_ONE_PAIR, Armed
from tests.recovery.restarted import (
    END_TIMEOUT_S,
    PEER_LOST,
    ROLES,
    TIERED,
    Outcome,
    Recovering,
    Role,
    end_well,
    killed,
)
from tests.support.facts import facts
from tests.support.processes import Process, Session
from tests.support.repeats import count
from tests.support.tcp_run import free_port

REJOIN = {"ring": "1MiB", "connect_timeout": "60s", "rejoin_timeout": "60s"}
OTHER: dict[Role, Role] = {"prefetcher": "trainer", "trainer": "prefetcher"}
KILLS: dict[Role, str] = {"prefetcher": "PlanReady sent:24", "trainer": "loss written:10"}
AFTER_THE_GOOD_BYE = {"run not marked complete", "Bye sent"}  # nobody is left who could wait
ALL = sorted(set(OF_ONE_PAIR) - NEEDS_TIER - AFTER_THE_GOOD_BYE)
SOME = ["rows collected", "Welcome sent", "changed rows restored"]


def play(run: Recovering, starts: tuple[Armed, ...]) -> dict[Role, Process]:
    """Starts both; whoever kills itself is started again, at once. Returns the processes that are left to end well."""
    processes = run.start_both(starts[0])
    for armed, following in zip(starts, [*starts[1:], {}], strict=True):
        for role in armed:
            killed(processes[role])
        for role in armed:
            processes[role] = run.start(role, following.get(role))
    return processes


@pytest.mark.parametrize("name", SOME if count(0, 1) == 0 else ALL)
def test_the_survivor_goes_on_with_the_one_that_is_started_again(
    name: str, session: Session, undisturbed: Outcome
) -> None:
    run = Recovering(session, transport=REJOIN)
    end_well(*play(run, CRASHES[name]).values())
    assert run.complete
    assert run.finish().differs(undisturbed) == []
    assert session.remains() == []


@pytest.mark.parametrize("role", ROLES)
def test_tables_in_files_and_a_conversation_over_tcp_go_on_too(
    role: Role, session: Session, undisturbed: Outcome, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys", ["trainer"])
    tcp = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "keys": str(tmp_path / "keys")}
    run = Recovering(session, transport=REJOIN | tcp, store=TIERED)
    end_well(*play(run, ({role: KILLS[role]},)).values())
    assert run.num_starts == 3, "two of both, and a restart of one"
    assert run.finish().differs(undisturbed) == []
    assert session.remains() == []


@pytest.mark.parametrize("role", ROLES)
def test_one_survivor_outlives_two_kills_of_its_peer(role: Role, session: Session, undisturbed: Outcome) -> None:
    run = Recovering(session, transport=REJOIN)
    twice = {"prefetcher": "PlanReady sent:14", "trainer": "loss written:9"}[role]
    processes = play(run, ({role: twice}, {role: twice}))
    end_well(*processes.values())
    assert run.num_starts == 4, "two of both, and two restarts of one"
    assert run.finish().differs(undisturbed) == []
    assert session.remains() == []


@pytest.mark.parametrize("role", ROLES)
def test_a_survivor_whose_peer_does_not_come_back_ends_with_one_sentence(
    role: Role, session: Session, undisturbed: Outcome
) -> None:
    run = Recovering(session, transport={**REJOIN, "rejoin_timeout": "1s"})
    processes = run.start_both({role: KILLS[role]})
    killed(processes[role])
    sentence = processes[OTHER[role]].ended(END_TIMEOUT_S).refused(PEER_LOST)
    assert sentence == (
        f"no other {role} came within 1 s after the last one was lost; start it with the same job file, or raise "
        "transport.rejoin_timeout"
    )
    assert run.finish().differs(undisturbed) == []
    assert session.remains() == []


@pytest.mark.parametrize("role", ROLES)
def test_a_stop_while_a_peer_is_awaited_ends_the_survivor_in_order(
    role: Role, session: Session, undisturbed: Outcome
) -> None:
    run = Recovering(session, transport=REJOIN)
    processes = run.start_both({role: KILLS[role]})
    killed(processes[role])
    survivor = processes[OTHER[role]]
    survivor.until_logged(f"waiting for another {role}")
    assert (survivor.asked("/healthz"), survivor.asked("/readyz")) == ((200, "ok"), (503, "connecting")), (
        "it is well, and waits"
    )
    survivor.signal(signal.SIGTERM)
    survivor.ended(30.0).quiet()
    assert session.manifest().train_steps >= 4, "the checkpoints stay"
    assert run.finish().differs(undisturbed) == []
    assert session.remains() == []


def test_a_peer_that_never_came_is_not_awaited_longer_than_a_user_said() -> None:
    patience = Patience("trainer", Transport(connect_timeout="1s", rejoin_timeout="5s"))
    with pytest.raises(PeerNeverCame, match="at first"):
        patience.again(PeerNeverCame("at first"))
    patience.again(PeerLost("went away"))
    patience.again(PeerLost("went away again"))
    assert patience.transport.connect_timeout == 5.0
    with pytest.raises(PeerLost, match=facts("trainer", "5 s", "transport.rejoin_timeout")):
        patience.again(PeerNeverCame("afterwards"))


def test_nobody_is_awaited_where_the_job_does_not_say_so() -> None:
    with pytest.raises(PeerLost, match="went away"):
        Patience("trainer", Transport()).again(PeerLost("went away"))


@pytest.mark.parametrize(("own", "ranks", "expected_s"), [("30s", "60s", 120), ("30s", "5m", 360), ("10m", "5m", 600)])
def test_a_prefetcher_of_a_rank_waits_until_trainers_that_wait_for_each_other_have_come_again(
    own: str, ranks: str, expected_s: float
) -> None:
    transport = msgspec.structs.replace(Transport(), connect_timeout=own, rejoin_timeout=own)
    longer = transport_of_ranks(transport, ranks)
    assert (longer.connect_timeout, longer.rejoin_timeout) == (expected_s, expected_s)
