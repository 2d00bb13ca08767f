"""What `rowcast prepare` leaves, and what processes that share a cache of loops do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
WIDTHS, SAMPLES = (8, 16, 24), 2048
# prints the loops of all files that have some and were never compiled; those of `serving` are not a job's
PREPARE = """
from importlib import import_module
from pathlib import Path
from rowcast.deploy.prepare import prepare
from rowcast.runtime.compiled import LOOPS
for path in [path for room in ("prefetcher", "protocol", "trainer") for path in Path(room).rglob("*.py")]:
    if "\\n@compiled" in path.read_text():
        module = path.parent if path.name == "__init__.py" else path.with_suffix("")
        import_module(".".join(("rowcast", *module.parts)))
prepare()
print([loop.py_func.__name__ for loop in LOOPS if not loop.signatures])
"""
LOOP = """
from rowcast.runtime.compiled import compiled_loop
from rowcast.runtime.compiled import LoopCache

@compiled_loop
def added(one: int, other: int) -> int:
    return one + other

LoopCache.say = lambda event, **context: print(event, context["loop"], context["cause"])
assert added(1, 2) == 3
print("compiled", sum(added.stats.cache_misses.values()))
"""


def python(cache: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(cache: Path, *arguments: str) -> str:
    process = python(cache, *arguments)
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0, out
    return out


def write_bags(path: Path) -> None:
    rng, offsets = np.random.default_rng(2), np.arange(0, 4 * SAMPLES + 1, 4, dtype=np.int32)
    bags = {f"f{n}": pa.ListArray.from_arrays(offsets, rng.integers(0, 10_000, 4 * SAMPLES)) for n in WIDTHS}
    dense = {f"int_{n}": rng.random(SAMPLES, np.float32) for n in range(2)}
    pq.write_table(pa.table({"label": rng.integers(0, 2, SAMPLES), **dense, **bags}), path)


def job(folder: Path, kind: str, dtype: str, master: str, store: str) -> Path:
    tables = "\n".join(
        f'[[tables]]\nname = "t{n}"\nnum_embeddings = 10_000\nembedding_dim = {n}\nfeatures = ["f{n}"]\n'
        f'dtype = "{dtype}"\npooling = "mean"'
        for n in WIDTHS
    )
    (folder / "job.toml").write_text(f"""
[job]
run_dir = "{folder / "run"}"
[data]
format = "parquet"
path = "{folder.parent / "bags.parquet"}"
batch_size = 64
{tables}
[model]
kind = "examples.custom_model:build"
[optimizer]
sparse = {{ kind = "{kind}", lr = 0.02{master} }}
dense = {{ kind = "adam", lr = 0.001 }}
[cache]
capacity = "1MiB"
{store}
[trainer]
threads = 1
""")
    return folder / "job.toml"


def test_jobs_that_prepare_has_not_seen_compile_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    printed = output(cache, "-c", PREPARE)
    assert printed.startswith("compiled ")
    assert f"they are in {cache}" in printed
    assert printed.splitlines()[-1] == "['philox']"  # it becomes part of the loops that call it
    write_bags(tmp_path / "bags.parquet")
    kept = sorted(cache.rglob("*.nbc"))
    tiered = '[store]\nkind = "tiered"\nmemory = "1GiB"'
    for number, (kind, dtype, master, store) in enumerate(
        [
            ("adagrad", "fp32", "", tiered),
            ("rowwise_adagrad", "fp32", "", "[ranks]\nparts = 2"),
            ("sgd", "fp32", "", ""),
            ("adam", "bf16", ", master = true", tiered),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = job(folder, kind, dtype, master, store)
        out = output(cache, "-m", "rowcast", "train", "--config", str(path), "--max-steps", "3")
        log = (folder / "run" / "prefetcher.log").read_text()
        assert "although they were prepared" not in out + log
        assert sorted(cache.rglob("*.nbc")) == kept, kind


def test_a_folder_that_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = python(tmp_path / "file" / "cache", "-m", "rowcast", "prepare")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert out == (
        f"rowcast prepare: NUMBA_CACHE_DIR = '{tmp_path / 'file' / 'cache'}' keeps no loops: nothing can be written "
        "there; set NUMBA_CACHE_DIR to a folder that this user may write to\n"
    )


@pytest.fixture
def loop(tmp_path: Path) -> str:
    (tmp_path / "cache").mkdir()
    (tmp_path / "loop.py").write_text(LOOP)
    return str(tmp_path / "loop.py")


def test_of_processes_that_start_together_one_compiles_a_loop(tmp_path: Path, loop: str) -> None:
    outs = [process.communicate(timeout=300)[0] for process in [python(tmp_path / "cache", loop) for _ in range(3)]]
    assert sorted(outs) == ["compiled 0\n", "compiled 0\n", "compiled 1\n"]


@pytest.mark.parametrize("ending", [".nbc", ".nbi"])
def test_a_truncated_file_is_compiled_again(tmp_path: Path, loop: str, ending: str) -> None:
    assert output(tmp_path / "cache", loop) == "compiled 1\n"
    [path] = (tmp_path / "cache").rglob(f"*{ending}")
    os.truncate(path, path.stat().st_size // 2)
    assert output(tmp_path / "cache", loop) == "compiled 1\n"
    assert output(tmp_path / "cache", loop) == "compiled 0\n"


def test_a_killed_holder_leaves_no_lock(tmp_path: Path, loop: str) -> None:
    holding = Path(loop).read_text().replace("assert added", "LoopCache.save_overload = hang\nassert added")
    hang = "import time\ndef hang(*own):\n    print('holds', flush=True)\n    time.sleep(600)\n"
    process = python(tmp_path / "cache", "-c", f"exec(compile({hang + holding!r}, {loop!r}, 'exec'))")
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    waiting = python(tmp_path / "cache", loop)
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert waiting.communicate(timeout=100)[0] == "compiled 1\n"  # sooner than a wait for a living one ends


def test_a_start_that_compiles_although_prepared_says_why(tmp_path: Path, loop: str) -> None:
    note = "import sys; from rowcast.runtime.compiled import note_prepared; note_prepared(sys.argv[1])"
    output(tmp_path / "cache", loop)
    [folder] = [path.parent for path in (tmp_path / "cache").rglob("*.nbi") if path.name.startswith("loop.")]
    for path in folder.glob("*.nb?"):
        path.unlink()
    (folder / "rowcast.loops").write_text("numba 0.60.0, processor nehalem 00000000\n")
    said, compiled = output(tmp_path / "cache", loop).splitlines()
    assert said.startswith("a loop is compiled, although they were prepared __main__.added this is numba ")
    output(tmp_path / "cache", "-c", note, str(folder))
    Path(loop).write_text(LOOP.replace("one + other", "other + one"))
    said, compiled = output(tmp_path / "cache", loop).splitlines()
    assert (said.split("added ")[1], compiled) == ("its code or its types are not those of then", "compiled 1")
