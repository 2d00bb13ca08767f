import msgspec
import pytest

from rowcast.job.schema import Transport
from rowcast.protocol.attempts import transport_of_ranks


@pytest.mark.parametrize(("own", "ranks", "expected_s"), [("30s", "60s", 120), ("30s", "5m", 360), ("10m", "5m", 600)])
def test_a_prefetcher_of_a_rank_waits_until_trainers_that_wait_for_each_other_have_come_again(
    own: str, ranks: str, expected_s: float
) -> None:
    transport = msgspec.structs.replace(Transport(), connect_timeout=own, rejoin_timeout=own)
    longer = transport_of_ranks(transport, ranks)
    assert (longer.connect_timeout, longer.rejoin_timeout) == (expected_s, expected_s)
