"""examples/adopt/ddp.py as a user starts it, as it is and adopted: both end with the same bits."""

import random
import subprocess
import sys
from pathlib import Path

import torch

from tests.support.processes import ROOT, Session
from tests.support.twins import bytes_by_name


def test_a_script_with_ddp_ends_with_the_same_bits_when_it_is_adopted(tmp_path: Path) -> None:
    ends = []
    with Session(tmp_path) as session:
        for adopt in ("", "4000 rows"):
            arguments = ["--nproc-per-node=2", "-m", "examples.adopt.ddp", "--adopt", adopt, "--end", f"{tmp_path}/end"]
            ended = session.start_module("rowcast.deploy.torchrun", *arguments, PYTHONPATH=".").ended(200)
            assert ended.code == 0, ended.stderr
            assert ("rows stay on the device" in ended.stderr) == bool(adopt)
            ends.append(bytes_by_name(torch.load(tmp_path / "end")))
    assert ends[0] == ends[1]


def test_a_language_model_beside_a_hashed_table_ends_with_the_same_bits_when_it_is_adopted(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} " * 3000)
    ends = []
    with Session(tmp_path) as session:
        for plain in ([], ["--plain"]):
            paths = [f"--text={tmp_path}/text", f"--tables={tmp_path}/tables{len(plain)}", f"--end={tmp_path}/end"]
            script = session.start_module(
                "examples.adopt.ngram_lm", *paths, "--rows=20000", "--steps=6", "--capacity=9000 rows", *plain
            )
            ended = script.ended(200)
            assert ended.code == 0, ended.stderr
            ends.append(bytes_by_name(torch.load(tmp_path / "end")))
    assert ends[0] == ends[1]


def test_the_import_of_adopt_draws_no_random_number_of_the_scripts() -> None:
    code = "import random, rowcast; random.seed(3); rowcast.adopt; print(random.random())"
    expected = random.Random(3).random()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) == expected
