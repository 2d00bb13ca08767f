"""E1 for tables whose rows are numbered as they are touched, up to 10**12: the bits of a loop over touched rows."""

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs, make_keys
from rowcast.prefetcher.stores import touched_rows
from rowcast.prefetcher.stores.records import first_records
from rowcast.prefetcher.stores.store import finish
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.runtime.arrays import I64
from rowcast.trainer.kernels import part_of
from rowcast.trainer.models import build_model
from tests.support.batches import NUM_DENSE, OPTIMIZERS, Bags, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits, assert_tested_what_it_claims
from tests.support.driver import InProcessRun, Settings, start_state

NOMINAL_ROWS = 10**12


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_numbered_as_they_are_touched_have_the_bits_of_the_plain_loop(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(touched_rows, "MOST_INDEXED", 0)
    job = small_job(optimizer, "multi")
    batches = small_batches(job, "multi")
    losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches)
    for seed, (late_store, capacity) in enumerate(itertools.product((False, True), ("one batch", "more"))):
        slots = slots_for(group_specs(job), batches, capacity)
        run = InProcessRun(job, batches, Settings(slots=slots, seed=seed, late_store=late_store)).run()
        assert all(isinstance(store.store.numbers, TouchedRows) for store in run.tables)
        assert_equal_bits(run, losses, end)
        assert_tested_what_it_claims(run, job)


@pytest.mark.parametrize(("optimizer", "bags"), [("sgd", "single"), ("adam", "weighted")])
def test_tables_of_10_to_the_12_rows_have_the_bits_of_a_loop_over_the_touched_rows(optimizer: str, bags: Bags) -> None:
    job = small_job(optimizer, bags)
    batches = small_batches(job, bags)
    huge = huge_job(job)
    assert sum(table.num_embeddings for table in huge.tables) >= NOMINAL_ROWS
    losses, end = run_plain_loop(job, touched_start(job, huge), batches)
    slots = slots_for(group_specs(job), batches, "one batch")
    run = InProcessRun(huge, spread(job, huge, batches), Settings(slots=slots)).run()
    assert np.array(run.results.losses, np.float32).tobytes() == np.array(losses, np.float32).tobytes()
    assert_same_rows(run, job, end)
    assert_tested_what_it_claims(run, huge)
    trained = {table.name: touched_in(job, batches, table.name) for table in job.tables}
    assert sum(numbers_of(run)) == sum(map(len, trained.values())), "only trained rows take memory"


def numbers_of(run: InProcessRun) -> list[int]:
    """How many rows each group has numbered."""
    found = [store.store.numbers for store in run.tables]
    return [numbers.count for numbers in found if isinstance(numbers, TouchedRows)]


def huge_job(job: Job) -> Job:
    """The same tables, of 10**12 rows in all."""
    tables = tuple(
        msgspec.structs.replace(table, num_embeddings=NOMINAL_ROWS // len(job.tables)) for table in job.tables
    )
    return msgspec.structs.replace(job, tables=tables)


def spread_rows(job: Job, huge: Job, table: int) -> I64:
    """Where each row of a table of `job` lies in that of `huge`: in the same order, the last row last."""
    rows = np.arange(job.tables[table].num_embeddings, dtype=np.int64)
    return huge.tables[table].num_embeddings - 1 - rows[::-1] * (huge.tables[table].num_embeddings // len(rows))


def spread(job: Job, huge: Job, batches: list[ScheduledBatch]) -> list[ScheduledBatch]:
    table_of = {feature: i for i, table in enumerate(job.tables) for feature in table.features}

    def spread_batch(batch: Batch) -> Batch:
        offsets = np.arange(len(batch.ids) + 1) if batch.offsets is None else batch.offsets
        ids = batch.ids.copy()
        for f, feature in enumerate(job.features):
            own = slice(offsets[f * batch.size], offsets[(f + 1) * batch.size])
            ids[own] = spread_rows(job, huge, table_of[feature])[batch.ids[own]]
        return replace(batch, ids=ids)

    return [replace(scheduled, batch=spread_batch(scheduled.batch)) for scheduled in batches]


def touched_in(job: Job, batches: list[ScheduledBatch], name: str) -> I64:
    """Rows of a table that train steps look up."""
    [table] = [table for table in job.tables if table.name == name]
    features, found = [job.features.index(feature) for feature in table.features], list[I64]()
    for batch in (scheduled.batch for scheduled in batches if scheduled.kind == "train"):
        offsets = np.arange(len(batch.ids) + 1) if batch.offsets is None else batch.offsets
        found += [batch.ids[offsets[f * batch.size] : offsets[(f + 1) * batch.size]] for f in features]
    return np.unique(np.concatenate(found))


def touched_start(job: Job, huge: Job) -> dict[str, Tensor]:
    """What the plain loop starts from: of each huge table, the rows that can be touched."""
    model = {name: tensor.detach().clone() for name, tensor in build_model(job, NUM_DENSE).state_dict().items()}
    return rows_of_huge(job, huge, None) | model


def rows_of_huge(job: Job, huge: Job, run: InProcessRun | None) -> dict[str, Tensor]:
    """The rows that can be touched, under the names of an export; without `run` before training."""
    tensors = dict[str, Tensor]()
    for group in group_specs(huge):
        for table in group.tables:
            keys = make_keys(table.index, spread_rows(job, huge, table.index))
            records = first_records(group, huge.job.seed, keys)
            if run is not None:
                finish(run.tables[group.index].read(keys, records))
            for part in group.parts:
                prefix = "embedding_bags" if part.name == "weight" else "optimizer"
                tensors[f"{prefix}.{table.name}.{part.name}"] = part_of(torch.from_numpy(records), part).clone()
    return tensors


def assert_same_rows(run: InProcessRun, job: Job, end: dict[str, Tensor]) -> None:
    found = rows_of_huge(job, run.job, run) | dict(run.runner.model.state_dict())
    assert found.keys() == end.keys()
    for name, tensor in end.items():
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes(), f"{name} differs"
