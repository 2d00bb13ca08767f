"""The device side of rowcast, and what a training script of one's own needs of it (docs/adopt.md):

trainer.EmbeddingBagCollection(configs, ...)    instead of torchrec's, or of a module with tables
trainer.connect(ebc, dataset)                   instead of the data loader
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.adopt.loader import Loader, connect
    from trainer.adopt.module import EmbeddingBagCollection
    from trainer.adopt.settings import EmbeddingBagConfig

__all__ = ["EmbeddingBagCollection", "EmbeddingBagConfig", "Loader", "connect"]

MODULES = {
    "EmbeddingBagCollection": "trainer.adopt.module",
    "EmbeddingBagConfig": "trainer.adopt.settings",
    "Loader": "trainer.adopt.loader",
    "connect": "trainer.adopt.loader",
}


def __getattr__(name: str) -> Any:
    """Imported when they are asked for: the commands should not wait for torch before they can refuse."""
    if name not in MODULES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module(MODULES[name]), name)
