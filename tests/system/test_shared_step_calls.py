"""What a train step of parts asks torch for: on a device each call is a launch, and each number of the host a wait."""

from collections import Counter
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rowcast.job.tables import group_specs
from rowcast.trainer.models.shared_runner import SharedRunner
from tests.support import jobs
from tests.support.batches import Bags, slots_for, small_batches
from tests.support.driver import Settings
from tests.support.ranked_run import RankedRun

# calls that only describe memory, or take it
VIEWS = (
    *("view", "detach", "alias", "split", "slice", "unbind", "select.int", "t.default", "transpose", "expand"),
    *("as_strided", "empty", "permute", "squeeze"),
)
NUMBERS = ("lift_fresh", "_local_scalar_dense")  # numbers of the host made to a tensor, or the reverse


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of torch in the train steps of parts, from the third on: the first ones make what is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.numbers, self.steps = Counter[str](), Counter[str](), 0
        issue = SharedRunner.issue_train

        def counted(runner: SharedRunner, *arguments: Any) -> None:
            self.steps += 1
            if self.steps < 3:
                issue(runner, *arguments)
                return
            with pytest.MonkeyPatch.context() as patched, self:
                for name in ("tolist", "item"):
                    patched.setattr(Tensor, name, self._noted(name, getattr(Tensor, name)))
                issue(runner, *arguments)

        monkeypatch.setattr(SharedRunner, "issue_train", counted)

    def _noted(self, name: str, method: Any) -> Any:
        def noted(tensor: Tensor, *arguments: Any) -> Any:
            self.numbers[name] += 1
            return method(tensor, *arguments)

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(number in name for number in NUMBERS):
            self.numbers[name] += 1
        if not any(view in name for view in VIEWS):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bags", ["single", "mean"])
def test_a_step_of_four_parts_makes_and_reads_no_number_on_the_host(
    bags: Bags, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DLRM of 14 weights over 26 features: what a step of one part does in 74 calls."""
    tables = [jobs.table(f"t{place}", 50 + place, 16, pooling="sum") for place in range(26)]
    tables[0]["pooling"] = "mean" if bags == "mean" else "sum"
    content = {
        "data": {"format": "tests.support.batches:unused", "batch_size": 64},
        "tables": tables,
        "model": {"kind": "dlrm", "bottom_mlp": [8, 4, 4, 16], "top_mlp": [4, 4, 1]},
        "optimizer": {"sparse": {"kind": "adagrad", "lr": 0.02}},
    }
    job = jobs.job(**content)
    batches = small_batches(job, bags, num_steps=6, eval_at=())
    counted = Calls(monkeypatch)
    settings = Settings(slots=slots_for(group_specs(job), batches, "everything"), seeded_streams=False)
    run = RankedRun(job, batches, settings, ranks=1, parts=4).run()
    assert len(dict(run.pairs[0].runner.model.named_parameters())) == 14
    assert counted.steps == 6
    assert not counted.numbers
    calls = sum(counted.calls.values()) / 4
    assert 74 < calls <= 280, counted.calls
