# CometMQ. `make help` lists the targets. A fresh machine needs Python 3.11 or newer and make; the rest comes by itself.

SHELL := /bin/sh
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.synced
UV     := $(shell sed -n 's/.*"\(uv==[0-9.]*\)".*/\1/p' pyproject.toml)
SOURCES = $(wildcard bench cometmq examples scripts services spark tests)
# One list of everything that was left out, shown at the end of `make test`.
SKIPPED := $(CURDIR)/build/skipped.txt
# Where `make lag` keeps snapshots and results.
LAG ?= data/lag
# Processes that run tests at the same time
JOBS ?= 2
# Arguments for pytest, e.g. make test-unit ARGS="-k batch -x"
ARGS ?=

.PHONY: help
help:  ## Show this list
	@echo "usage: make TARGET"; echo
	@sed -n 's/^\([a-z][a-z0-9-]*\):.*##  *\(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  %-14s %s\n", $$1, $$2}'

# --- run ----------------------------------------------------------------------------------------------------------

.PHONY: run
run: $(STAMP)  ## The main job on real input: every line of Python's library through a cluster and back (KEEP=1 leaves it up)
	@$(BIN)/python -u -m examples.roundtrip $(if $(KEEP),--keep) $(ARGS)

.PHONY: bench
bench: $(STAMP)  ## Produce, consume, latency, and the bare loops they are measured against; JSON and tables
	@$(BIN)/python -m bench $(ARGS)

.PHONY: lag
lag: $(STAMP)  ## Lag of the local cluster's consumer groups: export the offsets, run the Spark job (LAG=folder)
	@$(BIN)/cometmq offsets export --output $(LAG)/snapshots
	@$(BIN)/python -m spark.lag.job --snapshots $(LAG)/snapshots --results $(LAG)/results $(ARGS)

.PHONY: docs
docs: $(STAMP)  ## The documents as a site with search, in build/site; fails at a dead link or a page in no menu
	@UV_PROJECT_ENVIRONMENT=build/docs-env $(BIN)/uv sync --quiet --frozen --only-group docs --no-python-downloads
	@NO_MKDOCS_2_WARNING=1 build/docs-env/bin/mkdocs build && echo "open build/site/index.html"

# --- environment --------------------------------------------------------------------------------------------------

.PHONY: setup
setup: $(STAMP)  ## The project's own environment in .venv, from uv.lock: about 1.1 GB
	@echo "ready in $(VENV): the services, the SDK, the cometmq command, the lag job with Spark, and what tests need"
	@echo "go on with: . $(BIN)/activate"

$(STAMP): pyproject.toml uv.lock $(wildcard cometmq/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "CometMQ needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "making $(VENV) from uv.lock: about 1.1 GB, most of it Spark; a minute or more, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv does not work here (Debian: apt install python3-venv)" >&2; rm -rf $(VENV); exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(UV)"
	@UV_PROJECT_ENVIRONMENT=$(VENV) $(BIN)/uv sync --quiet --frozen --all-extras --no-python-downloads
	@touch $@

.PHONY: lock
lock: $(STAMP)  ## Write uv.lock anew after a change of the dependencies
	@$(BIN)/uv lock --quiet --no-python-downloads

# --- contract -----------------------------------------------------------------------------------------------------

.PHONY: proto
proto: $(STAMP)  ## Generate cometmq/v1 from proto/
	@$(BIN)/python scripts/protos.py

.PHONY: proto-check
proto-check: $(STAMP)  ## Prove that cometmq/v1 is byte for byte what generation gives
	@$(BIN)/python scripts/protos.py --check

.PHONY: buf
buf:  ## Lint proto/ with buf (from npm; without npm a named skip)
	@scripts/buf_lint.sh

# --- reading the source -------------------------------------------------------------------------------------------

.PHONY: fmt
fmt: $(STAMP)  ## Format, and mend what ruff can mend
	@$(BIN)/ruff format --quiet $(SOURCES)
	@$(BIN)/ruff check --quiet --fix $(SOURCES)

.PHONY: lint
lint: $(STAMP)  ## ruff: rules and format; uv.lock in step with pyproject.toml
	@$(BIN)/ruff check --quiet $(SOURCES) && $(BIN)/ruff format --quiet --check $(SOURCES) && echo "ruff: clean"
	@$(BIN)/uv lock --quiet --check --offline --no-python-downloads || { echo "run: make lock" >&2; exit 1; }

.PHONY: types
types: $(STAMP)  ## mypy --strict
	@$(BIN)/mypy $(SOURCES)

.PHONY: arch
arch: $(STAMP)  ## The import contracts of pyproject.toml
	@$(BIN)/lint-imports --no-logo

.PHONY: static
static: lint types arch proto-check buf  ## All of the above that only reads

# --- tests --------------------------------------------------------------------------------------------------------

# pytest adds what it skipped to the list (tests/conftest.py).
PYTEST = TEST_SKIPPED=$(SKIPPED) $(BIN)/python -m pytest $(ARGS)
# A file's tests stay together: they share clusters that are up.
# A process that crashes ends the run; pytest-xdist would wait for its tests for ever.
AT_ONCE = -n $(JOBS) --dist loadfile --max-worker-restart 0

.PHONY: test
test: $(STAMP)  ## Everything that has to be green before a commit; about 8 minutes on 2 cores
	@mkdir -p build && : > $(SKIPPED)
	@TEST_SKIPPED=$(SKIPPED) $(MAKE) -j2 --output-sync=target lint arch proto-check buf
	@$(MAKE) -j2 types suite
	@$(MAKE) skipped

# Two processes for a core: most of their time the tests wait for clocks, disks and other processes.
suite: JOBS = 4
.PHONY: suite
suite: $(STAMP)  ## The tests of make test, without its static checks
	@$(PYTEST) -q $(AT_ONCE)

.PHONY: skipped
skipped:  ## What the last `make test` left out, and why
	@if [ -s $(SKIPPED) ]; then echo "left out:"; sort -u $(SKIPPED) | sed 's/^/  /'; else echo "left out: nothing"; fi

.PHONY: test-unit
test-unit: $(STAMP)  ## The fast tests alone
	@$(BIN)/python -m pytest -q tests/unit tests/format tests/tidy $(ARGS)

.PHONY: chart
chart: $(STAMP)  ## The chart: schema, Helm 3 and 4, Kubernetes 1.30 to 1.37, and its containers run (root)
	@$(BIN)/python -m scripts.chart_schema --check
	@$(BIN)/python -m pytest -q tests/chart $(ARGS)

.PHONY: test-long
test-long: $(STAMP)  ## All tests, the slow ones too, with many more examples; SEED=n replays
	@TEST_PROFILE=ci $(BIN)/python -m pytest -q --slow --timeout 600 $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: test-share
# Left to test-long and test-faults: 2,000 lives of stores, of which make test plays 40, and the memory of services that a
# thousand connections do not read, which wants a machine of its own; make test plays it with some tens.
test-share: $(STAMP)  ## What CI plays of the long tiers: every property test, every fourth slow one; SEED=n replays
	@TEST_PROFILE=ci $(PYTEST) -q $(AT_ONCE) -m "hypothesis or slow" --slow --slow-share 4 --timeout 600 \
		-k "not many_lives and not a_thousand_of_them" \
		$(if $(SEED),--seed $(SEED)) --ignore tests/compat --ignore tests/kube --ignore tests/releases tests

.PHONY: test-faults
test-faults: $(STAMP)  ## Power cuts, kill -9, failing and full disks, damaged files, counted; SEED=n replays
	@TEST_PROFILE=ci $(PYTEST) -q $(AT_ONCE) --dist worksteal --slow --timeout 600 $(if $(SEED),--seed $(SEED)) \
		tests/faults tests/regressions tests/model/test_store_model.py

.PHONY: test-stalls
test-stalls: $(STAMP)  ## The suite of `make test`, its processes stopped for moments at random; SEED=n
	@$(BIN)/python -m scripts.stalls $(or $(SEED),$(shell date +%s)) $(BIN)/python -m pytest -q $(AT_ONCE) $(ARGS)

.PHONY: test-chaos
test-chaos: $(STAMP)  ## Real clusters: kills, pauses, partitions, bad disks, power cuts; a fixed list, counted (root)
	@$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: chaos
chaos: $(STAMP)  ## The same at random: MINUTES=n (5), SEED=n replays, ARGS="--keep FOLDER"
	@$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: test-sim
test-sim: $(STAMP)  ## Fail-over in a simulated cluster: SEEDS=2000 runs; SEED=n tells one of them line by line
	@$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),$(if $(SEEDS),--seeds $(SEEDS)))

.PHONY: test-compat
test-compat: $(STAMP)  ## Apache RocketMQ 4.9.8 and 5.5.1 on our folders, and we on theirs; needs a JDK and Maven
	@$(PYTEST) -q $(AT_ONCE) --dist worksteal --slow --timeout 600 tests/compat

.PHONY: test-releases
test-releases: $(STAMP)  ## This release and earlier ones in one broker group, which it builds once; about 2 minutes
	@$(BIN)/python -m scripts.releases
	@$(PYTEST) -q $(AT_ONCE) --dist worksteal --slow --timeout 600 tests/releases

.PHONY: test-e2e
test-e2e: $(STAMP)  ## Leases and members with a real API server of Kubernetes; needs Go, builds it once (minutes)
	@mkdir -p build
	@$(BIN)/python -m scripts.kube || true
	@$(PYTEST) -q -s --slow --timeout 600 tests/kube

.PHONY: test-native
test-native: $(STAMP)  ## The C extension against plain Python under gcc's sanitizers; a few minutes
	@scripts/sanitize_native.sh

.PHONY: mutants
mutants: $(STAMP)  ## Break each rule, invariant and feature of the documents; its tests must notice (WORDS="lease"; SHARE=1/6 plays a part)
	@JOBS=$(JOBS) $(BIN)/python -m scripts.mutants $(if $(SHARE),--trust --share $(SHARE)) $(WORDS)

# --- the rest -----------------------------------------------------------------------------------------------------

.PHONY: clean
clean:  ## Remove caches and built files; keeps .venv and the data of local clusters
	@rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache *.egg-info
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
