"""Sessions of processes that are started without their imports, and the result that all of them must come to."""

import pytest

from tests.recovery.restarted import Outcome, Recovering
from tests.support.processes import Session


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """By the commands themselves, as a user starts them."""
    with Session(tmp_path_factory.mktemp("undisturbed")) as session:
        run = Recovering(session)
        outcome = run.finish()
        assert run.num_starts == 2, "nothing was disturbed"
        assert session.remains() == []
        return outcome
