"""What does a step cost that a row of a dense rule takes later, against the same step of a whole table in torch?

    python -m benchmarks.catch_up [--rows 6500] [--dim 16] [--steps 1000] [--whole 100000] [--rounds 7]

A whole table takes all steps in torch, with one thread, the rate changing at each. Some of its rows are kept as they
were after a step drawn from the first half, and catch up in one call. Then pairs: some steps of the whole table, one
catching up of the same rows. Processor time, medians over the pairs. The last column counts values with other bits than
the whole table's: 0.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import machine, write_result
from rowcast.trainer.adopt.catch_up import catch_up
from rowcast.trainer.adopt.missed_steps import StepLog, has_rows
from rowcast.trainer.adopt.records import Records

RULES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {}),
    "Adam, decay 0.01": (torch.optim.Adam, {"weight_decay": 0.01}),
    "Adam, amsgrad, decay 0.01": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.01}),
    "SGD, momentum, decay": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "Adagrad, decay (the rule itself)": (torch.optim.Adagrad, {"weight_decay": 0.01}),
}
WHOLE_STEPS = 10  # steps over the whole table that each round times


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("rows", 6500), ("dim", 16), ("steps", 1000), ("whole", 100_000), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(machine())
    print(
        f"{'rule':34s} {'whole':>7s} {'missed':>7s} {'ratio':>6s} {'steps given':>12s} {'seconds':>8s} {'differ':>7s}"
    )
    results = {name: measured(*rule, asked) for name, rule in RULES.items()}
    for name, line in results.items():
        print(
            f"{name:34s} "
            + "{whole:7.2f} {missed:7.2f} {ratio:6.2f} {given:12,d} {seconds:8.3f} {differ:7d}".format(**line)
        )
    print("whole, missed: ns of processor time an element's step")
    write_result("catch_up", asked=vars(asked), results=results)


def measured(
    rule: Callable[..., torch.optim.Optimizer], hyper: dict[str, Any], asked: argparse.Namespace
) -> dict[str, Any]:
    param = nn.Parameter(torch.randn(asked.whole, asked.dim) * 0.1)
    optimizer = rule([param], lr=1e-3, **hyper)
    log = StepLog(type(optimizer))
    lasts = torch.randint(1, asked.steps // 2, (asked.rows,))
    kept: dict[str, Tensor] = {}
    for step in range(asked.steps):
        for name, whole in fields(param, optimizer):
            mine = kept.setdefault(name, torch.zeros(asked.rows, asked.dim))
            mine[lasts == step] = whole[: asked.rows][lasts == step]
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + 0.5 * math.cos(step / 50))
        param.grad = torch.randn_like(param) if step == 0 else torch.zeros_like(param)
        log.append(optimizer.param_groups[0], optimizer.state.get(param, {}))
        optimizer.step()
    expected = dict(fields(param, optimizer))
    expected = {name: whole[: asked.rows].clone() for name, whole in expected.items()}
    wholes, missed, given = [], [], 0
    for _ in range(asked.rounds + 1):  # the first one compiles
        wholes.append(seconds_of(lambda: [optimizer.step() for _ in range(WHOLE_STEPS)]))
        own = {name: array.clone() for name, array in kept.items()}
        states = {name: array for name, array in own.items() if name != "weights"}
        rows = Records(own["weights"], states, lasts.clone())
        given = asked.steps * asked.rows - int(lasts.sum())
        missed.append(seconds_of(lambda: catch_up(rows, log)))  # noqa: B023 - called here
    whole_ns = [1e9 * each / (WHOLE_STEPS * param.numel()) for each in wholes[1:]]
    missed_ns = [1e9 * each / (given * asked.dim) for each in missed[1:]]
    return {
        "whole": statistics.median(whole_ns),
        "missed": statistics.median(missed_ns),
        "ratio": statistics.median(mine / theirs for mine, theirs in zip(missed_ns, whole_ns, strict=True)),
        "given": given,
        "seconds": statistics.median(missed[1:]),
        "differ": sum(int((own[name].view(torch.int32) != expected[name].view(torch.int32)).sum()) for name in own),
    }


def fields(param: Tensor, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    yield "weights", param.detach()
    yield from ((name, state) for name, state in optimizer.state.get(param, {}).items() if has_rows(state))


def seconds_of(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    main()
