"""Train recommendation models whose embedding tables do not fit on the device, bit for bit as if they did.

Two commands train a job file: `prefetcher run --config job.toml` and `trainer run --config job.toml`. Your own training
script needs two lines instead:

    import rowcast

    embeddings = rowcast.EmbeddingBagCollection(tables=[
        rowcast.EmbeddingBagConfig(name="users", num_embeddings=50_000_000, embedding_dim=64, feature_names=["user"]),
    ], optimizer={"kind": "adagrad", "lr": 0.01}, capacity="8GiB")
    for dense, sparse, labels in rowcast.connect(embeddings, "my_data:batches", epochs=1):
        ...  # your model, your loss, your backward pass

    EmbeddingBagCollection   a module with the interface of TorchRec's; its tables live in the prefetcher's memory
    EmbeddingBagConfig       one table of it
    EmbeddingCollection      the same without pooling: `forward` returns a JaggedTensor for each feature
    EmbeddingConfig          one table of it
    connect                  returns a Loader: iterate over it instead of your data loader
    Loader                   the batches, with their rows on the device when they are yielded; saves, stops, exports
    Batch                    what a data factory yields (`data.format = "package.module:factory"`)
    Job                      the job file, which data and model factories receive
    draws                    ids drawn as a function of their place in the data, such as negatives
    ranks_among              ranks of positives among candidates, for evaluations of next-item models
    Sequences                the rows of a feature that is not pooled (`pooling = "none"`), as the model receives them

docs/adopt.md walks through it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rowcast.job.schema import Job
    from rowcast.prefetcher.readers.draws import draws
    from rowcast.protocol.batch import Batch
    from rowcast.trainer.adopt.batch import JaggedTensor
    from rowcast.trainer.adopt.loader import Loader, connect
    from rowcast.trainer.adopt.module import EmbeddingBagCollection, EmbeddingCollection
    from rowcast.trainer.adopt.settings import EmbeddingBagConfig, EmbeddingConfig
    from rowcast.trainer.models.evaluate import ranks_among
    from rowcast.trainer.models.sequences import Sequences

__all__ = [
    "Batch",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "Job",
    "Loader",
    "Sequences",
    "connect",
    "draws",
    "ranks_among",
]

MODULES = {
    "Batch": "rowcast.protocol.batch",
    "EmbeddingBagCollection": "rowcast.trainer.adopt.module",
    "EmbeddingBagConfig": "rowcast.trainer.adopt.settings",
    "EmbeddingCollection": "rowcast.trainer.adopt.module",
    "EmbeddingConfig": "rowcast.trainer.adopt.settings",
    "JaggedTensor": "rowcast.trainer.adopt.batch",
    "Job": "rowcast.job.schema",
    "Loader": "rowcast.trainer.adopt.loader",
    "Sequences": "rowcast.trainer.models.sequences",
    "connect": "rowcast.trainer.adopt.loader",
    "draws": "rowcast.prefetcher.readers.draws",
    "ranks_among": "rowcast.trainer.models.evaluate",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that a command can refuse a job file without importing torch."""
    if name not in MODULES:
        raise AttributeError(f"module 'rowcast' has no attribute {name!r}")
    return getattr(import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
