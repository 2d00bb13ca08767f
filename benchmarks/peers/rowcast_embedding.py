"""Contestant: rowcast, over a cache with real plans. A step includes making each look-up's slot and bag from the plan,
as the main thread of a run on a CPU does. Between steps, rows move between the cache and a table in memory as the plans
say; in a run other threads do that, and cut long rows into chunks, so neither is timed here.
"""

import sys
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.peers.turns import Clock, Seconds, Terms, by_feature, initial_rows, take_turns
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec, group_specs
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.protocol.plan import GroupPlan
from rowcast.trainer.kernels import GroupLookup, Kernels, SlotArranger, torch_ops
from rowcast.trainer.kernels.choose import arranged, group_lookup
from rowcast.trainer.kernels.compiled_ops import CompiledOps
from rowcast.trainer.models.embedding import Embeddings

DEPTH, HORIZON = 4, 16


class Rowcast:
    def __init__(self, terms: Terms, ids: npt.NDArray[np.int64], gradient: Tensor, kernels: Kernels) -> None:
        job = job_of(terms)
        (group,) = group_specs(job)
        self._arranger, self._batch_size = SlotArranger([group]), terms.batch_size
        self._gradients = by_feature(gradient, terms)
        self._table = Table(terms, group)
        self._plans = plans_of(terms, group, ids)
        self._lookups = [group_lookup(arranged(plan, group), terms.batch_size) for plan in self._plans]
        # every plan's, as a run uses the same memory for one plan after the other
        self._slots, self._bag_order = torch.empty((2, ids.shape[1]), dtype=torch.int32).unbind()
        self._records = np.zeros((terms.slots, group.record_floats), np.float32)
        self._layer = Embeddings((group,), [torch.from_numpy(self._records)], kernels)
        self._table.move(self._plans[0], self._records)

    def step(self, step: int) -> Seconds:
        clock = Clock()
        lookup = self._arranged(step)
        clock.lap("arrange")
        pooled = self._layer([lookup], step)
        clock.lap("look-up")
        torch.autograd.backward(cast(list[Tensor], pooled), self._gradients)
        clock.lap("update")
        if step + 1 < len(self._plans):
            self._table.move(self._plans[step + 1], self._records)
        return clock.seconds

    @torch.no_grad()
    def look_up(self, step: int) -> Tensor:
        return torch.cat(cast(list[Tensor], self._layer([self._arranged(step)], step)))

    def _arranged(self, step: int) -> GroupLookup:
        plan = self._plans[step]
        assert plan.order is not None, "look-ups of one row each have an order"
        own = [array.ctypes.data for array in (plan.order, plan.segment_offsets, plan.unique_slots)]
        made = [array.data_ptr() for array in (self._slots, self._bag_order)]
        self._arranger.arrange(self._batch_size, [(0, len(plan.order), len(plan.unique_slots), *own, *made)])
        return replace(self._lookups[step], slots=self._slots, bag_order=self._bag_order)


class Table:
    """Every row's record; in a run the prefetcher holds them."""

    def __init__(self, terms: Terms, group: GroupSpec) -> None:
        self._first = np.cumsum([0, *terms.cardinalities[:-1]])
        self._records = np.zeros((group.num_rows, group.record_floats), np.float32)
        for table, first in enumerate(self._first):
            self._records[first : first + terms.cardinalities[table], : terms.dim] = initial_rows(table, terms)

    def move(self, plan: GroupPlan, cache: npt.NDArray[np.float32]) -> None:
        self._records[self._rows(plan.evict_keys)] = cache[plan.fetch_slots[: len(plan.evict_keys)]]
        cache[plan.fetch_slots] = self._records[self._rows(plan.fetch_keys)]

    def _rows(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        rows: npt.NDArray[np.int64] = self._first[keys >> KEY_SHIFT] + (keys & ROW_MASK)
        return rows


def job_of(terms: Terms) -> Job:
    sparse = {"kind": terms.optimizer, "lr": terms.lr} | ({} if terms.optimizer == "sgd" else {"eps": terms.eps})
    return parse_job(
        {
            "job": {"run_dir": "unused"},
            "data": {"format": "synthetic", "batch_size": terms.batch_size},
            "tables_from": {"cardinalities": terms.cardinalities, "embedding_dim": terms.dim},
            "model": {"kind": "dlrm", "bottom_mlp": [terms.dim], "top_mlp": [1]},
            "optimizer": {"sparse": sparse, "dense": {"kind": "sgd", "lr": 0.1}},
            "cache": {"capacity": "1GiB"},
        }
    )


def plans_of(terms: Terms, group: GroupSpec, ids: npt.NDArray[np.int64]) -> list[GroupPlan]:
    planner = RowPlanner((group,), [(terms.slots,)], DEPTH, HORIZON)
    dense, labels = np.zeros((terms.batch_size, 1), np.float32), np.zeros(terms.batch_size, np.float32)
    plans: list[GroupPlan] = []
    for step, of_step in enumerate(ids):
        batch = Batch(dense=dense, labels=labels, ids=of_step)
        planner.add(ScheduledBatch.at(step=step, kind="train", train_step=step, epoch=0, batch=batch))
        if planner.ready():
            plans.append(planner.plan().move[0])
    planner.end()
    while planner.ready():
        plans.append(planner.plan().move[0])
    return plans


def kernels_named(name: str) -> Kernels:
    return CompiledOps(torch.get_num_threads()) if name == "compiled_ops" else torch_ops


if __name__ == "__main__":
    take_turns(lambda terms, ids, gradient: Rowcast(terms, ids, gradient, kernels_named(sys.argv[3])))
