"""A small job, and the rates of a made-up device for it."""

from typing import Any

from rowcast.analysis.estimate.rates_file import OVERHEADS, RATES_VERSION, DeviceRates, KernelRates, model_fingerprint
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from tests.support.jobs import laid_over

KERNELS = (
    "copy in", "gather", "scatter", "copy out", "lookup", "update adagrad", "model forward", "model backward",
    "model update",
)  # fmt: skip
PARAMETERS = 1000


def job(**changes: Any) -> Job:
    content = {
        "job": {"run_dir": "unused", "seed": 1},
        "data": {
            "format": "synthetic",
            "batch_size": 64,
            "eval_fraction": 0.1,
            "synthetic": {"preset": "criteo-kaggle", "scale": 1e-4, "samples": 3000},
        },
        "tables_from": {"embedding_dim": 4},
        "model": {"kind": "dlrm", "bottom_mlp": [4], "top_mlp": [1]},
        "optimizer": {"sparse": {"kind": "adagrad", "lr": 0.1}, "dense": {"kind": "sgd", "lr": 0.1}},
        "cache": {"capacity": "1000 rows"},
        "checkpoint": {"every": 20},
        "lookahead": {"depth": 2},
    }
    return parse_job(laid_over(content, changes))


def device(per_step: float = 0.0, **kernels: dict[str, float]) -> DeviceRates:
    """Kernels that are not named take no time. `per_step`: overhead of a step, in Python."""
    overhead = {"Python": {"1": per_step}, "message": {"1": 2e-4}}
    return DeviceRates(
        version=RATES_VERSION,
        machine="made up",
        device="cpu",
        clock="cpu",
        torch="2",
        threads=1,
        model=model_fingerprint(job()),
        parameters=PARAMETERS,
        kernels={
            name: KernelRates(terms=overhead.get(name) or kernels.get(name.replace(" ", "_"), {"1": 0.0}))
            for name in (*KERNELS, *OVERHEADS)
        },
    )


def host(read: float = 0.0, first: float = 0.0, write: float = 0.0) -> dict[str, KernelRates]:
    """Seconds of a row."""
    [group] = group_specs(job())
    rates = {"read": read, "first": first, "write": write}
    return {f"{name} {group.name}": KernelRates(terms={"rows": seconds}) for name, seconds in rates.items()}
