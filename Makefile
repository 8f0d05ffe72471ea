# "make demo" and "make test" do all the set-up on a fresh machine, in a virtual environment of their own, and then run.
#
#   PYTHON=python3.12      the Python to start from (3.10 or newer)
#   TORCH='torch==2.11.*'  another torch; default: a CPU machine gets the one below, a GPU machine the one it has, or the newest
#   TORCH_INDEX=URL        an additional package index for torch, such as PyTorch's own with its small CPU builds
#   TESTS=tests/test_x.py  part of the tests; PYTEST_ARGS='-k causal' more options for pytest; JOBS=2 processes
#   DEMO_ARGS, BENCH_ARGS  options of the demo (make demo DEMO_ARGS='--text FOLDER') and of the benchmarks

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup toolchain demo test pytest lint docs bench matrix matrix-oldest matrix-newest clean

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
TORCH_INDEX ?=
TESTS ?=
PYTEST_ARGS ?=
JOBS ?= 2
DEMO_ARGS ?=
BENCH_ARGS ?=

CPU_TORCH := torch==2.13.0
OLDEST := $(shell sed -n 's/^dependencies = \["torch>=\([0-9.]*\)"\]/\1/p' pyproject.toml)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
READY := $(VENV)/.ready

help:
	@echo "make demo    train a small model on packed text, compiled, a mask per document; pictures in demo_out/"
	@echo "make test    lint, then every test; GPU tests where there is a GPU"
	@echo "make lint | docs | bench | matrix (compile_tests on the oldest and the newest torch) | clean"

setup: $(READY)

# A GPU machine's own torch is used as it is, also without a network. torch comes before everything that depends on it, or pip
# would choose another build of it.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: name one by PYTHON=" if sys.version_info < (3, 10) else 0)'
	@if [ -z "$(TORCH)" ] && $(PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then \
	    echo "setup: $(VENV) over the packages of $(PYTHON), which has torch and a GPU"; \
	    $(PYTHON) -m venv --system-site-packages --without-pip $(VENV); \
	    $(PIP) --retries 1 --timeout 20 -e '.[test,dev]' || { \
	        echo "setup: not all packages could be installed; going on with those that are there"; \
	        echo "$(CURDIR)" >"$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/te_attn_ops.pth"; }; \
	else \
	    if [ -n "$(TORCH)" ]; then torch='$(TORCH)'; elif nvidia-smi -L >/dev/null 2>&1; then torch=torch; else torch='$(CPU_TORCH)'; fi; \
	    echo "setup: $(VENV) with $$torch"; \
	    $(PYTHON) -m venv $(VENV); \
	    $(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$$torch"; \
	    $(PIP) -e '.[test,dev]'; \
	fi
	@touch $@

toolchain: $(READY)
	@echo '#include <Python.h>' | $${CXX:-g++} -x c++ -fsyntax-only \
	    -I"$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))')" - || { \
	    echo "torch.compile needs a C++ compiler and Python's headers (Debian: apt-get install g++ python3-dev)" >&2; exit 1; }

demo: toolchain
	$(PY) examples/train_packed.py --out demo_out $(DEMO_ARGS)

test: lint pytest

# One thread per process: JOBS processes fill the cores, and compiler pools of their own would only fight over them.
pytest: toolchain
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
	    $(PY) -m pytest -n $(JOBS) --dist worksteal --durations=15 $(PYTEST_ARGS) $(TESTS)

lint: $(READY)
	@if $(PY) -c 'import mypy, ruff' 2>/dev/null; then \
	    $(PY) -m ruff check . && $(PY) -m mypy; \
	elif [ -n "$$(find $(VENV) -name te_attn_ops.pth)" ]; then \
	    echo "lint: left out, ruff and mypy could not be installed here"; \
	else \
	    echo "lint: ruff or mypy is missing from $(VENV): make clean, then again" >&2; exit 1; \
	fi

docs: $(READY)
	@$(PY) -c 'import sphinx, myst_parser, furo' 2>/dev/null || $(PIP) -e '.[docs]'
	$(PY) -m sphinx --fail-on-warning --keep-going -b html docs docs/_build/html

bench: $(READY)
	$(PY) -m benchmarks $(BENCH_ARGS)

matrix: matrix-oldest matrix-newest

matrix-oldest:
	$(MAKE) pytest VENV=build/venv-oldest TORCH='torch==$(OLDEST).*' TESTS='$(or $(TESTS),compile_tests)'

matrix-newest:
	$(MAKE) pytest VENV=build/venv-newest TORCH=torch TESTS='$(or $(TESTS),compile_tests)'

clean:
	rm -rf .venv demo_out docs/_build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
