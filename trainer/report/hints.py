"""Hints at the end of a run: figures that are right, but that nobody wants. One sentence for each, and no error."""

from collections.abc import Iterator

from rowcast.trainer.report.report_json import Report
from rowcast.trainer.step.results import TaskEvaluation

HIGH_LOSS = 10.0  # untrained logits near 0 have a binary cross entropy of 0.69


def hints(report: Report) -> Iterator[str]:
    if report.accuracy is None or report.is_own_loss:
        return  # without logits, or with a loss of the model's own, each of these may be as it should
    if (report.first_loss or 0.0) > HIGH_LOSS:
        yield (
            f"the first loss was {report.first_loss:,.1f}, and small logits have 0.7; scale dense features, or take "
            "their logarithms"
        )
    labelled: tuple[Report | TaskEvaluation, ...] = report.tasks or (report,)
    for found in labelled:
        of = f"label {found.label}: " if isinstance(found, TaskEvaluation) else ""
        if found.auc is None and found.logloss is not None:
            yield (
                f"{of}all labels of the evaluation are equal, so AUC is undefined; hold out more or other samples "
                "(data.eval_fraction, data.eval_path)"
            )
        if (found.normalized_entropy or 0.0) > 1.0:
            yield (
                f"{of}normalized entropy is above 1: always answering the share of positive labels has a lower log "
                "loss; try other learning rates, scaled dense features, or fewer epochs"
            )
