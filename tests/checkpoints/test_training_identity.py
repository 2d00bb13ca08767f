"""Which job may continue from a checkpoint: one with the same settings and data, whatever version made it."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from msgspec.structs import replace

from rowcast.deploy.score import scoring_job
from rowcast.job.file import apply_override, load_job, parse_job, parse_manifest_job, read_content
from rowcast.job.schema import Job
from rowcast.job.training_identity import check_belongs, check_can_evaluate, digest_of_version_3, setting_differences
from rowcast.runtime.checkpoint_manifest import (
    MANIFEST_NAME,
    MANIFEST_VERSION,
    UNKNOWN,
    DataFile,
    Manifest,
    ManifestOfVersion3,
    TrainingData,
    read_manifest,
)
from rowcast.runtime.disk import render
from rowcast.runtime.errors import Mismatch, RowcastError
from tests.checkpoints.golden import ALL_KEYS, DATA, FOLDER
from tests.support import jobs
from tests.support.jobs import table
from tests.support.repeats import count

GOLDEN = sorted(FOLDER.glob("*.version-*.json"))
DIGESTS = json.loads((FOLDER / "digests.json").read_text())  # written by 6aa9055, for files of 9 and 8 bytes
ORDER = 'data.order was "hot-blocks:20", and this version has no such key'
JOB = jobs.job(tables=[table("user", 100, 4), table("item", 50, 4)], data={"options": {"kept": 1, "width": [8, 4]}})
FILES = tuple(DataFile(path=f"data/{name}.csv", nbytes=9, checksum=f"{i:016x}") for i, name in enumerate("abc"))


def golden(path: Path, tmp_path: Path) -> tuple[str, Manifest]:
    """The name of its job, and what it holds."""
    folder = tmp_path / "step-000000000110"
    folder.mkdir()
    (folder / MANIFEST_NAME).write_bytes(path.read_bytes())
    return path.name.partition(".")[0], read_manifest(folder)


def refusal(checkpoint: Manifest, job: Job, data: TrainingData) -> str:
    with pytest.raises(Mismatch) as refused:
        check_belongs(checkpoint, job, data)
    return str(refused.value)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_a_checkpoint_of_an_earlier_version_belongs_to_its_job_file_in_this_one(path: Path, tmp_path: Path) -> None:
    name, checkpoint = golden(path, tmp_path)
    if checkpoint.job["data"].get("order") is not None:
        assert ORDER in refusal(checkpoint, load_job(FOLDER / f"{name}.toml"), DATA[name])
        if isinstance(checkpoint, ManifestOfVersion3):
            return  # the order is in its digest
        data = checkpoint.job["data"] | {"order": None, "hot": None}
        checkpoint = replace(checkpoint, job=checkpoint.job | {"data": data})
    check_belongs(checkpoint, load_job(FOLDER / f"{name}.toml"), DATA[name])
    for override, sentence in (
        ("optimizer.dense.lr=0.7", "optimizer.dense.lr is 0.7"),
        ("ranks.gradients=bf16", 'ranks.gradients is "bf16", and was "fp32"'),
    ):
        assert sentence in refusal(checkpoint, load_job(FOLDER / f"{name}.toml", (override,)), DATA[name])


@pytest.mark.parametrize("name", DIGESTS)
def test_the_training_digests_of_6aa9055_are_those_of_today(name: str) -> None:
    """Its checkpoints have nothing else that says which job made them."""
    golden = DIGESTS[name]
    content = read_content(FOLDER / f"{golden['job']}.toml")
    for override in golden["set"]:
        apply_override(content, override)
    job = parse_manifest_job(content, name)
    files = tuple(DataFile(path="", nbytes=nbytes, checksum="") for nbytes in (9, 8))
    data = TrainingData(files=files)
    content, known = job.content(), json.loads((FOLDER / f"{ALL_KEYS}.version-3.json").read_text())["job"]
    content["model"] = {name: content["model"][name] for name in known["model"]}  # version 3 lacks later keys
    content["tables"] = [{name: own[name] for name in known["tables"][0]} for own in content["tables"]]
    columns = content["data"]["columns"]
    content["data"]["columns"] = {name: columns[name] for name in known["data"]["columns"]}
    assert digest_of_version_3(content, data) == golden["digest"]


def test_a_manifest_of_today_has_the_job_that_one_of_its_version_has() -> None:
    """Keys that were added since may be missing in the older one."""
    was = json.loads((FOLDER / f"{ALL_KEYS}.version-{MANIFEST_VERSION}.json").read_text())["job"]
    now = json.loads(msgspec.json.encode(load_job(FOLDER / f"{ALL_KEYS}.toml").content()))
    assert keys_of_both(now, was) == was


def keys_of_both(now: Mapping[str, Any], was: Mapping[str, Any]) -> dict[str, Any]:
    return {key: known_of(now[key], before) for key, before in was.items()}


def known_of(now: Any, was: Any) -> Any:
    if isinstance(was, list):
        return [known_of(*pair) for pair in zip(now, was, strict=True)]
    return keys_of_both(now, was) if isinstance(was, dict) else now


def test_there_is_a_manifest_of_every_version_that_is_read() -> None:
    assert {path.name for path in GOLDEN} >= {f"{ALL_KEYS}.version-{version}.json" for version in (3, 4, 5)}


def test_of_the_data_version_3_knows_the_sizes(tmp_path: Path) -> None:
    _, checkpoint = golden(FOLDER / "din.version-3.json", tmp_path)
    job, data = load_job(FOLDER / "din.toml"), DATA["din"]
    check_belongs(checkpoint, job, replace(data, files=tuple(replace(file, checksum="") for file in data.files)))
    for files in ((replace(data.files[0], nbytes=1),), ()):
        assert "the size of a data file differs" in refusal(checkpoint, job, replace(data, files=files))


def made(job: Job, files: tuple[DataFile, ...] = FILES) -> Manifest:
    """A checkpoint; of a run that has trained on `files`."""
    content = msgspec.json.decode((FOLDER / f"{ALL_KEYS}.version-4.json").read_bytes(), type=Manifest)
    through_json = msgspec.json.decode(msgspec.json.encode(job))
    return replace(content, job=through_json, trained_on=TrainingData(files=files))


def changed(**sections: Any) -> Job:
    content = msgspec.to_builtins(JOB)
    content.pop("tables_from")
    return parse_job(jobs.laid_over(content, sections))


MODEL_OPTIONS = {"model": {"kind": "tests.support.batches:small_model", "options": {"width": 3}}}
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a key": ({"data": {"batch_size": 7}}, "data.batch_size is 7, and was 2048"),
    "text": ({"data": {"shuffle": "full"}}, 'data.shuffle is "full", and was "none"'),
    "a key below a section": (
        {"data": {"synthetic": {"zipf": 2.0}}},
        "data.synthetic.zipf is 2.0, and was 1.05",
    ),
    "an option": ({"data": {"options": {"kept": 1, "width": [8]}}}, "data.options.width is [8], and was [8, 4]"),
    "an option that is gone": ({"data": {"options": {"width": [8, 4]}}}, "data.options.kept is not set, and was 1"),
    "a new option": (MODEL_OPTIONS, "model.options.width is 3, and was not set"),
    "an optimizer": (
        {"optimizer": {"sparse": {"kind": "adam", "lr": 0.1}}},
        'optimizer.sparse.kind is "adam", and was "sgd"',
    ),
    "a learning rate": (
        {"optimizer": {"sparse": {"kind": "sgd", "lr": 0.25}}},
        "optimizer.sparse.lr is 0.25, and was 0.1",
    ),
    "the seed": ({"job": {"seed": 2}}, "job.seed is 2, and was 1"),
    "the ranks, which are the parts": ({"ranks": {"count": 2}}, "ranks.parts is 2, and was 1"),
    "gradients": ({"ranks": {"gradients": "bf16"}}, 'ranks.gradients is "bf16", and was "fp32"'),
    "a table's key": (
        {"tables": [table("user", 100, 4), table("item", 51, 4)]},
        'table "item": num_embeddings is 51, and was 50',
    ),
    "the order of tables": (
        {"tables": [table("item", 50, 4), table("user", 100, 4)]},
        'tables[0].name is "item", and was "user"',
    ),
    "a table more": (
        {"tables": [table("user", 100, 4), table("item", 50, 4), table("shop", 3, 4)]},
        'tables[2].name is "shop", and was not set',
    ),
    "a table less": ({"tables": [table("user", 100, 4)]}, 'tables[1].name is not set, and was "item"'),
}


@pytest.mark.parametrize(("sections", "sentence"), CHANGES.values(), ids=CHANGES)
def test_a_setting_that_differs_is_named_with_both_values(sections: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(made(JOB), changed(**sections), TrainingData(files=FILES))


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"path": "elsewhere", "epochs": 5}},
        {"data": {"eval_path": "elsewhere"}},
        {"lookahead": {"depth": 2}, "cache": {"capacity": "2MiB"}, "store": {"kind": "tiered", "memory": "1GiB"}},
        {"checkpoint": {"every": 5}, "prefetcher": {"workers": 3}, "trainer": {"threads": 2}},
        {"eval": {"every": 5}, "job": {"name": "other", "run_dir": "other"}},
    ],
    ids=str,
)
def test_what_decides_no_result_may_differ(sections: dict[str, Any]) -> None:
    check_belongs(made(JOB), changed(**sections), TrainingData(files=FILES))


def test_an_evaluation_may_be_of_other_data_but_not_of_another_model() -> None:
    data = {"eval_fraction": 0.5, "shuffle": "full", "options": {}, "synthetic": {"zipf": 2.0}}
    check_can_evaluate(made(JOB), changed(data=data | {"columns": {"label_values": "real", "label": "other"}}), ())
    for sections, sentence in (
        (
            {"data": {"columns": {"labels": ["label", "other"]}}},
            'data.columns.labels is ["label", "other"], and was []',
        ),
        ({"data": {"hash": True}}, "data.hash is true, and was false"),
        ({"ranks": {"gradients": "bf16"}}, 'ranks.gradients is "bf16", and was "fp32"'),
        (MODEL_OPTIONS, "is of another model: model.options.width is 3, and was not set"),
    ):
        with pytest.raises(Mismatch, match=re.escape(sentence)):
            check_can_evaluate(made(JOB), changed(**sections), ())


@pytest.mark.parametrize(
    ("was", "num_dense", "now", "sentence"),
    [
        ((), 2, ("int_1", "int_2"), ""),  # names that an older version did not record
        ((), UNKNOWN, ("int_1",), ""),
        (("int_0", "int_3"), 2, ("int_0", "int_3"), ""),
        (("int_0", "int_3"), 2, ("int_0", "int_1"), "int_1 instead of int_3"),
        (("int_0",), 1, ("int_0", "int_1"), "int_1 instead of none"),
        (("int_0",), 1, (), "none instead of int_0"),
        ((), 0, ("int_0",), "int_0 instead of none"),
    ],
)
def test_the_dense_columns_that_were_trained_on_are_those_that_are_read(
    was: tuple[str, ...], num_dense: int, now: tuple[str, ...], sentence: str
) -> None:
    read = replace(TrainingData(files=FILES), num_dense=len(now), dense_columns=now)
    trained = replace(read, num_dense=num_dense, dense_columns=was)
    checkpoint = replace(made(JOB), trained_on=trained)
    doors: tuple[Callable[[], None], ...] = (
        lambda: check_belongs(checkpoint, JOB, read),
        lambda: check_can_evaluate(checkpoint, JOB, now),
    )
    for door in doors:
        with pytest.raises(Mismatch, match=f"dense columns are {sentence}") if sentence else nullcontext():
            door()


def test_a_run_that_ended_at_an_invalid_id_continues_as_its_sentence_says() -> None:
    modulo = changed(data={"on_invalid_id": "modulo"})
    check_belongs(made(JOB), modulo, TrainingData(files=FILES))
    assert 'data.on_invalid_id is "error", and was "modulo"' in refusal(made(modulo), JOB, TrainingData(files=FILES))


def test_no_sentence_names_more_than_four_differences() -> None:
    job = changed(data={"batch_size": 7, "epochs": 3, "shuffle": "full", "hash": True}, job={"seed": 4})
    sentence = refusal(made(JOB), job, TrainingData(files=()))
    assert sentence.count(", and was ") == 4, "of four the last is named too"
    job = changed(data={"batch_size": 7, "shuffle": "full", "hash": True, "eval_fraction": 0.5}, job={"seed": 4})
    sentence = refusal(made(JOB), job, TrainingData(files=()))
    assert sentence.count(", and was ") == 3
    assert " and 2 more; use" in sentence


def test_tables_of_a_thousand_name_the_one_that_differs() -> None:
    tables = [table(f"t{i}", 100, 4) for i in range(1000)]
    others = [*tables[:700], {**tables[700], "init": "constant:0"}, *tables[701:]]
    [sentence] = setting_differences(msgspec.to_builtins(jobs.job(tables=tables)), jobs.job(tables=others))
    assert sentence == 'table "t700": init is "constant:0", and was "uniform"'


# of a later version

KEYS: list[Any] = [("strength", float, 0.5), ("parts", dict[str, int], {})]
NewerModel = msgspec.defstruct("NewerModel", KEYS, bases=(type(JOB.model),), frozen=True, kw_only=True)


def newer(**keys: Any) -> Job:
    model = {name: getattr(JOB.model, name) for name in JOB.model.__struct_fields__}
    return replace(JOB, model=NewerModel(**model, **keys))


def test_a_key_that_a_later_version_adds_had_its_default() -> None:
    check_belongs(made(JOB), newer(), TrainingData(files=FILES))
    sentence = refusal(made(JOB), newer(strength=0.25), TrainingData(files=FILES))
    assert "model.strength is 0.25, and was 0.5" in sentence


def test_a_default_that_a_later_version_changes_and_a_key_that_it_removes_differ() -> None:
    earlier = made(newer(strength=0.75))
    check_belongs(earlier, newer(strength=0.75), TrainingData(files=FILES))
    assert "model.strength is 0.5, and was 0.75" in refusal(earlier, newer(), TrainingData(files=FILES))
    assert "model.strength was 0.75, and this version has no such key" in refusal(
        earlier, JOB, TrainingData(files=FILES)
    )


# data


def test_other_data_is_named() -> None:
    first, second, third = FILES
    checkpoint = made(JOB)
    for files, sentence in (
        ((first, second), "the data file data/c.csv is missing"),
        ((*FILES, replace(first, path="data/d.csv")), "data/d.csv is new"),
        ((first, replace(second, nbytes=1_000), third), "data/b.csv has 1,000 bytes, and had 9"),
        (
            (first, replace(second, checksum="f" * 16), third),
            "data/b.csv has the same size as before, but other contents",
        ),
        ((second, first, third), "data/b.csv (data/a.csv before) has the same size as before, but other contents"),
    ):
        assert sentence in refusal(checkpoint, JOB, TrainingData(files=files))


def test_files_that_were_renamed_or_moved_are_the_same_data() -> None:
    check_belongs(made(JOB), JOB, TrainingData(files=tuple(replace(file, path=f"x{file.path}") for file in FILES)))


def test_of_files_that_became_more_samples_are_not_compared() -> None:
    files = (*(replace(file, checksum="f" * 16) for file in FILES), replace(FILES[0], path="data/d.csv"))
    assert "is of another job: data/d.csv is new; use" in refusal(made(JOB), JOB, TrainingData(files=files))


def test_a_run_that_has_trained_nothing_must_only_keep_its_rows() -> None:
    imported = replace(made(JOB), trained_on=None)
    check_belongs(
        imported, changed(data={"batch_size": 7}, optimizer={"sparse": {"kind": "sgd", "lr": 9.0}}), DATA["din"]
    )
    for sections in (
        {"job": {"seed": 3}},
        {"tables": [table("user", 100, 4)]},
        {"optimizer": {"sparse": {"kind": "adam", "lr": 0.1}}},
    ):
        refusal(imported, changed(**sections), TrainingData(files=()))


ODD_VALUES: tuple[Any, ...] = (None, True, -1, 0.5, 2**62, "", "x", "\x1b", [], [1], {}, {"a": {}}, [{"name": 1}])


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places_in(item, (*path, key)))]


def with_odd_value(content: Any, path: tuple[Any, ...], odd: Any, *, is_left_out: bool) -> Any:
    if not path:
        return odd
    copy = content.copy()
    if is_left_out and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = with_odd_value(copy[path[0]], path[1:], odd, is_left_out=is_left_out)
    return copy


@pytest.mark.parametrize("seed", range(count(2, soak=100)))
def test_a_resealed_manifest_with_a_job_of_odd_types_is_refused_in_a_sentence(seed: int, tmp_path: Path) -> None:
    """Each door that reads a manifest's job either takes it or names what is wrong: no other exception leaves it."""
    chance = np.random.default_rng(seed)
    name, checkpoint = golden(FOLDER / f"{ALL_KEYS}.version-5.json", tmp_path)
    job, folder = load_job(FOLDER / f"{name}.toml"), tmp_path / checkpoint.name
    folder.mkdir(exist_ok=True)
    places = places_in(checkpoint.job)
    doors: tuple[Callable[[Manifest], object], ...] = (
        lambda read: check_belongs(read, job, DATA[ALL_KEYS]),
        lambda read: check_can_evaluate(read, job, ()),
        lambda read: scoring_job(read, tmp_path, tmp_path, ()),
        lambda read: parse_job(read.job, "manifest.json"),
    )
    refused = 0
    for _ in range(300):
        place, odd = places[chance.integers(len(places))], ODD_VALUES[chance.integers(len(ODD_VALUES))]
        content = with_odd_value(checkpoint.job, place, odd, is_left_out=bool(chance.integers(4) == 0))
        broken = msgspec.json.decode(render(checkpoint)) | {"job": content, "checksum": ""}
        sealed = msgspec.json.format(msgspec.json.encode(broken), indent=1)
        checksum = xxhash.xxh3_64_hexdigest(sealed)
        (folder / MANIFEST_NAME).write_bytes(sealed.replace(b'"checksum": ""', f'"checksum": "{checksum}"'.encode(), 1))
        for door in doors:
            try:
                door(read_manifest(folder))
            except RowcastError:
                refused += 1
    assert refused > 300
