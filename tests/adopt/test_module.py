"""What the module and the loader refuse while a script trains: each mistake gets a sentence, and none harms the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rowcast
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.connect.module import EmbeddingBagCollection
from tests.adopt.clicks import ids_of
from tests.adopt.scripts import CONFIGS, Launches, copied, make, same, train_all, train_on
from tests.adopt.stand_ins.torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tests.support.facts import facts

DATASET = "tests.adopt.clicks:train"


def keyed(step: int) -> KeyedJaggedTensor:
    ids = torch.from_numpy(ids_of(step))
    return KeyedJaggedTensor(keys=["a", "b", "c"], values=ids.T.reshape(-1), lengths=torch.ones(24, dtype=torch.long))


def test_a_run_is_the_same_whatever_was_refused_on_its_way(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path / "undisturbed")
    with rowcast.connect(model.ebc, DATASET) as loader:
        losses = train_all(model, optimizer, loader)
    end = copied(model.state_dict())

    model, optimizer = make(tmp_path / "disturbed")
    with pytest.raises(RuntimeError, match="there is no batch to look up"):
        model(torch.zeros(8, 2), keyed(0))
    with rowcast.connect(model.ebc, DATASET) as loader:
        found: list[float] = []
        batches, stale = iter(loader), None
        for step in range(8):
            batch = next(batches)
            refusals(model, batch, step)
            if step:
                with pytest.raises(RuntimeError, match=facts(f"step {step - 1}", f"step {step}")):
                    model(batch.dense_features, stale)
            found.append(train_on(model, optimizer, batch))
            with pytest.raises(RuntimeError, match=facts(f"train step {step}", "updated already")):
                model(batch.dense_features, batch.sparse_features)
            stale = batch.sparse_features
            if step < 7:
                with pytest.raises(RuntimeError, match=facts("whole at a checkpoint", "state_dict()", "save_every=N")):
                    model.state_dict()
        assert next(batches, None) is None
        with pytest.raises(RuntimeError, match=facts("8 train steps", "data.epochs = 1", "epochs=N")):
            next(iter(loader))
    with pytest.raises(RuntimeError, match="there is no batch to look up"):
        model(torch.zeros(8, 2), stale)
    assert found == losses
    assert same(end, dict(model.state_dict()))
    assert launches.remains() == []


def refusals(model: Any, batch: Any, step: int) -> None:
    """All that a forward may be asked of a batch and must not."""
    dense, sparse, _ = batch
    for lost in (sparse.values, sparse.lengths, lambda: sparse["a"]):
        with pytest.raises(RuntimeError, match=facts("ids of a batch", "prefetcher", "sparse_features")):
            lost()
    for ids in (keyed(step), torch.from_numpy(ids_of(step))):
        with pytest.raises(RuntimeError, match=facts(type(ids).__name__, "batch.sparse_features")):
            model(dense, ids)
    assert not model.eval()(dense, sparse).grad_fn.name().startswith("UpdateInBackward")
    model.train()


def test_what_is_returned_has_the_face_of_a_keyed_tensor(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    start = copied(model.ebc.state_dict())
    with rowcast.connect(model.ebc, DATASET, options={"batches": 1}) as loader:
        for batch in loader:
            found = model.ebc.eval()(batch["sparse"])
            assert (found.keys(), found.length_per_key(), found.offset_per_key()) == (
                ["a", "b", "c"],
                [4, 4, 4],
                [0, 4, 8, 12],
            )
            ids = torch.from_numpy(ids_of(0))
            assert torch.equal(found["b"], start["embedding_bags.wide.weight"][ids[:, 1]])
            assert torch.equal(found.to_dict()["c"], start["embedding_bags.small.weight"][ids[:, 2]])
            assert torch.equal(found.values(), torch.cat([found["a"], found["b"], found["c"]], dim=1))
            assert (batch.sparse_features.keys(), batch.sparse_features.stride(), len(batch)) == (["a", "b", "c"], 8, 3)
            assert batch.to("cpu") is batch
            with pytest.raises(RuntimeError, match=facts("cpu", "meta", "device=")):
                batch.to("meta")
    assert optimizer.param_groups


def test_gradients_are_not_accumulated_over_batches(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    with rowcast.connect(model.ebc, DATASET) as loader:
        batches = iter(loader)
        dense, sparse, _ = next(batches)
        torch.autograd.backward(model(dense, sparse).sum())
        dense, sparse, _ = next(batches)
        with pytest.raises(RuntimeError, match=facts("step of the dense optimizer", "larger batches")):
            model(dense, sparse)
        optimizer.step()
        torch.autograd.backward(model(dense, sparse).sum())


def test_a_model_without_dense_weights_may_say_so(tmp_path: Path, launches: Launches) -> None:
    model, _ = make(tmp_path)
    with rowcast.connect(model.ebc, DATASET, dense_optimizer=False) as loader:
        for _, sparse, _ in loader:
            torch.autograd.backward(model.ebc(sparse).values().sum())
    assert launches.children[0].code == 0


@pytest.mark.parametrize("backwards", [0, 2])
def test_each_forward_has_one_backward(backwards: int, tmp_path: Path, launches: Launches) -> None:
    model, _ = make(tmp_path)
    with rowcast.connect(model.ebc, DATASET) as loader:
        batches = iter(loader)
        dense, sparse, _ = next(batches)
        first = model(dense, sparse).sum()
        if backwards == 0:
            with pytest.raises(RuntimeError, match=facts("train step 0", "earlier forward", "rows")):
                model(dense, sparse)
            with pytest.raises(RuntimeError, match=facts("train step 0", "no backward pass", "torch.no_grad()")):
                next(batches)
        else:
            torch.autograd.backward(first, retain_graph=True)
            with pytest.raises(RuntimeError, match=facts("train step 0", "already updated", "backward()")):
                torch.autograd.backward(first)


def config(**changed: Any) -> Any:
    good: dict[str, Any] = {"name": "t", "num_embeddings": 10, "embedding_dim": 4, "feature_names": ["f"]}
    return rowcast.EmbeddingBagConfig(**{**good, **changed})


def test_a_config_may_come_from_elsewhere() -> None:
    from tests.adopt.stand_ins.torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

    own = EmbeddingBagConfig(
        name="t",
        num_embeddings=9,
        embedding_dim=4,
        feature_names=["f"],
        pooling=PoolingType.MEAN,
        weight_init_min=-0.5,
        weight_init_max=0.25,
    )
    ebc = EmbeddingBagCollection(
        [own], optimizer={"kind": "sgd", "lr": 0.1}, capacity="1MiB", job={"lookahead.depth": 7}
    )
    [table] = ebc.job.tables
    assert (table.num_embeddings, table.features, table.pooling, table.init) == (9, ["f"], "mean", "uniform:-0.5,0.25")
    assert ebc.job.lookahead.depth == 7
    assert ebc.embedding_bag_configs() == [own]


@pytest.mark.parametrize(
    ("configs", "options", "sentence"),
    [
        ([config()], {"capacity": None}, 'capacity is missing; give capacity="64MiB"'),
        ([config()], {"optimizer": None}, "optimizer is missing"),
        ([config(pooling="none")], {}, facts("table t", 'pooling = "none"', "EmbeddingCollection")),
        ([config(name="a b")], {}, "table name 'a b' must be letters"),
        ([object()], {}, "give EmbeddingBagConfigs"),
        ([config()], {"optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}}, "momentum on rows is refused"),
        ([config()], {"job": {"lookahead": 4}}, 'write "section.key": value'),
        ([config()], {"job": {"lookahead.dept": 4}}, "unknown key dept"),
        (
            [config()],
            {"job": {"tables.dtype": "fp16"}},
            facts("tables.dtype", "configs"),
        ),
        ([config()], {"job": {"data.format.x": 1}}, r"data\.format\.x cannot be set here"),
        ([config()], {"job": {"metrics.trainer": "127.0.0.1:0"}}, "a script serves no /metrics"),
        (
            [config()],
            {"optimizer": "adagrad"},
            facts("optimizer = 'adagrad'", '{"kind": "adagrad", "lr": 0.05}'),
        ),
        ([config()], {"optimizer": torch.optim.SGD}, "does not say how rows are trained"),
        ([config()], {"device": "tpu"}, "trainer.device = 'tpu' is not a device"),
    ],
)
def test_a_collection_that_cannot_be_is_refused(configs: list[Any], options: dict[str, Any], sentence: str) -> None:
    given = {"optimizer": {"kind": "sgd", "lr": 0.1}, "capacity": "1MiB"} | options
    with pytest.raises(ConfigError, match=sentence):
        EmbeddingBagCollection(configs, **given)


def test_an_init_function_of_its_own_is_refused() -> None:
    class WithInit:
        name, num_embeddings, embedding_dim, feature_names = "t", 10, 4, ("f",)

        @staticmethod
        def init_fn(weight: Tensor) -> None:
            """Would fill the table."""

    with pytest.raises(ConfigError, match=facts("table t", "init_fn", "memory")):
        EmbeddingBagCollection([WithInit()], optimizer={"kind": "sgd", "lr": 0.1}, capacity="1MiB")


def test_a_collection_has_one_loader(tmp_path: Path) -> None:
    model, _ = make(tmp_path)
    rowcast.connect(model.ebc, DATASET)
    with pytest.raises(ConfigError, match="without a loader"):
        rowcast.connect(model.ebc, DATASET)


def test_a_whole_job_file_is_for_rowcast_train() -> None:
    file: Any = "job.toml"
    with pytest.raises(ConfigError, match=facts("job.toml", "`rowcast train`", "docs/models.md")):
        EmbeddingBagCollection(CONFIGS, optimizer={"kind": "sgd", "lr": 0.1}, capacity="1MiB", job=file)


def test_the_job_of_a_script_is_refused_by_the_trainers_own_command() -> None:
    from rowcast.trainer.models import build_model

    ebc = EmbeddingBagCollection(CONFIGS, optimizer={"kind": "sgd", "lr": 0.1}, capacity="1MiB")
    with pytest.raises(ConfigError, match="run the script instead of `trainer run`"):
        build_model(ebc.job, 2)
