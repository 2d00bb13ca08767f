# Every target needs only Python 3.11 to 3.13 and make; it creates .venv if necessary.
PYTHON ?= python3
PYTHON_LOW ?= python3.12
PYTHON_HIGH ?= python3.15
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo tutorial quick test test-rest test-all check exact ranks soak containers mutants compat bench gpu-check bench-planner bench-start bench-embedding bench-env bench-budget clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(VENV)/installed  ## train on the built-in stream, both processes
	$(BIN)/python -m rowcast train --config examples/demo.toml --fresh

tutorial: $(VENV)/installed  ## executes the tutorial: build/tutorial.ipynb, with its figures
	mkdir -p build
	$(BIN)/jupyter-execute --output=../build/tutorial examples/tutorial.ipynb

QUICK := planner protocol stores readers trainer checkpoints system/test_exact.py test_job.py test_structure.py

quick: $(VENV)/installed  ## an answer within 3 minutes on 2 cores: planner, protocol, stores, readers, exactness in one process
	ROWCAST_QUICK=1 $(PYTEST) $(addprefix tests/,$(QUICK))

test: $(VENV)/installed  ## all tests but most of those that start processes or several trainers, or need a server, a browser or a compiler
	$(PYTEST) -m "not rest"

test-rest: $(VENV)/installed  ## what `make test` leaves out, but the longest: tests/long.txt names them for `make soak`
	$(PYTEST) -m "rest and not long"

test-all: $(VENV)/installed  ## the whole test suite, and the examples with packages that rowcast does not need
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt polars datasets lightning transformers accelerate pykeen torch-rechub
	$(PYTEST)

check: $(VENV)/installed  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

exact: $(VENV)/installed  ## two processes against the plain loop on the full retail log (ROWCAST_RETAIL=folder)
	$(BIN)/python -m benchmarks.exact

ranks: $(VENV)/installed  ## several trainers against the plain loop in parts, and what follows kills: real processes, about 30 minutes
	$(BIN)/python -m benchmarks.ranks

soak: $(VENV)/installed  ## kills, damage, simulated faults and hostile bytes with large counts: within 45 minutes on 2 cores; then `containers`, as root with podman
	$(BIN)/python -m benchmarks.soak
	@if [ "$$(id -u)" = 0 ] && command -v podman >/dev/null; then deploy/containers.sh; else echo "left out: make containers needs root and podman"; fi

containers:  ## builds the image, runs compose and the Pod with podman, and compares bits: as root, packages named in the script, 15 minutes
	deploy/containers.sh

mutants: $(VENV)/installed  ## breaks single lines of the product: the tests named for each must fail, in about 10 minutes
	$(BIN)/python -m benchmarks.mutations

compat:  ## tests and demo with the oldest torch that is allowed and with the newest of everything, in environments of their own: build/compat-*
	$(PYTHON) -m benchmarks.compat --low $(PYTHON_LOW) --high $(PYTHON_HIGH)

bench: $(VENV)/installed  ## every contestant in turn: DLRM as in MLPerf, and a model that is nearly all look-ups
	$(BIN)/python -m benchmarks.training --config benchmarks/jobs/dlrm.toml --name dlrm --rounds 3
	$(BIN)/python -m benchmarks.training --config benchmarks/jobs/tiny.toml --name tiny --rounds 5

gpu-check: $(VENV)/installed  ## how rowcast does on the device here, three times 9 minutes at most: build/gpu-check.json
	$(BIN)/python -m benchmarks.gpu_check

bench-planner: $(VENV)/installed  ## how fast a plan is, and where its time goes
	$(BIN)/python -m benchmarks.planner

bench-start: $(VENV)/installed  ## processor time of each process and part until the first steps, with and without compiled loops
	$(BIN)/python -m benchmarks.start

bench-env: .venv-bench/installed  ## FBGEMM and TorchRec, to compare with, in a separate environment: their pins conflict with ours

.venv-bench/installed:
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy
	.venv-bench/bin/pip install --quiet --disable-pip-version-check --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0 \
		tensordict pyvers cloudpickle pyre-extensions typing-inspect mypy-extensions
	.venv-bench/bin/python -c "import fbgemm_gpu.split_table_batched_embeddings_ops_training"
	touch $@

bench-embedding: $(VENV)/installed  ## look-up and update compared with stock PyTorch and, after `make bench-env`, FBGEMM
	$(BIN)/python -m benchmarks.embedding

bench-budget: $(VENV)/installed  ## cores that each stage of the prefetcher needs for a large GPU
	$(BIN)/python -m benchmarks.budget

clean:  ## removes the environments, and no run
	rm -rf $(VENV) build/compat-low build/compat-high
