"""Do DIN and the two towers reach the AUC of plain PyTorch? On real logs, to which histories are added.

    python -m benchmarks.histories FOLDER...       folders with train.parquet and columns.json

Method: a history is what the same customer bought before (retail), or where the same aircraft went before (flights), at
most 20 entries, made from the log in its order. One epoch of its first samples, the last tenth held out. rowcast's
side is the plain loop, whose bits a run has. The other side is written once more from the papers: no code of rowcast
but its reader, histories without padding, torch.optim. Both begin with the same first values, of a new seed each time,
so that what differs is the model and not chance.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn import functional

from examples.plain_loop import PlainTable, run_plain_loop
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.protocol.batch import Batch
from rowcast.trainer.models.job_model import JobModel
from tests.support.driver import start_state

LONGEST, DIM, ROWS_LR, DENSE_LR, TEMPERATURE = 20, 16, 0.05, 0.002, 0.2
Weights = dict[str, Tensor]
Rows = dict[str, tuple[Tensor, Tensor]]  # feature -> its rows [n, D], and the sample that each belongs to, i64 [n]


@dataclass(frozen=True, slots=True)
class Log:
    """A log's columns by their meaning."""

    item: str
    owner: str  # whose history it is
    items: tuple[str, ...]  # features of the item, besides `item`
    users: tuple[str, ...]  # other features


LOGS = {
    "stock": Log("stock", "customer", ("family",), ("customer", "country", "hour_of_week", "minute")),
    "dest": Log("dest", "tail", ("distance",), ("tail", "carrier", "origin", "weekday", "hour", "quarter_hour")),
}


def made_data(folder: Path, samples: int, out: Path) -> tuple[Log, dict[str, int]]:
    """Writes a log's first samples, with histories and log_frequency; returns its columns and the rows of tables."""
    names = [column["meaning"] for column in json.loads((folder / "columns.json").read_text())]
    log = LOGS[next(name for name in names if name in LOGS)]
    data = pq.read_table(folder / "train.parquet")[:samples].rename_columns(
        {f"cat_{index}": name for index, name in enumerate(names)}
    )
    used = [log.item, *log.items, *log.users]
    item, owner = (data[name].to_numpy() for name in (log.item, log.owner))
    counts = np.bincount(item[: len(item) * 9 // 10], minlength=item.max() + 1)
    columns = {name: data[name] for name in ("label", *(f"int_{i}" for i in range(13)), *used)}
    frequency = np.log(counts[item].clip(1)).astype(np.float32)
    pq.write_table(pa.table(columns | {"history": histories(owner, item), "log_frequency": frequency}), out)
    return log, {name: int(data[name].to_numpy().max()) + 1 for name in used}


def histories(owner: npt.NDArray[np.int64], item: npt.NDArray[np.int64]) -> pa.Array:
    """The last items of each row's owner before it; none for owner 0, which is nobody in particular."""
    order = np.argsort(owner, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    before = place - np.searchsorted(owner[order], owner)
    lengths = np.where(owner == 0, 0, before.clip(max=LONGEST))
    ends = np.cumsum(lengths)
    taken = np.arange(ends[-1]) + np.repeat(place - ends, lengths)
    return pa.ListArray.from_arrays(pa.array(np.append(0, ends), pa.int32()), pa.array(item[order][taken]))


def job_content(kind: str, log: Log, rows: dict[str, int], data: Path) -> dict[str, Any]:
    pooling = "none" if kind == "din" else "mean"
    dense = [f"int_{i}" for i in range(13)]
    models: dict[str, dict[str, Any]] = {
        "din": {"targets": {"history": log.item}, "attention_mlp": [32, 16], "top_mlp": [64, 32, 1]},
        "two-tower": {
            "item_features": [log.item, *log.items],
            **{"user_mlp": [64, 32], "item_mlp": [64, 32], "temperature": TEMPERATURE, "log_frequency": 13},
        },
    }
    model = models[kind]
    shape = {"embedding_dim": DIM, "init": "normal:0.1"}
    first = {"name": log.item, "num_embeddings": rows[log.item], "features": [log.item, "history"], "pooling": pooling}
    return {
        "job": {"run_dir": "unused"},
        "data": {
            **{"format": "parquet", "path": str(data), "eval_fraction": 0.1, "batch_size": 512},
            **{"columns": {"dense": dense if kind == "din" else [*dense, "log_frequency"]}},
        },
        "tables": [
            first | shape,
            *({"name": n, "num_embeddings": rows[n], "features": [n]} | shape for n in (*log.items, *log.users)),
        ],
        "model": {"kind": kind, **model},
        "optimizer": {
            "sparse": {"kind": "adagrad", "lr": ROWS_LR},
            "dense": {"kind": "adam", "lr": DENSE_LR},
        },
        "cache": {"capacity": "1GiB"},
    }


# the other side


def rows_of(job: Job, tables: Weights, batch: Batch) -> Rows:
    found: Rows = {}
    names = [(table.name, feature) for table in job.tables for feature in table.features]
    offsets = np.arange(len(batch.ids) + 1) if batch.offsets is None else batch.offsets
    for index, (table, feature) in enumerate(names):
        bounds = offsets[index * batch.size : (index + 1) * batch.size + 1]
        ids = torch.from_numpy(batch.ids[bounds[0] : bounds[-1]])
        sample = torch.arange(batch.size).repeat_interleave(torch.from_numpy(np.diff(bounds)))
        found[feature] = functional.embedding(ids, tables[table], sparse=True), sample
    return found


def mlp(w: Weights, name: str, x: Tensor, activation: Callable[[Tensor, int], Tensor]) -> Tensor:
    count = sum(key.startswith(f"{name}.") and key.endswith("weight") for key in w)
    for n in range(count):
        x = functional.linear(x, w[f"{name}.{n}.weight"], w[f"{name}.{n}.bias"])
        x = x if n == count - 1 else activation(x, n)
    return x


def din(job: Job, w: Weights, dense: Tensor, rows: Rows, training: bool) -> tuple[Tensor, Tensor]:
    def dice(of: str) -> Callable[[Tensor, int], Tensor]:
        def activation(x: Tensor, n: int) -> Tensor:
            own = f"{of}_activations.{n}"
            mean, variance = w[f"{own}.running_mean"], w[f"{own}.running_var"]
            share = functional.batch_norm(x, mean, variance, training=training, momentum=0.1, eps=1e-8).sigmoid()
            return share * x + (1 - share) * w[f"{own}.alpha"] * x

        return activation

    [(history, target)] = job.model.targets.items()
    (k, sample), (q, _) = rows[history], rows[target]
    own = q[sample]
    weight = mlp(w, "attention_mlp", torch.cat([own, k, own - k, own * k], 1), dice("attention"))
    interest = torch.zeros_like(q).index_add(0, sample, weight * k)
    others = [own for name, (own, _) in rows.items() if name not in (history, target)]
    x = mlp(w, "top_mlp", torch.cat([dense, *others, q, interest], 1), dice("top"))[:, 0]
    return x, x


def pooled(rows: tuple[Tensor, Tensor], size: int) -> Tensor:
    values, sample = rows
    count = torch.bincount(sample, minlength=size).clamp(min=1)[:, None]
    return torch.zeros(size, values.shape[1]).index_add(0, sample, values) / count


def two_tower(job: Job, w: Weights, dense: Tensor, rows: Rows, training: bool) -> tuple[Tensor, Tensor]:
    """Scores of each user and item, corrected, and of each sample's own pair."""
    parts = {name: pooled(own, len(dense)) for name, own in rows.items()}
    items = [name for name in parts if name in job.model.item_features]
    users = [dense[:, :13], *(own for name, own in parts.items() if name not in items)]
    u = mlp(w, "user_mlp", torch.cat(users, 1), lambda x, _: x.relu())
    v = mlp(w, "item_mlp", torch.cat([parts[name] for name in items], 1), lambda x, _: x.relu())
    cosine = (u / u.square().sum(1, keepdim=True).sqrt()) @ (v / v.square().sum(1, keepdim=True).sqrt()).T / TEMPERATURE
    return cosine - dense[:, 13], cosine.diagonal()


def sampled_softmax(scores: Tensor, labels: Tensor, items: npt.NDArray[np.int64]) -> Tensor:
    same = torch.from_numpy((items[:, None] == items).all(2))
    others = scores.masked_fill(same & ~torch.eye(len(labels), dtype=torch.bool), -1e30)
    return ((others.logsumexp(1) - scores.diagonal()) * labels).mean()


def plain_auc(job: Job, start: Weights) -> float:
    prefix = "embedding_bags."
    tables = {
        table.name: start[f"{prefix}{table.name}.weight"].clone().requires_grad_() for table in job.tables
    }  # fmt: skip
    dense = {
        name: own.clone().requires_grad_("running" not in name)
        for name, own in start.items()
        if not name.startswith((prefix, "optimizer."))
    }
    model = din if job.model.kind == "din" else two_tower
    optimizers = [
        torch.optim.Adagrad(tables.values(), lr=ROWS_LR),
        torch.optim.Adam([own for own in dense.values() if own.requires_grad], lr=DENSE_LR),
    ]
    reader = open_reader(job)
    for batch in reader.batches("train", 0):
        labels, inputs = torch.from_numpy(batch.labels), torch.from_numpy(batch.dense)
        outputs, _ = model(job, dense, inputs, rows_of(job, tables, batch), True)
        if model is din:
            loss = functional.binary_cross_entropy_with_logits(outputs, labels)
        else:
            loss = sampled_softmax(outputs, labels, item_ids(job, batch))
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
    scores, answers = [], []
    with torch.no_grad():
        for batch in reader.batches("eval", 0):
            scores.append(model(job, dense, torch.from_numpy(batch.dense), rows_of(job, tables, batch), False)[1])
            answers.append(batch.labels)
    return area_under_curve(torch.cat(scores).numpy(), np.concatenate(answers))


def item_ids(job: Job, batch: Batch) -> npt.NDArray[np.int64]:
    """i64 [B, features of the item]: what item a sample has."""
    offsets = np.arange(len(batch.ids) + 1) if batch.offsets is None else batch.offsets
    starts = [int(offsets[job.features.index(feature) * batch.size]) for feature in job.model.item_features]
    return np.stack([batch.ids[start : start + batch.size] for start in starts], axis=1)


def area_under_curve(scores: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> float:
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # ties share the mean of their ranks
    positives = int(labels.sum())
    above = ranks[labels > 0.5].sum() - positives * (positives + 1) / 2
    return float(above / (positives * (len(labels) - positives)))


def rowcast_auc(job: Job, start: Weights) -> float:
    """By the plain loop, whose bits both processes have."""
    reader, scores, answers = open_reader(job), [], []
    _, end = run_plain_loop(job, start, schedule(job, reader))
    tables = [PlainTable(own, job.features.index(own.features[0]), job.optimizer.sparse, end) for own in job.tables]
    side = JobModel(job, reader.num_dense)
    side.model.load_state_dict({name: end[name] for name in side.model.state_dict()})
    with torch.no_grad():
        for batch in reader.batches("eval", 0):
            embeddings = [feature for own in tables for feature in own.forward(batch)]
            scores.append(side.logits(side.forward(torch.from_numpy(batch.dense), embeddings, training=False)))
            answers.append(batch.labels)
    return area_under_curve(torch.cat(scores).numpy(), np.concatenate(answers))


def run(
    kind: str, folder: Path, samples: int, work: Path, seeds: Sequence[int], settings: Sequence[str]
) -> list[tuple[float, float]]:
    """(AUC of rowcast, AUC of plain PyTorch) of each seed."""
    data, config = work / "log.parquet", work / "job.json"
    log, rows = made_data(folder, samples, data)
    config.write_text(json.dumps(job_content(kind, log, rows, data)))
    found = []
    for seed in seeds:
        job = load_job(config, (*settings, f"job.seed={seed}"))
        start = start_state(job, open_reader(job).num_dense)
        found.append((rowcast_auc(job, start), plain_auc(job, start)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=60_000, help="the log's first ones")
    parser.add_argument("--kinds", default="din,two-tower")
    parser.add_argument("--set", action="append", default=[], help="overrides a key of the job file")
    options = parser.parse_args()
    torch.ones(1).sqrt()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    print("| log | model | rowcast | plain PyTorch | largest difference of a seed |\n|---|---|---|---|---|")
    for folder in options.folders:
        for kind in options.kinds.split(","):
            with tempfile.TemporaryDirectory() as work:
                found = run(kind, folder, options.samples, Path(work), range(1, options.seeds + 1), options.set)
            print_pairs(folder.name, kind, found)


def print_pairs(log: str, kind: str, found: Sequence[tuple[float, float]]) -> None:
    """A row of the table, from the AUC of rowcast and of plain PyTorch for each seed."""
    ours, theirs = np.array(found).T
    spread = [f"{own.mean():.4f} +- {own.std(ddof=min(1, len(own) - 1)):.4f}" for own in (ours, theirs)]
    print(f"| {log} | {kind} | {spread[0]} | {spread[1]} | {np.abs(ours - theirs).max():.5f} |", flush=True)


if __name__ == "__main__":
    main()
