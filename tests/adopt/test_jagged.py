"""`rowcast.EmbeddingCollection`: what its JaggedTensors give, and what is refused. `test_examples` trains with it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import rowcast
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts

RULE = {"kind": "adagrad", "lr": 0.05}
CONFIG = rowcast.EmbeddingConfig(name="items", num_embeddings=50, embedding_dim=2, feature_names=["item"])


def collection(folder: Path, *tables: Any) -> rowcast.EmbeddingCollection:
    return rowcast.EmbeddingCollection(tables or [CONFIG], optimizer=RULE, capacity="1MiB", run_dir=folder)


def test_a_jagged_tensor_has_the_rows_of_each_sample() -> None:
    values = torch.arange(1.0, 13.0).view(6, 2).requires_grad_()
    own = rowcast.JaggedTensor(values, torch.tensor([0, 2, 2, 6], dtype=torch.int32))
    assert own.lengths().tolist() == [2, 0, 4]
    assert [part.tolist() for part in own.to_dense()] == [values[:2].tolist(), [], values[2:].tolist()]
    padded = own.to_padded_dense(3, padding_value=-1.0)
    assert padded.tolist()[0] == [*values[:2].tolist(), [-1.0, -1.0]]
    assert padded.tolist()[1] == [[-1.0, -1.0]] * 3
    assert padded.tolist()[2] == values[2:5].tolist()
    assert own.to_padded_dense().shape == (3, 4, 2)
    padded.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert values.grad[:, 0].tolist() == [1, 1, 1, 1, 1, 0]


def test_a_collection_tells_of_its_tables_under_the_names_of_torchrec(tmp_path: Path) -> None:
    own = collection(tmp_path)
    assert own.embedding_configs() == [CONFIG]
    assert (own.embedding_dim(), own.need_indices(), own.is_weighted()) == (2, False, False)
    assert own.job.tables[0].pooling == "none"


def test_collections_of_the_other_kind_several_and_micro_batches_are_refused(tmp_path: Path) -> None:
    bags = rowcast.EmbeddingBagConfig(name="bags", num_embeddings=5, embedding_dim=2, feature_names=["f"])
    with pytest.raises(ConfigError, match=facts("table bags", "sum", "EmbeddingBagCollection, which pools")):
        collection(tmp_path, bags)
    several: Any = [collection(tmp_path), collection(tmp_path)]
    given: tuple[tuple[Any, dict[str, Any]], ...] = ((collection(tmp_path), {"accumulate": 2}), (several, {}))
    for ebc, others in given:
        with pytest.raises(ConfigError, match=facts("one EmbeddingBagCollection", "rowcast.adopt")):
            rowcast.connect(ebc, "tests.adopt.clicks:train", **others)
