# make serve   sets up what serving needs, then serves the demo model until Ctrl-C
# make test    sets up everything, then runs the quick tests
# make test-all  runs `make test`, then all other tests but the long ones, which `make test-long` runs
# make image-test  builds the image with podman and runs it as the manifests say; make hosts-test runs a cell on hosts
#              with addresses of their own, which lose links and die. Both need root, and are among the long tests
# make wheel   builds the wheels of both distributions in dist/, with CPU kernels compiled for processors of MACHINE
#              (x86_64 or aarch64; for another than this one, with MACHINE-linux-gnu-gcc)
# make release what a release consists of: wheels, sources, image, bill of materials, checksums and notes; release-files
#              leaves out the image
# make lint    style and types
# make lines   counts lines of code by room, at HEAD and at COMMITS
# make sim     runs SEEDS schedules of faults in virtual time, on JOBS processes
# make stubs   regenerates the protobuf stubs
# make lock    writes the lock files anew after a change of pyproject.toml; LOCK="--upgrade" also takes newer versions
# make test-oldest, make test-newest   run the unit tests against either end of the ranges in pyproject.toml
#
# PYTHON chooses the interpreter of the virtual environment, TORCH_OPTIONS further options for installing torch
# (for instance an index of wheels for another CUDA version), TESTS what is run instead of all,
# SERVE further options for `spool serve`, SIM for the simulation (--first SEED, --sequences, --served, --kinds).

PYTHON ?= python3
TORCH_OPTIONS ?=
TESTS ?=
SERVE ?=
SEEDS ?= 1000
JOBS ?= $(shell nproc 2>/dev/null || echo 1)
SIM ?=
LOCK ?=
COMMITS ?=
BASE ?=
THIS_MACHINE := $(shell uname -m)
MACHINE ?= $(THIS_MACHINE)

# Where the environment forbids bytecode, every one of hundreds of processes would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

# Tests that take long by what they wait for or compute are marked `slow`; those on Ray, `ray` (docs/architecture.md).
PYTEST = $(BIN)/python -m pytest --durations=20
BESIDE_OTHERS = OMP_NUM_THREADS=1 $(PYTEST) --dist worksteal
# Where all tests are that use a Ray: reading the others takes half a minute.
RAY_TESTS := tests/chaos tests/integration/ray tests/k8s tests/hosts

VENV := .venv
BIN := $(VENV)/bin
SERVING := $(VENV)/serving
STAMP := $(VENV)/installed
# pip would compile everything before it goes on, which takes as long as unpacking it.
INSTALL := -m pip install --disable-pip-version-check --no-compile
WHEEL := $(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist
COMPILED := spool.deploy.cli.serve, spool.deploy.ray_app.application, spool.engine.models.loading, transformers.models.llama.modeling_llama
COMPILE := UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile --quiet --no-annotate --no-emit-package spool-client --python $(BIN)/python
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.lock)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.DELETE_ON_ERROR:
.PHONY: setup serve test test-all test-slow test-slow-ray test-long image-test hosts-test sim wheel release release-files lint lines format stubs lock test-oldest test-newest clean

setup: $(STAMP)

# torch comes first, by its exact version and with options of its own: nothing after it may choose another build. pip
# checks the hashes in the lock files of all that it installs from them; torch, which may be of another index, is there by
# then. Torch is compiled beside that, and of the rest what a server imports.
$(SERVING): requirements.lock pyproject.toml setup.py spool_client/pyproject.toml
	@echo "== virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "== $(TORCH) (large)"
	$(BIN)/python $(INSTALL) $(TORCH_OPTIONS) "$(TORCH)"
	@echo "== what serving needs, and Spool"
	$(BIN)/python -m compileall -q $(VENV)/lib/python*/site-packages/torch & \
	$(BIN)/python $(INSTALL) -r requirements.lock && wait
	$(BIN)/python $(INSTALL) --no-deps --no-build-isolation -e ./spool_client -e .
	$(BIN)/python -c "import $(COMPILED)"
	touch $@

$(STAMP): $(SERVING) requirements-dev.lock
	@echo "== what tests and development need"
	$(BIN)/python $(INSTALL) -r requirements-dev.lock
	touch $@

serve: $(SERVING)
	$(BIN)/spool serve $(SERVE)

# One process more than cores, for tests wait as well: the loop takes a quarter less time.
test: $(STAMP)
ifeq ($(TESTS),)
	$(BESIDE_OTHERS) -n $$(($(JOBS) + 1)) -m "not slow and not long"
else
	$(PYTEST) $(TESTS)
endif

test-all: test
	$(MAKE) -j 2 test-slow test-slow-ray

# Both at once: the tests on Ray, one after the other, wait half of the time.
test-slow: $(STAMP)
	$(BESIDE_OTHERS) -n $(JOBS) -m "slow and not ray and not long"

test-slow-ray: $(STAMP)
	$(PYTEST) $(RAY_TESTS) -m "slow and ray and not long"

# Before a release, and after a change of what they are about.
test-long: $(STAMP)
	$(BESIDE_OTHERS) -n $(JOBS) -m "long and not ray"
	$(PYTEST) $(RAY_TESTS) -m "long and ray"

# What they measure is printed; where podman or network namespaces are not to be had, they say so.
image-test: $(STAMP)
	$(PYTEST) -s -rs -m long tests/k8s/test_built_image.py

hosts-test: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTEST) -s -rs -m long tests/hosts

sim: $(STAMP)
	$(BIN)/python -m tests.sim.soak --seeds $(SEEDS) --jobs $(JOBS) $(SIM)

# tests/packaging/test_wheel_machines.py checks that an older glibc than the tag says would do.
wheel: $(SERVING)
	rm -rf build/lib* spool_client/build
	SPOOL_WHEEL_MACHINE=$(MACHINE) $(if $(filter-out $(THIS_MACHINE),$(MACHINE)),CC=$(MACHINE)-linux-gnu-gcc) \
		$(WHEEL) --verbose --config-settings=--build-option=--plat-name=manylinux_2_28_$(MACHINE) .
	$(WHEEL) ./spool_client
	rm -rf spool_client/build

# Needs podman and a compiler for aarch64; BASE is another base image of k8s/Dockerfile.
release: release-files
	podman build -f k8s/Dockerfile -t spool:$(VERSION)-cpu $(if $(BASE),--build-arg BASE=$(BASE)) .
	podman save --format oci-archive -o dist/spool-$(VERSION)-cpu.tar spool:$(VERSION)-cpu
	cd dist && rm -f SHA256SUMS && sha256sum *.* > SHA256SUMS

release-files: $(STAMP)
	rm -rf dist
	$(MAKE) wheel MACHINE=x86_64
	$(MAKE) wheel MACHINE=aarch64
	$(BIN)/uv build --quiet --sdist --no-build-isolation --python $(BIN)/python --out-dir dist .
	$(BIN)/uv build --quiet --sdist --no-build-isolation --python $(BIN)/python --out-dir dist spool_client
	$(BIN)/uv tool run --quiet --from cyclonedx-bom==7.5.0 cyclonedx-py requirements requirements.lock \
		--output-file dist/spool-serve-$(VERSION).cdx.json
	awk '/^## / { sections++ } sections == 1' CHANGELOG.md > dist/NOTES.md
	cd dist && rm -f SHA256SUMS && sha256sum *.* > SHA256SUMS

lint: $(STAMP) build/names
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/buf lint protos
	$(BIN)/mypy

# The folders by the names that they are installed under, for mypy.
build/names:
	mkdir -p $@/spool
	ln -s $(addprefix ../../../,deploy engine protos scheduler services) $@/spool
	ln -s ../../../spool_client $@/spool/client

lines:
	$(PYTHON) .ci/lines.py $(COMMITS) HEAD

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Stubs lie in the packages that use them, the public API's in the client's, and import each other there.
stubs: $(STAMP)
	rm -rf build/stubs && mkdir -p build/stubs
	cd protos && $(abspath $(BIN))/python -m grpc_tools.protoc -I. --python_out=../build/stubs --pyi_out=../build/stubs \
		--grpc_python_out=../build/stubs $$(find spool -name "*.proto")
	find build/stubs -type f -exec sed -i -E \
		-e 's/^from spool\.[a-z]+\.v1 /from spool.protos /; s/^from spool\.v1 /from spool.client.v1 /' {} +
	cp build/stubs/spool/v1/*_pb2* spool_client/v1
	cp build/stubs/spool/*/v1/*_pb2* protos

# The second file is resolved within the first one's versions, so that both name the same ones.
lock: $(STAMP)
	$(COMPILE) --universal --generate-hashes $(LOCK) --extra dev -o requirements-dev.lock pyproject.toml
	$(COMPILE) --universal --generate-hashes $(LOCK) -c requirements-dev.lock -o requirements.lock pyproject.toml

# torch stays as it is locked: other versions' builds without CUDA are not on the package index.
test-oldest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-oldest test-newest: test-%: $(STAMP)
	$(PYTHON) -m venv build/$*
	echo "$(TORCH)" > build/$*/torch.txt
	$(COMPILE) --resolution $(RESOLUTION) --upgrade -c build/$*/torch.txt --extra dev -o build/$*/requirements.txt pyproject.toml
	build/$*/bin/python $(INSTALL) $(TORCH_OPTIONS) -r build/$*/torch.txt
	build/$*/bin/python $(INSTALL) -r build/$*/requirements.txt
	build/$*/bin/python $(INSTALL) --no-deps --no-build-isolation -e ./spool_client -e .
	OMP_NUM_THREADS=1 build/$*/bin/python -m pytest -n $(JOBS) tests/unit

clean:
	rm -rf $(VENV) *.egg-info build spool_client/*.egg-info spool_client/build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
