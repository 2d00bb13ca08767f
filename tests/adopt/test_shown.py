"""What a script shows of its run: the column of ids taken for each feature, and evaluations."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rowcast
from rowcast.prefetcher.readers.formats.custom import BatchCheck
from rowcast.runtime.errors import ConfigError, DataError
from tests.adopt.scripts import Launches, make, train_on
from tests.support.facts import facts


def test_evaluation_that_is_asked_for_needs_an_evaluation_split(tmp_path: Path, launches: Launches) -> None:
    model, _ = make(tmp_path)
    with pytest.raises(ConfigError, match=facts("evaluate=True", "no evaluation batches", '"eval"')):
        next(iter(rowcast.connect(model.ebc, "tests.adopt.clicks:listed", evaluate=True)))
    assert launches.remains() == []


def test_the_column_that_was_taken_for_each_feature_is_shown_once(
    tmp_path: Path, launches: Launches, capfd: pytest.CaptureFixture[str]
) -> None:
    model, _ = make(tmp_path)
    with rowcast.connect(model.ebc, "tests.adopt.clicks:listed") as loader:
        next(iter(loader))
    pairing = (
        "a <- column 0 (ids up to 425 of 500), b <- column 1 (ids up to 485 of 500), c <- column 2 (ids up to 5 of 6)"
    )
    [line] = [line for line in capfd.readouterr().err.splitlines() if "<-" in line]
    assert line == f"rowcast: ids come by position: {pairing}"
    assert pairing in (tmp_path / "prefetcher.log").read_text()
    model, _ = make(tmp_path / "named")
    with rowcast.connect(model.ebc, "tests.adopt.clicks:by_name") as loader:
        next(iter(loader))
    assert "<-" not in capfd.readouterr().err


def test_an_id_outside_its_table_names_the_column_that_it_was_taken_from(tmp_path: Path, launches: Launches) -> None:
    model, _ = make(tmp_path)
    pairs = ("a <- column 0 (ids up to 5 of 500)", "b <- column 1", "c <- column 2 (ids up to 485 of 6)")
    with pytest.raises(DataError, match=facts("column c", "table small", *pairs)):
        next(iter(rowcast.connect(model.ebc, "tests.adopt.clicks:mixed_up")))


def test_a_script_has_several_labels_of_a_sample_and_the_auc_of_each(tmp_path: Path, launches: Launches) -> None:
    labels: dict[str, Any] = {"data.columns.labels": ["click", "buy"]}
    model, optimizer = make(tmp_path, **labels)
    with rowcast.connect(model.ebc, "tests.adopt.clicks:two_tasks", evaluate=True) as loader:
        for batch in loader:
            assert batch.labels.shape == (8, 2)
            assert batch.labels.isnan().sum(0).tolist() == [0, 4]
            if batch.kind == "train":
                train_on(model, optimizer, (*tuple(batch)[:2], batch.labels[:, 0]))
            else:
                logits = model.eval()(batch.dense_features, batch.sparse_features)
                loader.record(logits=torch.stack([logits, -logits], dim=1))
                model.train()
        assert loader.evaluation is not None
        click, buy = loader.evaluation.tasks
    assert (click.label, click.num_labels, buy.label, buy.num_labels) == ("click", 32, "buy", 16)
    assert click.auc is not None
    assert buy.auc is not None
    assert loader.evaluation.auc == pytest.approx((click.auc + buy.auc) / 2)


def test_an_epoch_ends_with_its_evaluation(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    with rowcast.connect(model.ebc, "tests.adopt.clicks:lists", epochs=2, evaluate=True) as loader:
        for epoch in loader.epochs:
            for batch in loader:
                if batch.kind == "train":
                    train_on(model, optimizer, batch)
                    with pytest.raises(RuntimeError, match=facts("record(logits=...)", "evaluation batch")):
                        loader.record(logits=torch.zeros(8))
                else:
                    loader.record(logits=model.eval()(batch.dense_features, batch.sparse_features))
                    model.train()
            assert loader.evaluation is not None
            assert loader.evaluation.train_step == 4 * (epoch + 1)


def test_the_pairing_of_very_many_features_fits_into_a_message() -> None:
    names = [f"feature_with_a_name_{f}" for f in range(500)]
    config = rowcast.EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=names)
    ebc = rowcast.EmbeddingBagCollection([config], optimizer={"kind": "sgd", "lr": 0.1}, capacity="1MiB")
    check = BatchCheck(ebc.job)
    check.check((np.zeros((2, 1)), np.ones((2, 500), np.int64), np.zeros(2)), "here")
    assert check.pairing.startswith("feature_with_a_name_0 <- column 0 (ids up to 1 of 10), ")
    assert check.pairing.endswith(" ...")
    assert len(check.pairing) <= 3000
