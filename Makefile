# make serve   sets up everything, then serves the demo model until Ctrl-C
# make test    sets up everything, then runs the tests
# make lint    style and types
# make sim     runs SEEDS schedules of faults in virtual time, on JOBS processes
# make stubs   regenerates the protobuf stubs
#
# PYTHON chooses the interpreter of the virtual environment, TORCH_OPTIONS further options for installing torch
# (for instance an index of wheels for another CUDA version), TESTS what is run instead of all,
# SERVE further options for `spool serve`, SIM for the simulation (--first SEED, --sequences).

PYTHON ?= python3
TORCH_OPTIONS ?=
TESTS ?=
SERVE ?=
SEEDS ?= 1000
JOBS ?= $(shell nproc 2>/dev/null || echo 1)
SIM ?=

# What does not mind other tests beside it, so that any number of it can run at a time.
UNDISTURBED := tests/unit tests/sim tests/engine tests/docs

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

.DELETE_ON_ERROR:
.PHONY: setup serve test sim lint format stubs clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@echo "== virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "== $(TORCH) (large)"
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH_OPTIONS) "$(TORCH)"
	@echo "== Spool and what it needs"
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[dev]"
	touch $@

serve: $(STAMP)
	$(BIN)/spool serve $(SERVE)

test: $(STAMP)
ifeq ($(TESTS),)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(UNDISTURBED)
	$(BIN)/python -m pytest tests $(UNDISTURBED:%=--ignore %)
else
	$(BIN)/python -m pytest $(TESTS)
endif

sim: $(STAMP)
	$(BIN)/python -m tests.sim.soak --seeds $(SEEDS) --jobs $(JOBS) $(SIM)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

stubs: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto

clean:
	rm -rf $(VENV) *.egg-info build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
