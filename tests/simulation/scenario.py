"""What a seed decides of a life: the job, how it runs, and the bits that it must end with."""

import functools
import random
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints import writer
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.prefetcher.stores import tiered_store
from rowcast.prefetcher.stores.cold import redis_rows
from rowcast.protocol.batch import ScheduledBatch
from rowcast.trainer.models import Embedded
from rowcast.trainer.models.evaluate import Evaluation
from tests.support.array_models import array_job
from tests.support.batches import (
    BAGS,
    NUM_DENSE,
    OPTIMIZERS,
    Bags,
    SmallModel,
    slots_for,
    small_batches,
    small_job,
    small_width,
)
from tests.support.driver import InProcessRun, Settings, start_state

DENSE_OPTIMIZERS: tuple[Literal["sgd", "adagrad", "adam"], ...] = ("sgd", "adagrad", "adam")
NUM_STEPS = 12
TIERED = ("tiered", "segments", "redis")  # stores with a memory tier


@dataclass(frozen=True, kw_only=True)
class Work:
    """What decides the numbers."""

    optimizer: str
    dense_optimizer: Literal["sgd", "adagrad", "adam"]
    bags: Bags | Literal["arrays"]  # arrays: histories, with arrays of samples, look-ups and the batch
    drops_out: bool  # the model draws random numbers; that of histories never does

    def job(self, *, depth: int = 2, horizon: int = 8, every: int = 0, keep: int = 2, memory: int = 2**28) -> Job:
        sections: dict[str, Any] = {
            "lookahead": {"depth": depth, "horizon": horizon},
            "checkpoint": {"every": every, "keep": keep, "memory": memory},
            "optimizer": {
                "sparse": {"kind": self.optimizer, "lr": 0.05},
                "dense": {"kind": self.dense_optimizer, "lr": 0.05},
            },
        }
        if self.bags == "arrays":
            return array_job("causal", **sections)
        model = {"kind": f"tests.simulation.scenario:{'random_model' if self.drops_out else 'plain_model'}"}
        return small_job(self.optimizer, self.bags, model=model, **sections)

    def batches(self, job: Job) -> list[ScheduledBatch]:
        if self.bags == "arrays":
            return list(schedule(job, open_reader(job)))
        return small_batches(job, self.bags, num_steps=NUM_STEPS, eval_at=(4, 5, 9))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    work: Work
    job: Job
    slots: tuple[int, ...]
    ring_bytes: int
    late_store: bool
    seeded_streams: bool
    mirrored: bool
    # touched: in memory, numbered as the rows are touched; tiered: a few in memory, over a dictionary; segments: over
    # a file; redis: over a server
    store: Literal["memory", "touched", "tiered", "segments", "redis"]
    tier_spare: int  # rows in memory beyond those of the device
    tier_reserve: int  # rows that may wait to leave it
    tier_at_once: int  # bytes that are loaded or spilled at once
    rows_a_call: int  # to and from a server
    asks_often: bool  # how the server is: each time that the staging thread has nothing else to do, else never
    peers_wait: bool  # transport.rejoin_timeout: the prefetcher outlives a trainer that is lost
    num_faults: int
    block_bytes: int  # that a checkpoint collects at a time

    @property
    def tier_slots(self) -> tuple[int, ...] | None:
        return tuple(n + self.tier_spare for n in self.slots) if self.store in TIERED else None

    def __str__(self) -> str:
        job = self.job
        return (
            f"{self.work.optimizer} and {self.work.dense_optimizer}, bags {self.work.bags}, "
            f"dropout {self.work.drops_out}, depth {job.lookahead.depth}, horizon {job.lookahead.horizon}, "
            f"checkpoint every {job.checkpoint.every} keep {job.checkpoint.keep} memory {job.checkpoint.memory} "
            f"blocks of {self.block_bytes}, "
            f"{self.slots} slots, rings of {self.ring_bytes}, late store {self.late_store}, "
            f"seeded streams {self.seeded_streams}, mirrored {self.mirrored}, store {self.store} "
            f"with {self.tier_spare} spare rows and {self.tier_reserve} on their way, "
            f"{self.tier_at_once} bytes at once, {self.rows_a_call} rows a call, asks often {self.asks_often}, "
            f"peers wait {self.peers_wait}"
        )


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An undisturbed run."""

    batches: list[ScheduledBatch]
    losses: bytes  # f32, the plain loop's
    state: dict[str, Tensor]  # tables, row state and dense weights, the plain loop's
    evaluations: list[Evaluation]


def draw_scenario(chance: random.Random) -> Scenario:
    work = Work(
        optimizer=chance.choice(OPTIMIZERS),
        dense_optimizer=chance.choice(DENSE_OPTIMIZERS),
        bags=chance.choice((*BAGS, "arrays")),
        drops_out=chance.random() < 0.5,
    )
    job = work.job(
        depth=chance.choice([1, 2, 4]),
        horizon=chance.choice([1, 8, 64]),
        every=chance.randint(1, 5),
        keep=chance.randint(1, 3),
        memory=chance.choice([1, 500, 2**28]),
    )
    return Scenario(
        work=work,
        job=job,
        slots=slots_for(group_specs(job), reference(work).batches, chance.choice(["one batch", "more"])),
        ring_bytes=chance.choice([2**18, 2**20, 2**22]),
        late_store=chance.random() < 0.5,
        seeded_streams=chance.random() < 0.5,
        mirrored=chance.random() < 0.3,
        store=chance.choices(("segments", "touched", "memory", "tiered", "redis"), (5, 3, 5, 5, 4))[0],
        tier_spare=chance.choice([0, 20, 200]),
        tier_reserve=chance.choice([0, 50, 1000]),
        tier_at_once=chance.choice([1, 1000, tiered_store.AT_ONCE_BYTES]),
        rows_a_call=chance.choice([50, redis_rows.ROWS_AT_ONCE]),
        asks_often=chance.random() < 0.5,
        peers_wait=chance.random() < 0.8,
        num_faults=chance.randint(1, 5),
        block_bytes=chance.choice([1, 500, writer.BLOCK_BYTES]),
    )


@functools.cache
def reference(work: Work) -> Reference:
    job = work.job()
    batches = work.batches(job)
    losses, state = run_plain_loop(job, start_state(job, NUM_DENSE), batches)
    run = InProcessRun(
        job, batches, Settings(slots=slots_for(group_specs(job), batches, "everything"), seeded_streams=False)
    ).run()
    return Reference(
        batches=batches,
        losses=np.array(losses, np.float32).tobytes(),
        state={name: tensor.detach().clone() for name, tensor in state.items()},
        evaluations=run.results.evaluations,
    )


def plain_model(job: Job, num_dense: int) -> nn.Module:
    return SmallModel(small_width(job, num_dense))


class RandomModel(SmallModel):
    def forward(self, dense: Tensor, embeddings: list[Embedded]) -> Tensor:
        kept = torch.nn.functional.dropout(dense, 0.3, training=self.training)
        logits: Tensor = super().forward(kept, embeddings)
        return logits


def random_model(job: Job, num_dense: int) -> nn.Module:
    return RandomModel(small_width(job, num_dense))


class LifeFailed(AssertionError):
    """What rowcast promises did not hold."""


def check_run(run: InProcessRun, wanted: Reference) -> None:
    """Losses, evaluations, tables, row state and dense weights have the bits of the undisturbed run."""
    if np.array(run.results.losses, np.float32).tobytes() != wanted.losses:
        raise LifeFailed("losses differ from the plain loop's")
    if run.results.evaluations != wanted.evaluations:
        raise LifeFailed(f"evaluations {run.results.evaluations} differ from {wanted.evaluations}")
    state = run.state()
    if state.keys() != wanted.state.keys():
        raise LifeFailed(f"the run has {sorted(state)}, the plain loop {sorted(wanted.state)}")
    check_state(state, wanted, "after the run")


def check_state(state: dict[str, torch.Tensor], wanted: Reference, where: str) -> None:
    for name, tensor in state.items():
        if not torch.equal(tensor.view(torch.int32), wanted.state[name].contiguous().view(torch.int32)):
            raise LifeFailed(f"{name} {where} differs from the plain loop's")
