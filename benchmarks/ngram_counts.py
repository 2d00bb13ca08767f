"""How good is a count of n-grams, without any training, where examples/adopt/ngram_lm.py trains a model?

    python -m benchmarks.ngram_counts --text FOLDER

Counts the bytes of the windows that the example trains on, or all of its training text, and gives bits a byte of the
windows that the example is evaluated on. Witten-Bell: the more different bytes followed a context c, the more weight
has the context s without its first byte, p(b | c) = (count(c b) + types(c) p(b | s)) / (count(c) + types(c)).
"""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from examples.adopt.ngram_lm import stretches, text_of

BEFORE = 5  # bytes before the first one that is predicted, which the example's look-ups see too
U64 = npt.NDArray[np.uint64]


def contexts(text: npt.NDArray[np.uint8], order: int) -> U64:
    """u8 [..., BEFORE + n] -> the `order` - 1 bytes before each of the last n, as one number."""
    found = np.zeros((*text.shape[:-1], text.shape[-1] - BEFORE), np.uint64)
    for back in range(order - 1, 0, -1):
        found = found * np.uint64(256) + text[..., BEFORE - back : text.shape[-1] - back]
    return found


def times(known: U64, counts: npt.NDArray[np.int64], asked: U64) -> npt.NDArray[np.int64]:
    """How often each of `asked` is among the sorted `known`."""
    places = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return np.where(known[places] == asked, counts[places], 0)


def bits_a_byte(counted: npt.NDArray[np.uint8], held_out: npt.NDArray[np.uint8], order: int) -> float:
    """`counted` and `held_out`: u8 [..., BEFORE + n], whose last n bytes count."""
    chance = np.full(held_out[..., BEFORE:].shape, 1 / 256)
    for length in range(1, order + 1):
        keys = contexts(counted, length) * np.uint64(256) + counted[..., BEFORE:]
        grams, of_grams = np.unique(keys, return_counts=True)
        before, first = np.unique(grams >> np.uint64(8), return_index=True)
        of_contexts, types = np.add.reduceat(of_grams, first), np.diff(np.append(first, len(grams)))
        context = contexts(held_out, length)
        seen = times(grams, of_grams, context * np.uint64(256) + held_out[..., BEFORE:])
        all_seen, different = times(before, of_contexts, context), times(before, types, context)
        chance = np.where(all_seen > 0, (seen + different * chance) / np.maximum(all_seen + different, 1), chance)
    return float(-np.log2(chance).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a folder of text files")
    parser.add_argument("--steps", type=int, default=400, help="batches of windows, as the example's")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    texts = {split: text_of(options.text, split) for split in ("train", "eval")}
    rngs = {split: np.random.default_rng([options.seed, 0, split == "eval"]) for split in texts}
    seen, held_out = (
        np.concatenate([*stretches(texts[split], steps, rngs[split])])
        for split, steps in (("train", options.steps), ("eval", 20))
    )
    for order in range(1, BEFORE + 1):  # order - 1 bytes before, and the byte itself
        own, whole = (bits_a_byte(counted, held_out, order) for counted in (seen, texts["train"]))
        print(
            f"{order - 1} bytes before: {own:.3f} bits a byte, counted in the windows; {whole:.3f} in all training text"
        )


if __name__ == "__main__":
    main()
