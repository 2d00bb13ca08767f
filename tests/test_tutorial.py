"""Both notebooks run from an empty folder with nothing but the wheel, and find what their texts say."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK, QUICKSTART = ROOT / "examples" / "tutorial.ipynb", ROOT / "examples" / "quickstart.ipynb"
MOST_BYTES = 60_000
FIGURES = ["skew-plot", "cache-plot", "trace-plot", "future-plot", "loss-plot", "fae-plot"]
FINDINGS = """
import json

print(json.dumps({
    "by_hand": by_hand, "seconds": [gather_s, model_s, update_s], "distinct": [distinct, full_batch.ids.size],
    "top_tenth": list(top_tenth.values()), "first_times": first_times,
    "distinct_rows": float(np.mean(distinct_rows)),
    "fetched": fetched, "horizons": horizons, "ahead": ahead, "static": rows_fetched(SLOTS, "static") / len(scheduled),
    "lru": rows_fetched(SLOTS, "lru") / len(scheduled),
    "small_trace": [sum(len(came) for _, came in history) for history in stays.values()],
    "planned": planned, "reported": report.rows_fetched, "steps": report.steps, "evicted": report.rows_evicted,
    "auc": report.auc,
    "knows_nothing": float(knows_nothing), "losses": losses.tolist(), "resident": resident.losses.tolist(),
    "differing_losses": int(differing_losses), "differing": differing, "compared": len(theirs),
    "resident_evicted": evicted, "step_ms": list(step_ms.values()),
    "hot_share": float(hot_share), "judged": float(judged),
    "covered": covered_by, "as_read": as_read.tolist(), "in_blocks": in_blocks.tolist(),
    "ways": [(ways.losses == on_cpu.losses, ways.bytes, ways.auc(steps))
             for ways, steps in ((on_cpu, scheduled), (hybrid, blocks), (ahead_way, scheduled))],
    "left_behind": work.exists(),
}))
"""

pytestmark = pytest.mark.timeout(600)  # where the planner's loops are not compiled yet and others share the machine


QUICK_FINDINGS = """
import json
from pathlib import Path

print(json.dumps({
    "steps": len(once.losses), "ended": [len(trained.losses) for trained in (run, *runs.values())], "best": best,
    "logloss": {rate: best_loss(trained) for rate, trained in runs.items()},
    "auc": float(auc(chance, late)), "share": float(late.mean()), "riskiest": float(late[riskiest].mean()),
    "files": sorted(path.name for path in Path().iterdir()),
}))
"""


def cells(notebook: Path) -> list[dict[str, Any]]:
    return list(json.loads(notebook.read_text())["cells"])


@pytest.mark.parametrize("notebook", [NOTEBOOK, QUICKSTART], ids=lambda own: own.stem)
def test_a_notebook_is_stored_without_outputs_under_names_that_stay(notebook: Path) -> None:
    for cell in cells(notebook):
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), (
                f"cell {cell['id']} is stored with outputs; clear them"
            )
    ids = [cell["id"] for cell in cells(notebook)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in ids), (
        f"a cell's id is not a name; give it one: {ids}"
    )
    assert notebook.stat().st_size < MOST_BYTES


def test_the_quickstart_has_at_most_ten_cells() -> None:
    assert len(cells(QUICKSTART)) <= 10


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an installed wheel, built from this checkout."""
    folder = tmp_path_factory.mktemp("installed")
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_notebook(path: Path, findings: str, installed: Path, folder: Path) -> dict[str, Any]:
    """The notebook's code cells after a run in a kernel of its own in an empty folder, by name, and `findings` behind
    them."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib.font_manager")  # its first import on a machine takes long, and says so
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    notebook.cells.append(nbformat.v4.new_code_cell(findings, id="findings"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(installed))
        environment.setenv("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to other tests
        client = nbclient.NotebookClient(
            notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )
        try:
            client.execute()
        except nbclient.exceptions.CellExecutionError as error:
            pytest.fail(str(error), pytrace=False)
    return {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}


def printed(executed: dict[str, Any]) -> dict[str, Any]:
    (output,) = executed["findings"].outputs
    return dict(json.loads(output.text))


@pytest.fixture(scope="module")
def executed(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_notebook(NOTEBOOK, FINDINGS, installed, tmp_path_factory.mktemp("empty"))


@pytest.fixture(scope="module")
def found(executed: dict[str, Any]) -> dict[str, Any]:
    return printed(executed)


def test_the_quickstart_trains_predicts_and_compares_runs(installed: Path, tmp_path: Path) -> None:
    found = printed(run_notebook(QUICKSTART, QUICK_FINDINGS, installed, tmp_path))
    assert all(3 * found["steps"] <= ended < 10 * found["steps"] for ended in found["ended"])
    assert found["auc"] > 0.6
    assert found["riskiest"] > 1.5 * found["share"]
    assert found["logloss"][str(found["best"])] == min(found["logloss"].values())
    assert found["files"] == ["flights.csv", "runs"]


def test_every_cell_runs_without_a_warning(executed: dict[str, Any]) -> None:
    assert [cell.execution_count for cell in executed.values()] == list(range(1, len(executed) + 1))
    for name, cell in executed.items():
        for output in cell.outputs:
            assert output.output_type in ("stream", "display_data"), f"cell {name} leaves {output}"
            assert output.get("name") != "stderr", f"cell {name} says {output.text}"
            assert "Warning" not in output.get("text", ""), f"cell {name} says {output.text}"


def test_every_figure_is_drawn(executed: dict[str, Any]) -> None:
    drawn = [
        name for name, cell in executed.items() for output in cell.outputs if "image/png" in output.get("data", {})
    ]
    assert drawn == FIGURES


def test_the_model_by_hand_is_the_projects_own(found: dict[str, Any]) -> None:
    assert found["by_hand"] is True
    assert min(found["seconds"]) > 0


def test_rows_are_used_as_unevenly_as_the_text_says(found: dict[str, Any]) -> None:
    assert len(found["top_tenth"]) == 3
    assert all(0.25 < share < 0.36 for share in found["top_tenth"])
    distinct, lookups = found["distinct"]
    assert distinct / lookups == pytest.approx(1 / 8, abs=0.01)


def test_caches_compare_as_the_text_says(found: dict[str, Any]) -> None:
    fetched = found["fetched"]
    by_capacity = list(zip(*(fetched[name] for name in ("static", "lru", "lookahead", "bound")), strict=True))
    assert len(by_capacity) == 6
    for static, lru, lookahead, least in by_capacity:
        assert found["first_times"] <= least <= lookahead <= min(static, lru)
    assert all(static < lru for static, lru, *_ in by_capacity[:4]), "a small cache"
    assert all(lru < static for static, lru, *_ in by_capacity[4:]), "a large cache, and hot rows that drift"
    assert found["lru"] < found["distinct_rows"] / 2
    static, lru, lookahead, least = by_capacity[4]
    assert least < 0.8 * lookahead, "32 batches are too few for 40 % of the rows"


def test_a_horizon_adds_what_the_text_says(found: dict[str, Any]) -> None:
    ahead = dict(zip(found["horizons"], found["ahead"], strict=True))
    assert ahead[0] == found["lru"]
    assert ahead[16] < found["static"] < ahead[8]
    assert ahead[32] == pytest.approx(found["ahead"][-1], rel=0.01)
    assert found["ahead"] == sorted(found["ahead"], reverse=True)
    assert found["small_trace"] == [16, 12]


def test_the_run_moves_the_rows_that_were_planned(found: dict[str, Any]) -> None:
    assert found["reported"] == found["planned"] > found["evicted"] > 0
    assert found["steps"] == len(found["losses"]) == 1018
    assert found["auc"] > 0.6
    assert sum(found["losses"]) / 1018 < found["knows_nothing"]


def test_the_run_has_the_bits_of_one_with_every_row_on_the_device(found: dict[str, Any]) -> None:
    assert (found["differing_losses"], found["differing"]) == (0, [])
    assert found["losses"] == found["resident"]
    assert found["compared"] == 7 + 8
    assert found["resident_evicted"] == 0


def test_hot_embeddings_gain_where_look_ups_wait_and_look_ahead_gains_more(found: dict[str, Any]) -> None:
    on_cpu, hot, ahead = found["step_ms"]
    assert ahead < hot < on_cpu


def test_hot_blocks_hold_the_look_ups_that_hit(found: dict[str, Any]) -> None:
    accesses, inputs = found["covered"]["accesses"], found["covered"]["inputs"]
    assert all(few < many for few, many in zip(inputs, accesses, strict=True))
    assert inputs == sorted(inputs)
    assert 0.7 < found["judged"] <= found["hot_share"] < 0.75
    as_read, in_blocks = found["as_read"], found["in_blocks"]
    assert sum(in_blocks) == pytest.approx(0.75 * sum(as_read), rel=0.05)
    assert sum(as_read) == found["reported"]
    hot, cold = in_blocks[20:180], in_blocks[190:250]
    assert sum(hot) / len(hot) < 0.6 * sum(cold) / len(cold)


def test_look_ahead_has_the_losses_of_look_ups_on_the_cpu_and_moves_the_fewest_bytes(found: dict[str, Any]) -> None:
    (_, on_cpu, auc), (in_order, hybrid, hot_auc), (same_losses, ahead, ahead_auc) = found["ways"]
    assert (same_losses, ahead_auc, in_order) == (True, auc, False)
    assert ahead < on_cpu / 8
    assert on_cpu / 4 < hybrid < on_cpu / 2
    assert hot_auc == pytest.approx(auc, abs=0.03)


def test_the_tutorial_leaves_no_files_behind(found: dict[str, Any]) -> None:
    assert found["left_behind"] is False
