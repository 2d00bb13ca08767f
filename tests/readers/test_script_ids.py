"""The rows that a script tells: steps in order, complete, and what is refused."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from rowcast.job.tables import group_specs, make_keys, table_specs
from rowcast.prefetcher.readers.source import ScriptIds
from rowcast.prefetcher.run.script import ScriptStore
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import finish
from rowcast.protocol.messages import Ids, ScriptTable
from rowcast.runtime.errors import RemoteProtocolError
from rowcast.runtime.first_values import FirstValues
from tests.support.jobs import job, table
from tests.support.sample_messages import numbers_of

JOB = job(tables=[table("a", 10, 3, "rows0"), table("b", 6, 3, "rows1")])
GROUP = group_specs(JOB)[0]
WHOLE = Ids(step=0, trains=True, counts=(2, 1), rows=numbers_of(3, 9, 5))
change = msgspec.structs.replace


def test_rows_of_a_step_may_come_in_several_messages() -> None:
    ids = ScriptIds(table_specs(JOB))
    for at in range(3):
        assert ids.take() is None
        ids.accept(change(WHOLE, rows=WHOLE.rows[at * 8 : at * 8 + 8]))
    ids.accept(change(WHOLE, step=1, trains=False, counts=(0, 0), rows=b""))
    ids.accept(change(WHOLE, step=2))
    found = [ids.take() for _ in range(3)]
    assert [(own.kind, own.position.step, own.position.train_step) for own in found if own] == [
        ("train", 0, 0),
        ("eval", 1, 1),
        ("train", 2, 1),
    ]
    assert found[0] is not None
    assert found[0].batch.lookups.ids.tolist() == [3, 9, 5]
    assert np.asarray(found[0].batch.lookups.offsets).tolist() == [0, 2, 3]
    assert ids.take() is None


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (change(WHOLE, step=1), "rows of step 1 do not follow those before, of step 0"),
        (change(WHOLE, counts=(2, 1, 0)), "rows of step 0 do not follow"),
        (change(WHOLE, counts=(1, 1)), "rows of step 0 do not follow"),
        (change(WHOLE, rows=numbers_of(9, 3, 5)), "rows of step 0 do not ascend within table 0"),
        (change(WHOLE, rows=numbers_of(3, 3, 5)), "do not ascend within table 0"),
        (change(WHOLE, rows=numbers_of(3, 10, 5)), "do not ascend within table 0"),
        (change(WHOLE, rows=numbers_of(3, 9, 6)), "do not ascend within table 1"),
        (change(WHOLE, rows=bytes([255]) * 8 + numbers_of(9, 5)), "do not ascend within table 0"),
    ],
)
def test_rows_that_no_script_looks_up_are_refused(wrong: Ids, sentence: str) -> None:
    with pytest.raises(RemoteProtocolError, match=sentence):
        ScriptIds(table_specs(JOB)).accept(wrong)


def test_rows_that_were_not_trained_have_the_scripts_first_values(tmp_path: Path) -> None:
    first = np.arange(20, dtype=np.float32).reshape(10, 2)
    first.tofile(path := f"{tmp_path}/weights")
    columns = (FirstValues(width=2, path=path), FirstValues(width=1, value=0.25))
    tables = [ScriptTable(columns=own, largest_rows=1, distinct_rows=1) for own in (columns, (FirstValues(width=3),))]
    store = ScriptStore(MemoryStore(GROUP), GROUP, tables)
    keys = np.concatenate([make_keys(0, np.array([4, 9])), make_keys(1, np.array([4]))])
    records = np.ones((3, GROUP.record_bytes), np.uint8)
    finish(store.read(keys, records))
    assert records.view(np.float32)[:, :3].tolist() == [[8, 9, 0.25], [18, 19, 0.25], [0, 0, 0]]
