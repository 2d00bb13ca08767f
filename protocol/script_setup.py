"""What a training script's process tells the prefetcher that it starts, in a file of the run directory."""

import msgspec

from rowcast.protocol.first_values import RowRule
from rowcast.runtime.checkpoint_manifest import SavedScript

SETUP = "script.json"  # in the run directory


class Columns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First values of some columns of a table's records."""

    width: int
    rule: RowRule | None = None  # None: they are in a file, or all alike
    path: str = ""  # a file with f32 [rows, width]; "": all have `value`
    offset: int = 0  # bytes before the first row
    row_bytes: int = 0  # from a row to the next; 0: rows follow each other
    value: float = 0.0


class ScriptTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    columns: tuple[Columns, ...]  # of its records, from the left
    # counted over the first `num_steps` steps; they divide the capacity
    largest_rows: int  # distinct rows of the largest step
    distinct_rows: int  # of all of them together


class ScriptSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    num_steps: int  # that are known at the start
    tables: tuple[ScriptTable, ...]  # in the order of the job


class SaveRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint of the script: the rows of all tables, and a model state."""

    folder: str  # of the run
    run_id: str
    step: int  # of the script, above those of earlier saves
    keep: int  # checkpoints
    # checksum of the manifest since which the rows have changed; "": they are all rows
    after: str
    script: SavedScript
    objects: str  # a file with the model state, as safetensors
