"""Some of every format, and what its rows are: for what every reader promises."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyarrow.feather import write_feather

from rowcast.job.schema import Job
from tests.support.data_files import (
    CSV_COLUMNS,
    NUM_ROWS,
    PARQUET_COLUMNS,
    Listed,
    Row,
    all_samples,
    click_log,
    decode_csv,
    decode_days,
    decode_parquet,
    decode_tsv,
    make_job,
    write_csv,
    write_day,
    write_jsonl,
    write_parquet,
    write_tsv,
)

Case = Callable[..., tuple[Job, list[Row] | None]]  # (folder, **data) -> the job, and every row as pandas decodes it


def tsv(folder: Path, **data: Any) -> tuple[Job, list[Row] | None]:
    write_tsv(click_log(), folder / "train.tsv")
    job = make_job("criteo-tsv", path=str(folder / "train.tsv"), **data)
    return job, decode_tsv([folder / "train.tsv"], job)


def tsv_gz(folder: Path, **data: Any) -> tuple[Job, list[Row] | None]:
    paths = [folder / "day_0.gz", folder / "day_1.gz", folder / "day_2"]
    for seed, (path, num_rows) in enumerate(zip(paths, (50, 1, 52), strict=True)):
        write_tsv(click_log(num_rows, seed), path)
    job = make_job("criteo-tsv", path=str(folder), **data)
    return job, decode_tsv(paths, job)


def npy(folder: Path, **data: Any) -> tuple[Job, list[Row] | None]:
    write_day(folder, "day_0", 60, seed=1)
    write_day(folder, "day_1", 43, dtype="int64", seed=2)
    job = make_job("criteo-npy", path=str(folder), **data)
    return job, decode_days(folder, ["day_0", "day_1"], job)


def bags(folder: Path, **data: Any) -> tuple[Job, list[Row] | None]:
    paths = [folder / "a.parquet", folder / "b.parquet"]
    write_parquet(paths[0], 70, seed=1, missing=0.2)
    write_parquet(paths[1], 33, seed=2, missing=0.2)
    job = make_job("parquet", path=str(folder / "*.parquet"), columns=PARQUET_COLUMNS, on_invalid_id="zero", **data)
    return job, decode_parquet(paths, job)


def arrow(folder: Path, **data: Any) -> tuple[Job, list[Row] | None]:
    """The rows of the Parquet files, in record batches of 7."""
    _, expected = bags(folder)
    for name in ("a", "b"):
        own = pq.read_table(folder / f"{name}.parquet")
        write_feather(own, folder / f"{name}.feather", compression="uncompressed", chunksize=7)
        (folder / f"{name}.parquet").unlink()
    return make_job("arrow", path=str(folder), columns=PARQUET_COLUMNS, on_invalid_id="zero", **data), expected


def named(folder: Path, **data: Any) -> tuple[Job, list[Row] | None]:
    paths = [folder / "a.csv", folder / "b.csv.gz", folder / "c.csv"]
    for seed, (path, num_rows) in enumerate(zip(paths, (50, 1, 52), strict=True), start=1):
        write_csv(path, num_rows, seed)
    job = make_job("csv", path=str(folder), columns=CSV_COLUMNS, **data)
    return job, decode_csv(paths, job)


def lines(folder: Path, **data: Any) -> tuple[Job, list[Row] | None]:
    _, expected = named(folder, **data)
    for name in ("a.csv", "b.csv.gz", "c.csv"):
        write_jsonl(folder / name.replace("csv", "jsonl"), folder / name)
        (folder / name).unlink()
    columns = {name: own for name, own in CSV_COLUMNS.items() if name != "lists"}
    return make_job("jsonl", path=str(folder), columns=columns, **data), expected


def synthetic(folder: Path, **data: Any) -> tuple[Job, list[Row] | None]:
    return make_job("synthetic", synthetic={"samples": NUM_ROWS}, **data), None


def custom(folder: Path, **data: Any) -> tuple[Job, list[Row] | None]:
    job = make_job("tests.support.data_files:listed", **data)
    made = Listed(job).made
    return job, all_samples([*made["train"], *made["eval"]])


CASES: dict[str, Case] = {
    "tsv": tsv,
    "tsv_gz": tsv_gz,
    "npy": npy,
    "bags": bags,
    "arrow": arrow,
    "csv": named,
    "jsonl": lines,
    "synthetic": synthetic,
    "custom": custom,
}
