"""Hands a model the arrays of a batch beside dense features and labels."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rowcast.job.schema import Job
from rowcast.protocol.inputs import PREFIX, belonging
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.sequences import Embedded, Sequences


def named_inputs(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the batch's arrays among those of a plan, without dense features and labels."""
    return {name.removeprefix(PREFIX): array for name, array in arrays.items() if name.startswith(PREFIX)}


class ModelInputs:
    """Arranges the rows and arrays of a batch, or a part of one, as the job's model takes them."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        """Raises ConfigError if the job names arrays and the model takes none."""
        self._of = belonging(job)
        self._name = type(model).__name__
        rows = ["rows"] * (1 + any(table.linear for table in job.tables))
        self._is_taken = accepts(model, *rows, inputs={})
        self._is_needed = self._is_taken and not accepts(model, *rows)
        self._refuse([*job.data.columns.inputs, *self._of.arrays])

    def rows(self, rows: Sequence[Embedded]) -> list[Embedded]:
        """The rows of each feature; of one that is the batch's, f32 [n, D]."""
        whole = self._of.batch_positions
        return [
            own.values if position in whole and isinstance(own, Sequences) else own for position, own in enumerate(rows)
        ]

    def arguments(self, inputs: Mapping[str, Tensor], rows: Sequence[Embedded]) -> dict[str, Any]:
        """The keyword argument `inputs`, if the data has arrays. `rows`: as `rows` returns them. Raises ConfigError."""
        if not inputs and self._is_needed:
            raise ConfigError(
                f"{self._name}.forward needs the argument inputs, and the data has no arrays; name some as "
                "data.columns.inputs, or yield them beside dense, sparse and labels, or give inputs a default"
            )
        if not inputs:
            return {}
        self._refuse(list(inputs))
        return {"inputs": {name: self._beside(name, array, rows) for name, array in inputs.items()}}

    def _beside(self, name: str, array: Tensor, rows: Sequence[Embedded]) -> Embedded:
        """An array of look-ups gets the offsets of its feature."""
        feature = self._of.arrays.get(name)
        own = None if feature is None else rows[self._of.positions[feature]]
        return Sequences(values=array, offsets=own.offsets) if isinstance(own, Sequences) else array

    def _refuse(self, names: Sequence[str]) -> None:
        if names and not self._is_taken:
            raise ConfigError(
                f"the data has the arrays {', '.join(names)}, and {self._name}.forward takes none; give it an argument "
                "inputs, or leave them out of the data"
            )


def accepts(model: nn.Module, *rows: str, **named: Any) -> bool:
    try:
        inspect.signature(model.forward).bind("dense", *rows, **named)
    except TypeError:
        return False
    return True
