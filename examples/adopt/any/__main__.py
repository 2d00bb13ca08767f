"""Trains one of these scripts, as it is or adopted: `python -m examples.adopt.any skip_gram --adopt "800 rows"`."""

import argparse
from importlib import import_module

SCRIPTS = [
    *("bare_parameters", "drawn_candidates", "fit_in_library", "skip_gram", "sparse_bags", "weight_decay"),
    *("lightning", "hugging_face", "torchrec_model", "torchrec_sequence"),  # with packages that rowcast does not need
]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--adopt", default="", help="what the device has for tables")
    options = parser.parse_args()
    losses = import_module(f"examples.adopt.any.{options.script}").main(options.adopt)["losses"]
    print(f"{len(losses)} losses and measures, the last {losses[-1]:.4f}")
