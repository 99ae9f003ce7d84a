# Everything runs in the checkout's own .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test native gpu-test gpu-transparent check format bench lock clean

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY) ## Compare the sharing policies on the built-in simulator and draw the report
	@$(BIN)/eclip demo

test: check ## Run all checks and tests
	@$(BIN)/pytest -q -n $(WORKERS) --dist worksteal

# Only `eclip exec` and `eclip record` need it; `make test` builds its own, with the tests.
native: ## Build libeclip, the library that `eclip exec` preloads
	@command -v $(CXX) >/dev/null || { echo "libeclip needs a C++20 compiler: install g++ and make again"; exit 1; }
	@$(MAKE) --no-print-directory -C native -j$(WORKERS) library

# No virtual environment and no network: the host's own Python, with what .gpu-deps brings along.
# A process for each file: one that aborts hides no other. GPU_TESTS="tests/gpu/test_lanes.py" runs less.
GPU_TESTS ?= $(sort $(wildcard tests/gpu/test_*.py)) tests/conformance
gpu-test: ## On a host with a GPU: its tests and the conformance suite, nothing installed
	@failed=; for file in $(GPU_TESTS); do \
		CUDA_DEVICE_MAX_CONNECTIONS=32 PYTHONPATH=src:.gpu-deps:$$PYTHONPATH $(PYTHON) -m pytest -q -p no:cacheprovider \
			-o addopts=--import-mode=importlib -o filterwarnings=default $$file || test $$? = 5 || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

gpu-transparent: native ## On a host with a GPU: what libeclip costs, and unmodified programs under it
	@PYTHONPATH=src:.gpu-deps:$$PYTHONPATH $(PYTHON) bench/gpu/transparent.py
	@CUDA_DEVICE_MAX_CONNECTIONS=32 PYTHONPATH=src:.gpu-deps:$$PYTHONPATH $(PYTHON) -m pytest -q -s -p no:cacheprovider \
		-o addopts=--import-mode=importlib -o filterwarnings=default tests/gpu/test_transparent.py

check: $(READY) ## Lint, format check, strict types, import directions
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/pytest -q tests/unit/test_imports.py

format: $(READY) ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(READY) ## Measure the solver and the simulator on this machine
	@for script in bench/*.py; do $(BIN)/python $$script || exit 1; done

lock: ## Pin the newest versions that pyproject.toml allows into constraints.txt
	@tools/lock $(PYTHON)

clean: ## Remove the environment and all caches
	rm -rf $(VENV) native/build src/eclip/lib .mypy_cache .ruff_cache .pytest_cache .hypothesis eclip-demo
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt tools/setup
	@tools/setup $(PYTHON) $(VENV)
	@touch $@
