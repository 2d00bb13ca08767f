"""Lists the formats of `data.format` without importing the readers. A new one is a line here and its reader's file."""

from dataclasses import dataclass

READERS = "rowcast.prefetcher.readers.formats"


@dataclass(frozen=True, slots=True)
class Format:
    # has open_reader(job), or open_reader(job, columns) with `in_columns`; imported only when the format is used
    module: str
    note: str = ""  # for docs/job-file.md
    has_files: bool = True  # data.path names them
    file_names: str = ".*"  # regular expression: which files of a folder are read
    random_access: bool = False  # any row can be read at any time, which shuffle = "full" needs
    in_columns: bool = False  # ids can be read without dense features and labels
    named_columns: bool = False  # data.columns names the columns, including weights and hashed ids
    text_cells: bool = False  # data.columns.delimiter and .lists separate its cells and the ids in them
    one_label: bool = False  # the format itself has one label of 0 or 1 a sample


FORMATS = {
    "criteo-tsv": Format(f"{READERS}.criteo_tsv", file_names=r"(.*\.(tsv|txt)|day_\d+)(\.gz)?", one_label=True),
    "criteo-npy": Format(
        f"{READERS}.criteo_npy",
        note="the torchrec day layout",
        file_names=r"(day_\d+)_(dense|sparse|labels)\.npy",
        random_access=True,
        in_columns=True,
    ),
    "parquet": Format(f"{READERS}.parquet", file_names=r".*\.(parquet|pq)", in_columns=True, named_columns=True),
    "csv": Format(f"{READERS}.csv", file_names=r".*\.csv(\.gz)?", named_columns=True, text_cells=True),
    "synthetic": Format(f"{READERS}.synthetic", has_files=False, random_access=True),
}
# data.format = "package.module:factory"; the factory decides the order of the batches
CUSTOM = Format(f"{READERS}.custom", has_files=False, random_access=True)


def format_of(name: str) -> Format:
    return FORMATS.get(name, CUSTOM)


def formats_with(trait: str) -> str:
    """The names of the formats with a trait, such as `"parquet" or "csv"`."""
    return " or ".join(f'"{name}"' for name, own in FORMATS.items() if getattr(own, trait))
