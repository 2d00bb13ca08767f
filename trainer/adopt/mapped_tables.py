"""Tables larger than memory: an nn.Embedding whose weight is mapped from a file.

The script's own code gives the first values, which the kernel writes to the file. `adopt` reads rows from it and never
changes it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.rows import made_here, mapped

MAKERS = frozenset(kind.__init__.__code__ for kind in (nn.Embedding, nn.EmbeddingBag))


@contextmanager
def tables(folder: str | Path) -> Iterator[None]:
    """`with rowcast.tables(folder): model = Model()`: the weights of nn.Embedding and nn.EmbeddingBag that are made
    within are float32 in new files of the folder, one for each; all other code runs as it is.

    Raises ConfigError if a file is there already, or the disk has not as much space."""
    own = Path(folder).absolute()
    own.mkdir(parents=True, exist_ok=True)
    with MappedWeights(own):
        yield


class MappedWeights(TorchFunctionMode):
    """Gives each weight of a table a file, where its module asks `torch.empty` for it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.num_tables = folder, 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.empty or sys._getframe(1).f_code not in MAKERS:
            return func(*args, **kwargs)
        num_rows, dim = args[0]
        path = self.folder / f"table{self.num_tables}.{num_rows}x{dim}.f32"
        self.num_tables += 1
        like = func(0, **kwargs)
        if like.dtype != torch.float32 or like.device.type != "cpu":
            raise ConfigError(
                f"{path}: the table is made as {like.dtype} on {like.device}, and a file holds torch.float32 of the "
                "host; make the model on the host, and move it once it is adopted"
            )
        return new_table(path, num_rows, dim)


def new_table(path: Path, num_rows: int, dim: int) -> Tensor:
    if path.exists():
        raise ConfigError(
            f"{path} is there already, and rowcast.tables overwrites no file: it may hold the first values of a model "
            "that still trains; remove it, or name another folder"
        )
    made_here.add(str(path))
    return mapped(path, (num_rows, dim), torch.float32)
