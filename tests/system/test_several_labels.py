"""Several labels a sample, some of them unknown: the bits of the plain loop, evaluations by label, MMoE."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.session import PREFETCHER
from rowcast.runtime.errors import ConfigError, RemoteProtocolError
from rowcast.trainer.models.job_model import JobModel
from rowcast.trainer.models.model_state import unpack
from tests.hostile.peers import HostileRun
from tests.support.batches import NUM_DENSE, SEVERAL_LABELS, slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings
from tests.support.facts import facts

ROOT = Path(__file__).parents[2]


@functools.cache
def workload() -> tuple[Job, list[ScheduledBatch]]:
    """The fourth train batch knows no label at all, the first evaluation batch none of the second."""
    job = small_job("adagrad", "multi", **SEVERAL_LABELS)
    batches = small_batches(job, "multi", num_steps=6, eval_at=(2, 5, 7))
    batches[4].batch.labels[:] = np.nan
    batches[2].batch.labels[:, 1] = np.nan
    return job, batches


LIES: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "one label": lambda shape: shape[:1],
    "a label too many": lambda shape: (shape[0], shape[1] + 1),
    "no label": lambda shape: (shape[0], 0),
    "the labels of one sample more": lambda shape: (shape[0] + 1, shape[1]),
    "another order": lambda shape: shape[::-1],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_plan_with_other_labels_than_the_job_names_is_refused(lie: str) -> None:
    job, batches = workload()

    def changed(message: Any, content: Any) -> Any:
        if getattr(message, "plan", None) is None:
            return None
        arrays = tuple(
            msgspec.structs.replace(spec, shape=LIES[lie](spec.shape)) if spec.name == "labels" else spec
            for spec in message.plan.arrays
        )
        return msgspec.structs.replace(message, plan=msgspec.structs.replace(message.plan, arrays=arrays))

    liar = HostileRun(PREFETCHER, changed)
    settings = Settings(slots=slots_for(group_specs(job), batches, "more"), mirrored=True, links=liar.links)
    with pytest.raises(RemoteProtocolError, match=r"array labels should be f4 \(64, 3\)"):
        InProcessRun(job, batches, settings).run()
    assert liar.told


def test_a_checkpoint_of_one_label_holds_what_it_always_held() -> None:
    job = small_job("sgd")
    batches = small_batches(job, "single", num_steps=2, eval_at=(2,))
    run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"))).run()
    names = [name for name in unpack(run.saved[-1]) if name.startswith("metrics.")]
    assert sorted(names) == [f"metrics.{name}" for name in ("histogram", "loss_sum", "num_correct", "num_samples")]


def test_a_model_with_one_logit_is_refused_at_the_job_file() -> None:
    with pytest.raises(ConfigError, match=facts("3 labels", "dcnv2", "one logit")):
        small_job("sgd", data=SEVERAL_LABELS["data"], model={"kind": "dcnv2", "bottom_mlp": [5], "top_mlp": [1]})


def test_real_labels_need_a_loss_of_the_models_own() -> None:
    job = small_job("sgd", data={"columns": {"label_values": "real"}})
    with pytest.raises(ConfigError, match=facts('label_values = "real"', "binary cross entropy")):
        JobModel(job, NUM_DENSE)


def test_the_example_learns_both_labels() -> None:
    overrides = ("data.synthetic.samples=40000", "data.batch_size=512", "data.synthetic.scale=0.0001")
    job = load_job(ROOT / "examples" / "mmoe.toml", overrides)
    batches = list(schedule(job, open_reader(job)))
    slots = slots_for(group_specs(job), batches, "more")
    run = InProcessRun(job, batches, Settings(slots=slots, seeded_streams=False)).run()
    [evaluation] = run.results.evaluations
    assert [task.label for task in evaluation.tasks] == ["click", "buy"]
    assert all(task.auc is not None and task.auc > 0.6 for task in evaluation.tasks)
