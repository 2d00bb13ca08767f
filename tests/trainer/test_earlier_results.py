"""Results of an earlier run make room for a fresh one's, and nothing that a person has put there is touched."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.report.earlier_results import EarlierResults
from tests.support.facts import facts


def write(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)


def read(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def put_folder(folder: Path) -> None:
    write(folder, report_json="kept by hand", losses_f32="kept by hand")


def put_backup(folder: Path) -> None:
    write(folder, model_pt="a backup")


def put_file(folder: Path) -> None:
    folder.write_text("a note")


def put_link(folder: Path) -> None:
    write(folder.with_name("elsewhere"), report_json="of another run")
    (folder.with_name("elsewhere") / "run_id").write_text("A")
    folder.symlink_to("elsewhere")


def put_linked_note(folder: Path) -> None:
    write(folder, report_json="kept by hand")
    write(folder.with_name("elsewhere"), note="A")
    (folder / "run_id").symlink_to("../elsewhere/note")


@pytest.mark.parametrize("put", [put_folder, put_backup, put_file, put_link, put_linked_note])
def test_a_folder_that_is_not_ours_is_never_used(tmp_path: Path, put: Callable[[Path], None]) -> None:
    run_dir = tmp_path / "run"
    write(run_dir, report_json="of A", losses_f32="of A")
    put(run_dir / "earlier")
    before = read(run_dir)
    results = EarlierResults(run_dir)
    with pytest.raises(ConfigError, match=facts("run/earlier", "rowcast")):
        results.set_aside("A")
    with pytest.raises(ConfigError, match="move them elsewhere"):
        results.check_place()
    results.give_up()
    results.bring_back_of("A")
    results.bring_back()
    assert read(run_dir) == before


def test_a_folder_of_somebody_else_does_no_harm_where_no_results_need_it(tmp_path: Path) -> None:
    put_folder(tmp_path / "earlier")
    EarlierResults(tmp_path).set_aside("A")
    EarlierResults(tmp_path).give_up()
    assert read(tmp_path) == {"earlier/losses.f32": "kept by hand", "earlier/report.json": "kept by hand"}


def test_what_is_put_beside_the_results_stays(tmp_path: Path) -> None:
    results = EarlierResults(tmp_path)
    for end in (results.bring_back, results.give_up):
        write(tmp_path, report_json="of A", losses_f32="of A")
        results.set_aside("A")
        assert not (tmp_path / "report.json").exists()
        write(tmp_path / "earlier", model_pt="a backup")
        end()
        assert (tmp_path / "report.json").exists() == (end == results.bring_back)
        assert read(tmp_path / "earlier") == {"model.pt": "a backup"}
        (tmp_path / "earlier" / "model.pt").unlink()


@pytest.mark.parametrize("fresh_again", [True, False])
@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_kill_while_results_are_set_aside_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int, fresh_again: bool
) -> None:
    write(tmp_path, report_json="of A", losses_f32="of A", report_html="of A")
    before, replace, moves = read(tmp_path), Path.replace, iter(range(9))

    def replace_until_killed(path: Path, target: Path) -> Path:
        if next(moves) == moved:
            raise KeyboardInterrupt
        return replace(path, target)

    results = EarlierResults(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_until_killed)
        with pytest.raises(KeyboardInterrupt):
            results.set_aside("A")
    if fresh_again:
        results.set_aside("A")
        write(tmp_path, losses_f32="of B, which was killed without a checkpoint")
        results.set_aside("A")
    results.bring_back_of("A")
    assert read(tmp_path) == before


def test_a_kill_before_anything_was_set_aside_needs_no_repair(tmp_path: Path) -> None:
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "run_id.partial").write_text("")
    write(tmp_path, report_json="of A")
    results = EarlierResults(tmp_path)
    results.bring_back_of("A")
    results.set_aside("A")
    results.bring_back()
    assert read(tmp_path) == {"report.json": "of A"}
    (tmp_path / "earlier").mkdir()
    results.set_aside("A")
    results.bring_back()
    assert read(tmp_path) == {"report.json": "of A"}


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
