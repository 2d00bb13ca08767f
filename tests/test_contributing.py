"""CONTRIBUTING.md's recipes, followed to the letter in a copy of the tree: the new file, the one line, and a job that
trains with both.

A section with code is a recipe. A path in backticks on a line of its own says where the block below it goes: into a new
file, or, with ", in `NAME`", below the line where the table NAME begins, or, with ", above `class NAME`", above that
class. So a recipe is one file and one entry of a table, with a struct beside the table for keys of its own. The `toml`
block is laid over a small job.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.jobs import job_content, write_job

ROOT = Path(__file__).parent.parent
ROOMS = ("rowcast", "runtime", "job", "protocol", "prefetcher", "trainer", "deploy", "benchmarks")
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = {
    title: text
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    if "```" in text
}
PLACE = r"^`(?P<path>[\w/]+\.py)`(?:, (?P<place>in|above) `(?P<name>[\w ]+)`)?\n\n"
BLOCK = re.compile(PLACE + r"```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 120.0
NUM_STEPS, BATCH_SIZE = 20, 64
MODEL = """
import torch


class Small(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.top = torch.nn.Linear(width, 1)

    def forward(self, dense, embeddings):
        return self.top(torch.cat(embeddings, dim=1)).squeeze(1)


def build(job, num_dense):
    return Small(len(job.features) * job.tables[0].embedding_dim)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the packages, with what numba has compiled for them."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / "tree" / room, symlinks=True)
    return tmp_path / "tree"


def follow(recipe: str, tree: Path) -> None:
    blocks = list(BLOCK.finditer(recipe))
    assert len({block["path"] for block in blocks}) == 2, "a recipe is a new file and one that is there"
    for path, place, name, code in (block.groups() for block in blocks):
        if place is None:
            assert not (tree / path).exists(), f"{path} is there already"
            (tree / path).write_text(code, encoding="utf-8")
        else:
            (tree / path).write_text(with_code(tree / path, place, name, code), encoding="utf-8")


def with_code(file: Path, place: str, name: str, code: str) -> str:
    text = file.read_text(encoding="utf-8")
    begins = rf"^{name}\b.*[{{(\[]\n" if place == "in" else rf"^(?:@.*\n)?{name}\b"
    [found] = re.finditer(begins, text, re.MULTILINE)
    if place == "in":
        return text[: found.end()] + code + text[found.end() :]
    return text[: found.start()] + f"{code}\n\n" + text[found.start() :]


def settings_of(recipe: str) -> dict[str, Any]:
    [settings] = re.findall(r"^```toml\n(.*?)^```$", recipe, re.MULTILINE | re.DOTALL)
    return tomllib.loads(settings)


def train(tree: Path, name: str, **sections: Any) -> subprocess.CompletedProcess[str]:
    """A job with these sections, by both processes of the tree."""
    sections["data"] = {"batch_size": BATCH_SIZE, **sections.get("data", {})}
    sections["model"] = {"kind": "small:build", "bottom_mlp": None, "top_mlp": None, **sections.get("model", {})}
    write_job(tree / f"{name}.toml", job_content(tree / name, **sections))
    (tree / "small.py").write_text(MODEL)
    with (tree / "clicks.jsonl").open("w") as clicks:
        for sample in range(BATCH_SIZE * NUM_STEPS):
            ids = {f"cat_{i}": sample * (7 + i) % 100 for i in range(2)}
            clicks.write(json.dumps({"label": sample % 3 // 2, **ids}) + "\n")
    command = ["-m", "rowcast.deploy.local", "--config", f"{name}.toml", "--max-steps", str(NUM_STEPS)]
    return run(tree, *command)


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def losses(tree: Path, name: str) -> list[float]:
    return [float(loss) for loss in np.fromfile(tree / name / "losses.f32", np.float32)]


@pytest.mark.parametrize("title", RECIPES)
def test_what_a_recipe_adds_is_trained_with_once_it_was_followed(title: str, tree: Path) -> None:
    recipe = RECIPES[title]
    before = train(tree, "before", **settings_of(recipe))
    assert before.returncode == 2, f"a job for what is not there ended with {before.returncode}:\n{before.stderr}"
    follow(recipe, tree)
    after = train(tree, "after", **settings_of(recipe))
    assert after.returncode == 0, after.stderr
    assert len(losses(tree, "after")) == NUM_STEPS
    assert np.isfinite(losses(tree, "after")).all()


OWN_KEYS = {  # a recipe -> its own key, a value that is refused, and the range that the sentence and the page give
    "A model": ("model.hidden", 0, "whole number from 1 to 2**20"),
    "A row optimizer": ("optimizer.sparse.decay", 1.0, "number of at least 0 and below 1"),
}


@pytest.mark.parametrize("title", OWN_KEYS)
def test_a_key_of_its_own_has_its_range_in_the_sentence_and_on_the_page(title: str, tree: Path) -> None:
    follow(RECIPES[title], tree)
    key, value, allowed = OWN_KEYS[title]
    *sections, name = key.split(".")
    settings = settings_of(RECIPES[title])
    section = settings
    for inner in sections:
        section = section[inner]
    section[name] = value
    ended = train(tree, "refused", **settings)
    assert ended.returncode == 2
    assert f"{key} = {value} must be a {allowed}" in ended.stderr
    page = run(tree, "-m", "benchmarks.job_page")
    assert re.search(rf"^\| `{name}` \| a {re.escape(allowed)} \|", page.stdout, re.MULTILINE)


def test_the_store_of_the_recipe_gives_the_bits_of_rows_in_memory(tree: Path) -> None:
    follow(RECIPES["A store"], tree)
    for name, sections in (("dict", settings_of(RECIPES["A store"])), ("memory", {})):
        ended = train(tree, name, **sections)
        assert ended.returncode == 0, ended.stderr
    assert losses(tree, "dict") == losses(tree, "memory")


def test_the_page_has_a_recipe_for_each_kind_of_part() -> None:
    assert RECIPES.keys() >= {"A reader", "A store", *OWN_KEYS}
