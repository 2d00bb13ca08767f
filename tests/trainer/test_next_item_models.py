"""SASRec and HSTU against a second implementation: sample by sample, without padding, in plain operations."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, silu

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models import build_model
from rowcast.trainer.models.embedding import Sequences
from rowcast.trainer.models.next_item import NextItemModel, Scores, time_classes
from tests.support.facts import facts
from tests.support.next_item import HEADS, ITEMS, KINDS, LENGTH, WIDTH, job_of

CANDIDATES = 11


class Sample(NamedTuple):
    history: Tensor  # i64 [n], the newest at the right
    times: Tensor  # i64 [n]
    positives: Tensor  # i64 [p]


def samples_of(seed: int) -> list[Sample]:
    """Histories without items, short, full and too long ones; positives for each place or for the last one."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [(3, 3), (0, 0), (1, 1), (LENGTH, 2), (LENGTH + 3, LENGTH + 3), (5, 0)]
    return [
        Sample(
            history=torch.randint(ITEMS, (items,), generator=generator),
            times=torch.randint(0, 100_000, (items,), generator=generator).cumsum(0),
            positives=torch.randint(ITEMS, (positives,), generator=generator),
        )
        for items, positives in lengths
    ]


def sequences(values: list[Tensor], table: Tensor | None = None) -> Sequences:
    joined = torch.cat(values)
    offsets = torch.tensor([0, *(len(own) for own in values)]).cumsum(0).int()
    return Sequences(values=joined if table is None else table[joined], offsets=offsets)


def scores_of(model: NextItemModel, table: Tensor, samples: list[Sample], candidates: Tensor, log_q: Tensor) -> Scores:
    histories, positives = [own.history for own in samples], [own.positives for own in samples]
    scores: Scores = model(
        torch.zeros(len(samples), 0),
        [sequences(histories, table), sequences(positives, table), table[candidates % ITEMS]],
        inputs={
            "time": sequences([own.times for own in samples]),
            "positive.id": sequences(positives),
            "negative.id": candidates,
            "negative.log_q": log_q,
        },
    )
    return scores


def plain_loss(model: NextItemModel, table: Tensor, samples: list[Sample], candidates: Tensor, log_q: Tensor) -> Tensor:
    own: dict[str, Tensor] = dict(model.named_parameters())
    losses = []
    for sample in samples:
        kept = min(len(sample.history), LENGTH)
        history, times = sample.history[len(sample.history) - kept :], sample.times[len(sample.times) - kept :]
        vectors = ENCODERS[type(model).__name__](own, table[history], times)
        positives = sample.positives[max(0, len(sample.positives) - LENGTH) :]
        of_sample = []
        for vector, positive in zip(vectors[kept - len(positives) :], positives, strict=True):
            score = vector @ table[positive]
            others = [
                (vector @ table[item] - q - math.log(CANDIDATES)).exp()
                for item, q in zip(candidates, log_q, strict=True)
                if item != positive
            ]
            of_sample.append(-(score.exp() / (score.exp() + torch.stack(others).sum())).log())
        losses.append(torch.stack(of_sample).mean() if of_sample else torch.zeros(()))
    return torch.stack(losses).mean()


def affine(own: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]


def norm(x: Tensor, scale_and_bias: Tensor) -> Tensor:
    return layer_norm(x, (WIDTH,)) * scale_and_bias[0] + scale_and_bias[1]


def sasrec(own: dict[str, Tensor], items: Tensor, times: Tensor) -> Tensor:
    x = items * math.sqrt(WIDTH) + own["place"][LENGTH - len(items) :]
    for block in ("blocks.0", "blocks.1"):
        query = affine(own, f"{block}.query", norm(x, own[f"{block}.norms.0"]))
        key, value = (affine(own, f"{block}.{name}", x) for name in ("key", "value"))
        rows = []
        for t in range(len(x)):
            heads = []
            for head in torch.arange(WIDTH).chunk(HEADS):
                weights = (key[: t + 1, head] @ query[t, head] / math.sqrt(WIDTH // HEADS)).softmax(0)
                heads.append(weights @ value[: t + 1, head])
            rows.append(torch.cat(heads))
        x = x + affine(own, f"{block}.out", torch.stack(rows)) if rows else x
        inner = affine(own, f"{block}.ffn.0", norm(x, own[f"{block}.norms.1"])).relu()
        x = x + affine(own, f"{block}.ffn.1", inner)
    return norm(x, own["norm"])


def hstu(own: dict[str, Tensor], items: Tensor, times: Tensor) -> Tensor:
    x = items
    for layer in ("layers.0", "layers.1"):
        gate, value, query, key = torch.split(silu(affine(own, f"{layer}.into", layer_norm(x, (WIDTH,)))), WIDTH, dim=1)
        rows = []
        for t in range(len(x)):
            row = torch.zeros(WIDTH)
            for s in range(t + 1):
                between = int(times[t] - times[s])
                bias = own[f"{layer}.distance"][t - s] + own[f"{layer}.time"][max(between, 1).bit_length() - 1]
                for head in torch.arange(WIDTH).chunk(HEADS):
                    weight = silu(query[t, head] @ key[s, head] + bias) / LENGTH
                    row = row.index_add(0, head, weight * value[s, head])
            rows.append(row)
        if rows:
            x = x + affine(own, f"{layer}.out", layer_norm(torch.stack(rows), (WIDTH,)) * gate)
    return x


ENCODERS = {"SASRec": sasrec, "HSTU": hstu}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_a_second_implementation(kind: str) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        model = build_model(job_of(kind), num_dense=0)
        assert isinstance(model, NextItemModel)
        for parameter in model.parameters():  # the biases begin at 0
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        table = torch.randn(ITEMS, WIDTH, generator=generator, requires_grad=True)
        candidates = torch.randint(ITEMS, (CANDIDATES,), generator=generator)
        log_q = torch.rand(CANDIDATES, generator=generator).log() - 2
        samples = samples_of(seed)
        wanted = [*model.parameters(), table]
        ours = model.loss(scores_of(model, table, samples, candidates, log_q), torch.zeros(len(samples)))
        plain = plain_loss(model, table, samples, candidates, log_q)
        assert ours.item() == pytest.approx(plain.item(), rel=1e-5)
        for own, expected in zip(torch.autograd.grad(ours, wanted), torch.autograd.grad(plain, wanted), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
            assert expected.abs().max() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_batch_have_its_loss_and_its_ranks(kind: str) -> None:
    model = build_model(job_of(kind), num_dense=0)
    assert isinstance(model, NextItemModel)
    table = torch.randn(ITEMS, WIDTH, generator=torch.Generator().manual_seed(0))
    candidates, log_q = torch.arange(CANDIDATES), torch.full((CANDIDATES,), -3.0)
    samples = samples_of(1)
    whole = scores_of(model, table, samples, candidates, log_q)
    parts = [scores_of(model, table, own, candidates, log_q) for own in (samples[:2], samples[2:])]
    no_labels = torch.zeros(0)
    mean = (2 * model.loss(parts[0], no_labels) + 4 * model.loss(parts[1], no_labels)) / 6
    assert mean.item() == pytest.approx(model.loss(whole, no_labels).item(), rel=1e-6)
    assert torch.equal(torch.cat([model.ranks(part) for part in parts]), model.ranks(whole))
    assert len(model.ranks(whole)) == 3 + 1 + 2 + LENGTH, "a positive that is older than the history is left out"


@pytest.mark.parametrize("value", [0.3, math.nan])
def test_a_model_that_scores_all_items_alike_finds_none(value: float) -> None:
    model = build_model(job_of("sasrec"), num_dense=0)
    assert isinstance(model, NextItemModel)
    table = torch.full((ITEMS, WIDTH), value)
    outputs = scores_of(model, table, samples_of(1), torch.arange(CANDIDATES) + ITEMS, torch.zeros(CANDIDATES))
    assert set(model.ranks(outputs).tolist()) == {CANDIDATES}


def test_all_items_as_candidates_give_the_softmax_over_all() -> None:
    model = build_model(job_of("sasrec"), num_dense=0)
    assert isinstance(model, NextItemModel)
    table, candidates = torch.randn(ITEMS, WIDTH, generator=torch.Generator().manual_seed(2)), torch.arange(ITEMS)
    sample = samples_of(3)[0]._replace(positives=torch.tensor([7]))
    inputs = {"positive.id": sequences([sample.positives]), "negative.id": candidates}
    rows = [sequences([sample.history], table), sequences([sample.positives], table), table]
    loss = model.loss(model(torch.zeros(1, 0), rows, inputs=inputs), torch.zeros(1))
    own: dict[str, Tensor] = dict(model.named_parameters())
    vector = sasrec(own, table[sample.history], sample.times)[-1]
    assert loss.item() == pytest.approx(-(table @ vector).log_softmax(0)[7].item(), rel=1e-5)


def test_times_are_classed_by_their_exact_logarithm() -> None:
    times = torch.tensor([-5, 0, 1, 2, 3, 4, 2**31 - 1, 2**31, 2**52 - 1, 2**52])
    assert time_classes(times).tolist() == [0, 0, 0, 1, 1, 2, 30, 31, 51, 52]


def test_a_missing_array_is_named() -> None:
    model = build_model(job_of("sasrec"), num_dense=0)
    samples, table = samples_of(1), torch.zeros(ITEMS, WIDTH)
    rows = [sequences([own.history for own in samples], table), sequences([own.positives for own in samples], table)]
    with pytest.raises(ConfigError, match=facts("positive.id", "none")):
        model(torch.zeros(len(samples), 0), [*rows, table])
    with pytest.raises(ConfigError, match=facts("positive.id", "data.of.positive.id")):
        model(torch.zeros(len(samples), 0), [*rows, table], inputs={"positive.id": torch.zeros(3)})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"heads": 3}, ("model.heads", "3", "8")),
        ({"positive_feature": "next"}, ("model.positive_feature", "next")),
        ({"positive_feature": "history"}, ("feature positive", "no use")),
        ({"candidate_feature": "positive"}, ("positive", "data.negatives", "data.of.positive")),
    ],
)
def test_a_job_that_does_not_fit_is_refused(settings: dict[str, object], named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=facts(*named)):
        job_of("hstu", **settings)
