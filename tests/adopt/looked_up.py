"""Tables, an engine and a read-ahead without a run: look-ups that only say what they were asked for."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowcast.trainer.adopt.id_program import TableKey
from rowcast.trainer.adopt.read_ahead import Announced, ReadAhead, Verdict


class NotingEngine:
    """Keeps what it was told, and checks the order in which it may be told."""

    def __init__(self) -> None:
        self.announced: list[Announced] = []
        self.begun: list[int] = []
        self.abandoned: list[int] = []

    def announce(self, batch: Announced) -> None:
        assert batch.number == len(self.announced)
        for table, rows in batch.rows.items():
            assert rows.dtype == np.int64
            assert (np.diff(rows) > 0).all()
            assert not len(rows) or (rows[0] >= 0 and rows[-1] < table.num_embeddings)
        self.announced.append(batch)

    def begin(self, number: int) -> None:
        assert number < len(self.announced)
        assert number not in self.begun + self.abandoned
        self.begun.append(number)

    def abandon(self, number: int) -> None:
        assert number < len(self.announced)
        assert number not in self.begun + self.abandoned
        self.abandoned.append(number)

    def rows(self, number: int, table: TableKey) -> npt.NDArray[np.int64]:
        return self.announced[number].rows[table]


@dataclass
class Bench:
    """A read-ahead whose look-ups note their ids."""

    depth: int = 4
    engine: NotingEngine = field(default_factory=NotingEngine)
    table: TableKey = field(default_factory=lambda: TableKey("items", 1000))
    verdicts: list[Verdict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reading = ReadAhead(self.depth, self.engine)
        self.weights = torch.rand(
            self.table.num_embeddings, 4, generator=torch.Generator().manual_seed(5)
        ).requires_grad_()

    def look_up(self, ids: Tensor, table: TableKey | None = None) -> Tensor:
        table = table or self.table
        self.verdicts.append(self.reading.note(table, ids))
        if self.verdicts[-1] == "foreseen":
            told = [
                self.engine.rows(number, table)
                for number in self.engine.begun
                if table in self.engine.announced[number].rows
            ]
            assert any(np.isin(ids.detach().numpy(), rows).all() for rows in told)
        return torch.nn.functional.embedding(ids, self.weights)

    @property
    def num_foreseen(self) -> int:
        return self.verdicts.count("foreseen")
