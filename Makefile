# Everything runs in the checkout's own .venv, made on first use: what eclip needs to run, and, where
# something is checked or tested, the tools for that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
READY_DOCS := $(VENV)/.ready-docs
WORKERS ?= 2
# The environment and libeclip are made at once: packages come from a network, the other from a compiler.
MAKEFLAGS += -j$(WORKERS)
# Some containers forbid it. Then each of a thousand processes of the tests compiles eclip anew.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/pytest -q -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo serve-demo test test-fast test-lowest test-long native native-tests mutants wheel wheels gpu-test amd-test gpu-transparent check format docs proto lock clean

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

demo: $(READY) ## Compare the sharing policies on the built-in simulator and draw the report
	@$(BIN)/eclip demo

serve-demo: $(READY_DEV) ## Serve three models on the built-in simulator to three clients, with a live page: 20 s
	@$(BIN)/python examples/serving/demo.py

test: check native-tests ## Run all checks and tests: a few minutes
	@$(PYTEST)
	@echo "More seeds, longer programs: make test-long. On a host with a GPU: make gpu-test."

test-fast: check ## Run the checks and the quick unit tests: about a minute
	@$(PYTEST) -m "not slow and not long" tests/unit

# Unit tests that need no extra, on the lowest versions that pyproject.toml allows.
test-lowest: ## Run unit tests with the lowest versions of the packages that eclip needs
	@tools/test-lowest $(PYTHON)

test-long: check native-tests ## Run what `make test` leaves out: more seeds, longer programs
	@$(PYTEST) -m long

# Only `eclip exec` and `eclip record` need it.
native: ## Build libeclip, the library that `eclip exec` preloads
	@command -v $(CXX) >/dev/null || { echo "libeclip needs a C++20 compiler: install g++ and make again"; exit 1; }
	@$(MAKE) --no-print-directory -C native library

NATIVE_TESTS := $(MAKE) --no-print-directory -s -C native STRICT=1 tests library
native-tests: ## Build libeclip and the programs that test it; `make test` does
	@+if ! command -v g++ >/dev/null || ! command -v strip >/dev/null; then \
		echo "g++ or strip is missing: libeclip is not built, and its tests are skipped"; \
	elif ! $(NATIVE_TESTS) -q; then \
		echo "building libeclip and its tests (once, about a minute and a half)"; \
		$(NATIVE_TESTS); \
	fi

mutants: native-tests ## Plant faults in libeclip and see which test catches each: half an hour
	@$(PYTHON) native/testing/mutate.py --resume native/build/mutants.jsonl

wheel: $(READY) ## Build a wheel with libeclip for glibc 2.28 and newer, into dist/
	@tools/setup $(PYTHON) $(VENV) wheel
	@$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

wheels: wheel ## The same for x86-64 and for aarch64, cross-compiled by zig
	@for machine in x86_64 aarch64; do \
		[ "$$machine" = "$$(uname -m)" ] || ECLIP_WHEEL_MACHINE=$$machine \
			$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . || exit; \
	done

# No virtual environment and no network: the host's own Python, with what .gpu-deps brings along.
gpu-test: ## On a host with a GPU: its tests, a quarter of an hour (PART=1, 2 or 3: one part; PART=lanes: one file)
	@$(PYTHON) tools/gpu_test.py $(PART)

amd-test: ## On a host with an AMD GPU: the conformance suite, and that lanes keep to their masks
	@PYTHONPATH=src:$$PYTHONPATH $(PYTHON) tools/amd_test.py

gpu-transparent: native ## On a host with a GPU: what libeclip costs, and unmodified programs under it
	@PYTHONPATH=src:.gpu-deps:$$PYTHONPATH $(PYTHON) lab/gpu/transparent.py
	@$(PYTHON) tools/gpu_test.py transparent

check: $(READY_DEV) ## Lint, format check, strict types, import directions
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/pytest -q tests/unit/test_imports.py

format: $(READY_DEV) ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Not --quiet: it hides warnings from --strict, too.
docs: $(READY_DOCS) ## Build the documents as a site that works from disk, into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html in a browser"

# After a change of inference.proto; a test holds that what is checked in is fresh.
proto: $(READY_DEV) ## Generate the code of gRPC's messages
	@$(BIN)/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src src/eclip/server/protocol/inference.proto

lock: ## Pin the newest versions that pyproject.toml allows into constraints.txt
	@tools/lock $(PYTHON)

clean: ## Remove the environment and all caches
	rm -rf $(VENV) site native/build src/eclip/lib .mypy_cache .ruff_cache .pytest_cache .hypothesis eclip-demo
	find src tests lab -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt tools/setup
	@tools/setup $(PYTHON) $(VENV)
	@touch $@

$(READY_DEV): $(READY)
	@tools/setup $(PYTHON) $(VENV) dev
	@touch $@

$(READY_DOCS): $(READY)
	@tools/setup $(PYTHON) $(VENV) docs
	@touch $@
