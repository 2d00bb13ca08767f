"""Moves whole tables between a script and its prefetcher as safetensors files, and starts the prefetcher.

The prefetcher's commands write and read the files, because the tables may be larger than this process's memory.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rowcast.job.embedding_tables import Table
from rowcast.job.schema import Job
from rowcast.runtime.children import Child, environment, killed_by, stop_with_parent
from rowcast.runtime.disk import not_a_link
from rowcast.runtime.errors import ConfigError, peer_failure
from rowcast.runtime.run_directory import RunDirectory
from rowcast.runtime.stops import held
from rowcast.runtime.telemetry.logs import open_log

BLOCK_ROWS = 65536
# in the run directory; each export replaces it, and tensors of earlier exports stay mapped
EXPORTED = "state_dict.safetensors"
LOG = "prefetcher.log"
RELEASE_S, RELEASE_POLL_S = 20.0, 0.1
SCRIPT = "ROWCAST_SCRIPT"  # in the environment of a prefetcher: the process id of the script that started it
# safetensors' names; other types are written as fp32
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def weight_name(table: Table) -> str:
    return f"embedding_bags.{table.name}.weight"


def of_script() -> dict[str, str]:
    """Returns the environment of a prefetcher, with the id of this script's process."""
    return environment() | {SCRIPT: str(os.getpid())}


def refuse_within_prefetcher() -> None:
    """Raises ConfigError in a prefetcher that imports the script for its data set: it would start a second
    prefetcher."""
    if SCRIPT in os.environ:
        raise ConfigError(
            f"connect: the prefetcher of process {os.environ[SCRIPT]} imports this script for its data set, which "
            'would train again; put what the script does under `if __name__ == "__main__":`, or the data set into a '
            "module of its own"
        )


def await_release(folders: Iterable[Path]) -> None:
    """Waits for the prefetchers of a killed script, which end within seconds. Raises ConfigError if one does not."""
    deadline_s = time.monotonic() + RELEASE_S
    for folder in folders:
        while True:
            try:
                with RunDirectory(folder, "prefetcher"):
                    break
            except ConfigError:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(RELEASE_POLL_S)


def start_prefetcher(job_file: Path, log: Path, options: Sequence[str], *, is_tied: bool) -> Child:
    """Starts it in a separate session, because the script handles Ctrl-C. `is_tied`: it stops if this thread ends,
    because prefetchers of several ranks would wait for the script to be started again."""
    command = [sys.executable, "-m", "rowcast.prefetcher", "run", "--config", str(job_file), *options]
    with open_log(log, "wb") as file, held():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=of_script(),
            start_new_session=True,
            preexec_fn=partial(stop_with_parent, os.getpid()) if is_tied else None,
        )
    return Child("prefetcher", process, log)


def run_prefetcher_command(*arguments: str) -> None:
    """Raises the command's error, with its sentence."""
    command = [sys.executable, "-m", "rowcast.prefetcher", *arguments]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=of_script(), check=False
    )
    if done.returncode:
        silent = f"it ended with code {done.returncode}" if done.returncode > 0 else f"it {killed_by(-done.returncode)}"
        last = "".join(done.stderr.strip().splitlines()[-1:]) or silent
        raise peer_failure(done.returncode, f"`prefetcher {arguments[0]}`: {last.removeprefix('rowcast prefetcher: ')}")


def exported(job: Job, *source: str) -> Path:
    """`source`: options of `rowcast export` that name what it exports."""
    out = job.run_dir / EXPORTED
    run_prefetcher_command("export", *source, "--out", str(out))
    return out


def loaded_file(folder: Path, tables: Sequence[Table]) -> Path:
    """Where tables that the script loads wait for the prefetcher."""
    return folder / f"loaded.{len(tables)}.{tables[0].name}.safetensors"


def read_tables(path: Path, tables: Sequence[Table]) -> list[Tensor]:
    """Returns the weights of each table, mapped into memory and not read."""
    with safe_open(path, framework="pt") as file:
        return [file.get_tensor(weight_name(table)) for table in tables]


def write_tables(path: Path, tables: Sequence[Table], weights: Sequence[Tensor]) -> None:
    """Writes [num_embeddings, embedding_dim] of each table, on any device, a block of rows at a time.

    They keep their dtype; the import rounds to the table's dtype, refuses values beyond it, and keeps all bits in a
    master copy. Raises ConfigError."""
    dtypes = [weight.dtype if weight.dtype in DTYPE_NAMES else torch.float32 for weight in weights]
    header, end = {}, 0
    for table, weight, dtype in zip(tables, weights, dtypes, strict=True):
        if not weight.is_floating_point():
            raise ConfigError(f"load_state_dict: table {table.name} is {weight.dtype}, which is not kept; give floats")
        nbytes = table.num_embeddings * table.embedding_dim * dtype.itemsize
        shape = [table.num_embeddings, table.embedding_dim]
        header[weight_name(table)] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb", opener=not_a_link) as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for table, weight, dtype in zip(tables, weights, dtypes, strict=True):
                for at, rows in enumerate(torch.split(weight.detach(), BLOCK_ROWS)):
                    block = rows.to("cpu", dtype).clone(memory_format=torch.contiguous_format)
                    if not (finite := block.isfinite().all(1)).all():
                        raise ConfigError(
                            f"load_state_dict: table {table.name}, row {at * BLOCK_ROWS + int(finite.int().argmin())}: "
                            f"not every value is finite in {dtype}; load tables that are"
                        )
                    file.write(block.view(torch.uint8).numpy().data)
        partial.rename(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: the tables cannot be written ({error.strerror}); free space there or set another run_dir"
        ) from None
