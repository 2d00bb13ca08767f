"""Results of an earlier run make room for a fresh one's, and nothing that a person has put there is touched."""

from pathlib import Path

from rowcast.trainer.report.results import EarlierResults


def write(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)


def read(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_folder_that_somebody_else_has_made_stays(tmp_path: Path) -> None:
    write(tmp_path, report_json="of this run", losses_f32="its losses")
    write(tmp_path / "earlier", report_json="kept by hand", model_pt="a backup")
    before = read(tmp_path)
    EarlierResults(tmp_path).give_up()
    assert read(tmp_path) == before
    EarlierResults(tmp_path).bring_back()
    assert read(tmp_path) == before


def test_what_lies_beside_the_results_stays(tmp_path: Path) -> None:
    write(tmp_path, report_json="of A", losses_f32="of A")
    write(tmp_path / "earlier", model_pt="a backup")
    results = EarlierResults(tmp_path)
    results.set_aside("A")
    assert not (tmp_path / "report.json").exists()
    results.bring_back()
    assert read(tmp_path) == {"earlier/model.pt": "a backup", "losses.f32": "of A", "report.json": "of A"}
    results.set_aside("A")
    results.give_up()
    assert read(tmp_path) == {"earlier/model.pt": "a backup"}


def test_results_set_aside_twice_are_those_of_the_run_that_is_there(tmp_path: Path) -> None:
    results = EarlierResults(tmp_path)
    write(tmp_path, report_json="of A", losses_f32="of A")
    results.set_aside("A")
    write(tmp_path, losses_f32="of B, which was killed without a checkpoint")
    results.set_aside("A")
    results.bring_back()
    assert read(tmp_path) == {"losses.f32": "of A", "report.json": "of A"}
    results.set_aside("A")
    write(tmp_path, losses_f32="of B, which has taken the place and was killed")
    results.set_aside("B")
    results.bring_back()
    assert read(tmp_path) == {"losses.f32": "of B, which has taken the place and was killed"}
