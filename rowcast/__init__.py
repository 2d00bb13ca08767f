"""Train recommendation models whose embedding tables do not fit on the device, bit for bit as if they did.

A job file describes a run. `rowcast train --config job.toml` trains it, and so does this:

    new                      returns the NewJob that is proposed for files or a frame: print it, change keys, train it
    train                    returns the Run
    load                     returns the Run of a run directory
    Run                      predict(frame), evaluate(frame), losses, evaluations, job, model()
    compare                  the evaluations of several runs as one table

Your own training script needs one line instead:

    import rowcast

    model = rowcast.adopt(Model(), capacity="8GiB")  # the rest stays as it is

    adopt                    the tables of a model stay its parameters, and only rows of coming steps are on the device
    ahead, ahead_calls       batches that are not from a DataLoader, read ahead
    save, restore            of a whole script: rows, objects and random states, as a run that serving reads
    sum_gradients            on several ranks, a mean of the model's gradients that has one order of additions
    tables                   a context: `nn.Embedding` gets a weight in a file, for tables larger than memory

What the factories of a job use:

    Batch                    what a data factory yields (`data.format = "package.module:factory"`)
    Job                      the job file, which data and model factories receive
    draws                    ids drawn as a function of their place in the data, such as negatives
    ranks_among              ranks of positives among candidates, for evaluations of next-item models
    Sequences                the rows of a feature that is not pooled (`pooling = "none"`), as the model receives them

docs/python.md, docs/adopt.md and docs/models.md walk through them.
"""

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rowcast.deploy.new_job import new
    from rowcast.deploy.run import Run, compare, load, train
    from rowcast.job.schema import Job
    from rowcast.prefetcher.readers.draws import draws
    from rowcast.protocol.batch import Batch
    from rowcast.trainer.adopt.adopt import adopt, ahead, ahead_calls
    from rowcast.trainer.adopt.gradient_sum import sum_gradients
    from rowcast.trainer.adopt.mapped_tables import tables
    from rowcast.trainer.adopt.saved import restore, save
    from rowcast.trainer.models.embedding import Sequences
    from rowcast.trainer.models.evaluate import ranks_among

__all__ = [
    "Batch",
    "Job",
    "Run",
    "Sequences",
    "adopt",
    "ahead",
    "ahead_calls",
    "compare",
    "draws",
    "load",
    "new",
    "ranks_among",
    "restore",
    "save",
    "sum_gradients",
    "tables",
    "train",
]

MODULES = {
    "Batch": "rowcast.protocol.batch",
    "Job": "rowcast.job.schema",
    "Run": "rowcast.deploy.run",
    "Sequences": "rowcast.trainer.models.embedding",
    "adopt": "rowcast.trainer.adopt.adopt",
    "ahead": "rowcast.trainer.adopt.adopt",
    "ahead_calls": "rowcast.trainer.adopt.adopt",
    "compare": "rowcast.deploy.run",
    "draws": "rowcast.prefetcher.readers.draws",
    "load": "rowcast.deploy.run",
    "new": "rowcast.deploy.new_job",
    "ranks_among": "rowcast.trainer.models.evaluate",
    "restore": "rowcast.trainer.adopt.saved",
    "save": "rowcast.trainer.adopt.saved",
    "sum_gradients": "rowcast.trainer.adopt.gradient_sum",
    "tables": "rowcast.trainer.adopt.mapped_tables",
    "train": "rowcast.deploy.run",
}
LEFT = {  # with `rowcast.connect`, which had a loop of the script's over rowcast's reader
    *("connect", "Loader", "JaggedTensor"),
    *("EmbeddingBagCollection", "EmbeddingBagConfig", "EmbeddingCollection", "EmbeddingConfig"),
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that a command can refuse a job file without importing torch."""
    if name == "__version__":
        return import_module("rowcast.runtime.telemetry.metrics").rowcast_version()
    if name in LEFT:
        from rowcast.runtime.errors import ConfigError

        raise type("LeftError", (ConfigError, AttributeError), {})(
            f"rowcast.{name} has left: adopt the script as it is, or train its model by a job file (docs/scripts.md)"
        )
    if name not in MODULES:
        raise AttributeError(f"module 'rowcast' has no attribute {name!r}")
    state = random.getstate()  # packages draw as they are imported, and a script may have seeded
    try:
        return getattr(import_module(MODULES[name]), name)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
