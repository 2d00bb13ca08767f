"""Several labels a sample, some of them unknown: the bits of the plain loop, evaluations by label, MMoE."""

from pathlib import Path

import pytest

from rowcast.job.file import load_job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.messages import StopRequest
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.job_model import JobModel
from rowcast.trainer.models.model_state import unpack
from tests.support.batches import NUM_DENSE, SEVERAL_LABELS, slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings
from tests.support.facts import facts

ROOT = Path(__file__).parents[2]


def test_a_checkpoint_of_one_label_holds_what_it_always_held() -> None:
    job = small_job("sgd")
    batches = small_batches(job, "single", num_steps=2, eval_at=(2, 3))
    run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more")))
    run.prefetcher.planning.due.stop(StopRequest(reason="within the evaluation", after_step=2))
    run.run()
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
