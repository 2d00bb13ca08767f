"""The result of an evaluation so far."""

from rowcast.trainer.models.evaluate import EvalCounts, EvalMetrics, Evaluation


def result_of(metrics: EvalMetrics | EvalCounts) -> Evaluation:
    counts = metrics if isinstance(metrics, EvalCounts) else metrics.counts
    found = counts.result(0, [str(label) for label in range(len(counts.num_labels))], ())
    assert found is not None, "there were samples"
    return found
