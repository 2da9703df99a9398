# Two commands: `make demo` and `make test`. Both set everything up first, in .venv and target. `make test-all` is everything.
#
#   make demo TORCH=cpu    takes torch without CUDA (a tenth of the download)
#   make PYTHON=python3.12 takes another interpreter (3.11 or newer)

PYTHON ?= python3
TORCH ?= auto
MINUTES ?= 3
TIMES ?= 3

VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
# uv knows PyTorch's own indexes: `--torch-backend cpu` takes its build without CUDA.
TORCH_FLAGS := $(if $(filter cpu,$(TORCH)),--torch-backend cpu)
$(if $(filter auto cpu,$(TORCH)),,$(error TORCH=$(TORCH): it is auto, which comes with CUDA, or cpu))
NEXTEST := $(shell cargo nextest --version >/dev/null 2>&1 && echo yes)
RUST_TESTS := $(if $(NEXTEST),cargo nextest run --locked --workspace --no-fail-fast,cargo test --locked --workspace --no-fail-fast --lib --bins --tests)
# Where F-Stack is installed: FF_PATH, or its pkg-config file.
FSTACK := $(if $(FF_PATH),yes,$(shell pkg-config --exists libfstack 2>/dev/null && echo yes))
# One build serves the editable installation and the wheel, so the tests run the extension of the wheel. zig links it against
# the glibc of 2014: it runs on every newer distribution.
EXTENSION := --profile release --locked --zig --compatibility manylinux2014 --interpreter $(abspath $(BIN))/python

DENY := $(shell cargo deny --version >/dev/null 2>&1 && echo yes)
# Advisories are checked where there is a copy of their database: `cargo deny fetch`.
ADVISORIES := $(if $(wildcard $(or $(CARGO_HOME),$(HOME)/.cargo)/advisory-dbs/*),advisories)
DPDK := $(shell pkg-config --exists 'libdpdk >= 22.11' 2>/dev/null && echo yes)

export VIRTUAL_ENV := $(abspath $(VENV))

.PHONY: help setup build demo test test-all format lint lint-all deny rust-test rust-test-all dpdk-test fstack-test loom asan miri fuzz fuzz-reduce world wheel licenses bench-check bench-record python-test python-test-all oldest docs bench bench-peers soak wire clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: build ## train Breakout for MINUTES=3 on this machine, with a live page
	$(BIN)/python examples/breakout_apex.py --minutes $(MINUTES) --evaluation-games 10 --evaluation-frames 6000 --evaluation-epsilon 0.05

test: lint rust-test python-test ## formatting, lints, types, Rust and Python: everything but what is slow

test-all: test lint-all docs rust-test-all bench-check loom python-test-all ## everything: also features, documentation, counts, models, slow tests

setup: $(VENV)/.installed

$(BIN)/uv:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv

# Everything but the package itself. The stamp names the choice of torch, so that another choice installs again.
$(VENV)/.installed: $(BIN)/uv Makefile pyproject.toml constraints.txt $(VENV)/.torch-$(TORCH)
	$(UV) --compile-bytecode --constraint constraints.txt $(TORCH_FLAGS) --requirements pyproject.toml --extra train --extra data --extra sb3 --extra torchrl --extra tianshou --extra bench --extra redis --extra ray --extra wandb --extra nvml --extra dev
	@touch $@

$(VENV)/.torch-$(TORCH): $(BIN)/uv
	@rm -f $(VENV)/.torch-*
	@touch $@

build: setup ## build the extension into .venv, optimised
	PATH=$(abspath $(BIN)):$$PATH MATURIN_PEP517_ARGS="$(EXTENSION)" $(UV) --no-deps --no-build-isolation --reinstall-package innet-drl --editable .

format: setup ## format Rust and Python
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(VENV)/.packaging ## the manylinux wheel, in dist; TARGET=aarch64-unknown-linux-gnu or -apple-darwin (rustup target add) for others
	rm -f dist/*.whl
	PATH=$(abspath $(BIN)):$$PATH maturin build --quiet $(EXTENSION) $(if $(TARGET),--target $(TARGET)) --out dist
	$(if $(findstring darwin,$(TARGET)),,$(BIN)/auditwheel show dist/*.whl)

# What a wheel needs, without the other dependencies.
$(VENV)/.packaging: $(BIN)/uv constraints.txt
	$(UV) --constraint constraints.txt auditwheel maturin ziglang
	@touch $@

licenses: ## gather the licences of the extension's crates again; needs cargo-about
	cargo about generate --locked --offline --manifest-path crates/replay_py/Cargo.toml --output-file LICENSES-THIRD-PARTY.txt about.hbs

deny: ## licences, duplicates, sources and known faults of dependencies; needs cargo-deny
	cargo deny --offline --locked --all-features check licenses bans sources $(ADVISORIES)
	$(if $(ADVISORIES),,@echo 'skipped, no copy of the advisories (cargo deny fetch): known faults of dependencies')

lint: setup ## formatting, clippy, ruff, mypy
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets --quiet -- --deny warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

lint-all: lint ## also every feature, the documentation of Rust, the container and dependencies
	cargo clippy --locked --package replay_core --all-targets --features loom --quiet -- --deny warnings
	cargo clippy --locked --package replay_core --test schedules --features shuttle --quiet -- --deny warnings
	cargo clippy --locked --package fstack_sys --all-targets --all-features --quiet -- --deny warnings
	cargo clippy --locked --package stack_fstack --package innet_replay --all-targets --features fstack --quiet -- --deny warnings
	cargo clippy --locked --package gradients --package innet_replay --all-targets --features dpdk --quiet -- --deny warnings
	cargo clippy --locked --package replay_py --features fstack,dpdk --quiet -- --deny warnings
	RUSTDOCFLAGS="--deny warnings" cargo doc --locked --workspace --no-deps --quiet
	RUSTDOCFLAGS="--deny warnings" cargo doc --locked --package fstack_sys --package stack_fstack --package gradients_net --features fstack,dpdk --no-deps --quiet
	$(BIN)/hadolint Containerfile
	$(if $(DENY),$(MAKE) deny,@echo 'skipped, cargo-deny not found (cargo install --locked cargo-deny): make deny')

rust-test: setup ## Rust tests, and tables under random schedules
	$(RUST_TESTS)
	cargo test --locked --package replay_core --features shuttle --test schedules

rust-test-all: rust-test ## also the examples of the documentation, DPDK and F-Stack
	cargo test --locked --workspace --exclude replay_py --doc
	$(if $(DPDK),$(MAKE) dpdk-test,@echo 'skipped, DPDK 22.11 not found (Debian: apt install libdpdk-dev): make dpdk-test')
	$(if $(FSTACK),$(MAKE) fstack-test,@echo 'skipped, F-Stack not found (docs/how-to/fstack.md): make fstack-test')

# Wants DPDK, and for what goes over veth pairs ethtool and the right to make network namespaces.
dpdk-test: ## gradients over DPDK's devices: memif, and veth pairs by af_packet
	cargo test --locked --package fstack_sys --features dpdk
	cargo test --locked --package gradients --features dpdk --lib
	cargo test --locked --package gradients --package innet_replay --features dpdk --test dpdk -- --show-output

# Needs F-Stack, and the right to make network namespaces. RECORD=FILE writes the passed tests to FILE, as JSON.
fstack-test: ## client and server through F-Stack, over veth pairs and memif
	cargo test --locked --package fstack_sys --features fstack
	cargo test --locked --package stack_fstack --features fstack --lib --test named
	INNET_FSTACK_RECORD=$(abspath $(RECORD)) cargo test --locked --package innet_replay --features fstack --test fstack -- --show-output links::

# For the whole workspace, as the Rust tests: that is one build for both.
COUNTS := cargo test --locked --quiet --workspace --bench counts --

bench-check: ## allocations, reads, writes and bytes of each operation, against benchmarks/counts.json
	$(COUNTS)

bench-record: ## record them again, after a change that explains the difference
	$(COUNTS) --record

loom: ## model checks of the lock-free parts, and the mutations that must make them fail
	cargo test --locked --package replay_core --features loom --test 'loom_*'

# The flag wants a nightly compiler, unless the stable one is told to take it.
ASAN := RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=target/asan
asan: ## the Rust tests of memory, server and sums under AddressSanitizer
	$(ASAN) cargo test --locked --no-fail-fast --target $(shell rustc -vV | sed -n 's/host: //p') --lib --tests \
		--package base --package replay_core --package replay_wire --package replay_link --package replay_client --package replay_server \
		--package gradients --package gradients_net

# Few cases of property tests: Miri takes some thousand times as long. PROPTEST_CASES sets another number. crossbeam-epoch, of rayon, keeps to
# Tree Borrows and never frees its global queue; `make asan` looks for leaks.
MIRI := PROPTEST_CASES=$(or $(PROPTEST_CASES),4) MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-tree-borrows -Zmiri-ignore-leaks" CARGO_TARGET_DIR=target/miri cargo +nightly miri
miri: ## Rust tests of memory, wire and sums in Miri, which checks every access; needs a nightly compiler and cargo-nextest
	@cargo +nightly miri --version >/dev/null 2>&1 || { echo 'Miri is missing: rustup toolchain install nightly --component miri,rust-src'; exit 1; }
	$(MIRI) nextest run --profile miri --locked --no-fail-fast --package base --package replay_core --package replay_wire --package gradients
	@echo 'left out beside what the profile in .config/nextest.toml leaves out, number and reason:'
	@grep -rhoP 'cfg_attr\(miri, ignore = "\K[^"]+' crates | sort | uniq -c

# A target of verify/fuzz, each in turn for its part of the MINUTES. New inputs go into tests/__fuzz__/TARGET/corpus, a failure into crashes
# beside it. Coverage wants a flag of nightly compilers, which --rustc-bootstrap allows on the stable one.
FUZZED ?= frames_of_a_peer requests_to_a_memory bytes_to_a_server bytes_to_a_client changed_snapshots parameters texts_of_users datagrams_to_an_aggregator ethernet_frames
BOLERO := --package fuzz --sanitizer NONE --rustc-bootstrap

fuzz: ## fuzz for MINUTES=3, guided by coverage; FUZZED names targets; needs cargo-bolero (cargo install --locked cargo-bolero)
	@command -v cargo-bolero >/dev/null || { echo 'cargo-bolero is missing: cargo install --locked cargo-bolero'; exit 1; }
	for target in $(FUZZED); do \
		cargo bolero test $(BOLERO) -T $$(($(MINUTES) * 60 / $(words $(FUZZED))))s $$target || exit 1; \
	done

fuzz-reduce: ## leave only inputs that cover what no other does
	for target in $(FUZZED); do cargo bolero reduce $(BOLERO) -E=-use_counters=0 $$target || exit 1; done

SEEDS ?= 10000
world: ## the simulated worlds of SEEDS=10000 numbers, of a range, 500..600, or of one: SEED=7
	$(if $(SEED),INNET_WORLD_SEED=$(SEED),INNET_WORLD_SEEDS=$(SEEDS)) cargo test --locked --profile checked --package world --test world no_world -- --nocapture

PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist loadfile

python-test: build ## Python tests, the check of the stub, and the examples of the documents
	$(PYTEST) -m 'not slow'

python-test-all: python-test $(if $(filter x86_64,$(shell uname -m)),wheel) ## also the slow ones: launchers, benchmarks, examples, the wheel
	$(PYTEST) -m slow

# Named one by one: uv takes the oldest releases of what it is asked for, not of what that needs. Wants the network.
PROMISED := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["dependencies"], *(each for name in ("sb3", "torchrl", "tianshou") for each in project["optional-dependencies"][name]))

oldest: wheel ## the adapters' tests beside the oldest releases that they promise, in .oldest
	$(BIN)/uv venv --quiet --clear .oldest
	$(BIN)/uv pip install --quiet --python .oldest/bin/python --resolution lowest-direct $(TORCH_FLAGS) \
		dist/*.whl $$($(BIN)/python -c '$(PROMISED)') 'pytest>=8.4' 'pytest-timeout>=2.4' 'sb3-contrib>=2.9' 'scipy>=1.15'
	.oldest/bin/python -m pytest tests/adapters

# Material's notice about the next major version of MkDocs is no warning of this site.
docs: $(VENV)/.docs ## write docs/reference/api, and build the documentation site into build/site; any warning is an error
	$(BIN)/python docs/_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

$(VENV)/.docs: $(VENV)/.installed
	$(UV) --constraint constraints.txt --requirements pyproject.toml --extra docs
	@touch $@

bench: build ## every benchmark, beside the peers where `make bench-peers` was run (an hour on two cores)
	$(BIN)/python -m benchmarks all
	$(BIN)/python -m benchmarks table

bench-peers: setup ## install the peers, in environments of their own under .peers
	for peer in $(basename $(notdir $(wildcard benchmarks/peers/*.txt))); do \
		$(PYTHON) -m venv .peers/$$peer && \
		$(BIN)/uv pip install --quiet --python .peers/$$peer/bin/python --requirements benchmarks/peers/$$peer.txt || exit 1; \
	done
	@command -v redis-server >/dev/null || echo 'redis-server is missing: install it (Debian: apt install redis-server)'

# Tests of documents, packages, analyses and benchmarks have neither waits nor races. On busy cores a test with three nodes of Ray takes a quarter
# of an hour. The variables repeat exits of an interpreter during a call (tests/replay/test_interpreter_end.py), and triple the time of a test.
SOAKED := $(addprefix tests/,replay server distributed launch train) --ignore=tests/launch/test_ray.py
soak: build ## a server, and three under a supervisor, killed ten times under load; the Rust and Python suites, TIMES=3 times each on busy processors; output in build/soak
	$(BIN)/python -m benchmarks killed --times 10 --writers 20
	$(BIN)/python -m benchmarks supervised
	mkdir -p build/soak
	for number in 1 2 3 4; do sh -c 'while :; do :; done' & busy="$$busy $$!"; done; trap "kill $$busy" EXIT; \
	export INNET_REPEATS=10 INNET_PATIENCE=3; red=0; \
	for turn in $$(seq $(TIMES)); do \
		$(RUST_TESTS) >build/soak/rust-$$turn.log 2>&1 || red=1; \
		$(BIN)/python -m pytest -q $(SOAKED) >build/soak/python-$$turn.log 2>&1 || red=1; \
		for suite in rust python; do echo "$$suite $$turn: $$(tail -n 1 build/soak/$$suite-$$turn.log)"; done; \
	done; exit $$red

wire: ## generate the Rust code of the wire again, after a change of the schema (wants the command capnp)
	cargo check --locked --quiet --package replay_wire --features generate

clean: ## remove what was built
	cargo clean
	rm -rf $(VENV)
