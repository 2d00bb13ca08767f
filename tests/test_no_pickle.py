"""Nothing that was read can execute anything: no pickle on any socket, in any file and in any collective. Read from the
source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("runtime", "job", "protocol", "prefetcher", "trainer", "analysis", "deploy", "examples", "benchmarks")
UNPICKLERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
BETWEEN_A_PROCESS_AND_ITS_OWN_CHILDREN = "prefetcher/readers/"
BETWEEN_ITS_OWN_THREADS = "benchmarks/budget.py"
UNPICKLING_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
UNPICKLING_MODULES = ("torch.multiprocessing", "torch.distributed.rpc", "torch.distributed.elastic.rendezvous.dynamic")
EXECUTING_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "unsafe_load", "full_load", "read_pickle", "to_pickle"}


def dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def is_true(call: ast.Call, keyword: str) -> bool:
    return any(k.arg == keyword and isinstance(k.value, ast.Constant) and k.value.value is True for k in call.keywords)


def unpickles(module: str) -> bool:
    return module.partition(".")[0] in UNPICKLERS or module.startswith(UNPICKLING_MODULES)


def dangers(source: str) -> Iterator[str]:
    """What in a file could execute what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"imports {alias.name}" for alias in node.names if unpickles(alias.name))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if unpickles(module) or any(unpickles(f"{module}.{alias.name}") for alias in node.names):
                yield f"imports {module}"
            collectives = UNPICKLING_COLLECTIVES.intersection(alias.name for alias in node.names)
            yield from (f"imports {name}" for name in sorted(collectives))
            if node.module in ("torch", "yaml") and any(alias.name == "load" for alias in node.names):
                yield f"imports load from {node.module}"
        elif isinstance(node, ast.Call):
            yield from call_dangers(node)


def call_dangers(call: ast.Call) -> Iterator[str]:
    name = dotted(call.func)
    owner, _, method = name.rpartition(".")
    if name in ("eval", "exec") or (owner and method in EXECUTING_CALLS - {"eval", "exec"}):
        yield f"calls {name}"
    elif name in ("torch.load", "torch.jit.load", "torch.package.PackageImporter") and not (
        name == "torch.load" and is_true(call, "weights_only")
    ):
        yield f"calls {name} without weights_only=True"
    elif name in ("yaml.load", "yaml.load_all") or method in UNPICKLING_COLLECTIVES:
        yield f"calls {name}"
    if is_true(call, "allow_pickle"):
        yield f"calls {name} with allow_pickle=True"


def source_files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_file_of_the_project_reads_what_could_execute() -> None:
    files = source_files()
    assert len(files) > 100
    for path in files:
        name = str(path.relative_to(ROOT))
        if not name.startswith((BETWEEN_A_PROCESS_AND_ITS_OWN_CHILDREN, BETWEEN_ITS_OWN_THREADS)):
            assert not list(dangers(path.read_text())), f"{name}: {list(dangers(path.read_text()))}"


def test_readers_unpickle_in_one_place_what_came_through_a_pipe_of_their_own() -> None:
    found = {
        path.name: danger
        for path in sorted((ROOT / BETWEEN_A_PROCESS_AND_ITS_OWN_CHILDREN).rglob("*.py"))
        for danger in dangers(path.read_text())
        if "multiprocessing" not in danger
    }
    assert found == {"shared_arrays.py": "imports pickle"}


DANGEROUS = """
import pickle
from pickle import loads
import multiprocessing.connection
from torch import load
torch.load(path)
torch.load(path, weights_only=flag)
torch.jit.load(path)
yaml.load(text, Loader=yaml.Loader)
np.load(path, allow_pickle=True)
exec(text)
socket.recv_pyobj()
pandas.read_pickle(path)
dist.all_gather_object(found, mine)
torch.distributed.broadcast_object_list(objects)
import torch.multiprocessing as mp
from torch.distributed import rpc
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
"""
HARMLESS = """
torch.load(path, weights_only=True)
np.load(path)
yaml.safe_load(text)
model.eval()
dist.all_gather_into_tensor(out, mine)
from torch.distributed import TCPStore, run
"""


def test_what_could_execute_is_noticed_and_nothing_else() -> None:
    assert [line for line in DANGEROUS.split("\n")[1:-1] if not list(dangers(line))] == []
    assert [line for line in HARMLESS.split("\n")[1:-1] if list(dangers(line))] == []


@pytest.mark.parametrize("folder", ["deploy", "docs", "examples", "README.md", "Makefile", "SECURITY.md"])
def test_no_deployment_and_no_page_starts_a_rendezvous_that_unpickles(folder: str) -> None:
    path = ROOT / folder
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.suffix in {".md", ".yaml", ".py", ".toml", ".sh", ""} and file.is_file():
            commands = [line for line in file.read_text().splitlines() if "nproc-per-node" in line]
            assert not any("--standalone" in line or "c10d" in line for line in commands), file
