# `make repro` and `make test` are all a newcomer needs; both may be repeated at will.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# The CPU build suffices for everything here. For a GPU, name the build (README, "On a GPU").
TORCH ?= torch==2.13.0
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DVC_NO_ANALYTICS := 1

.PHONY: repro test lint bench ui clean
.DEFAULT_GOAL := repro

# torch first and alone: asked for by another package it would bring gigabytes of CUDA libraries.
# A change of these three files installs again; another TORCH needs `make clean` first.
$(VENV)/.ready: pyproject.toml constraints.txt .ci/prerequisites
	PYTHON=$(PYTHON) bash .ci/prerequisites
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt pip
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

repro: $(VENV)/.ready
	dvc repro

test: $(VENV)/.ready
	bash .ci/browser
	bash .ci/postgres
	bash .ci/prometheus
	pytest -n 2 --dist loadfile

lint: $(VENV)/.ready
	ruff check
	ruff format --check
	mypy --strict src

# The peers that benchmarks measure beside us; nothing else needs them.
$(VENV)/.peers: $(VENV)/.ready
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[benchmarks]'
	@touch $@

# Half an hour on two cores that do nothing else; the tables of docs/performance.md are written.
bench: $(VENV)/.peers
	python benchmarks/everything.py

ui: $(VENV)/.ready
	ratchet ui

clean:
	rm -rf $(VENV)
