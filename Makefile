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
# Compiled modules are kept: without them every process that a test starts compiles Ratchet again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: repro test test-gpu prove coverage programs lint bench bench-scale pictures docs ui clean
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

# Ten minutes on two cores that do nothing else, in random order. What is long because it must be is in `make prove`.
test: programs
	pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not long" --durations=15

# Everything that a GPU changes: at most 25 minutes on one of 16 GB, no downloads. Writes build/gpu.json and build/gpu.md.
# RATCHET_TEST_GPU_DEVICE=cpu tries the tests out without one.
test-gpu: $(VENV)/.ready
	pytest tests/gpu -m gpu -p no:randomly --durations=15

# Campaigns of kills, several ranks, whole pipelines (tests/proofs, and tests with the marker `long`). MINUTES=20 runs a share (.ci/proofs.py).
prove: programs
	python .ci/proofs.py $(if $(MINUTES),--minutes $(MINUTES))

# Branch coverage of src/ by the tests, and by the proofs too with PROVE=1 (an hour).
coverage: programs
	mkdir -p build/coverage
	coverage erase
	-coverage run -m pytest -n 3 --dist loadfile -m "not long"
	$(if $(PROVE),-coverage run .ci/proofs.py)
	coverage combine -q
	coverage report --format=total

# Programs that tests start. Where one may not be installed, its tests are skipped and say what to install.
programs: $(VENV)/.ready
	bash .ci/browser
	bash .ci/terminal
	bash .ci/compiler
	bash .ci/postgres
	bash .ci/prometheus

lint: $(VENV)/.ready
	ruff check
	ruff format --check
	mypy --strict src

# The peers that benchmarks measure beside us; nothing else needs them.
$(VENV)/.peers: $(VENV)/.ready
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[benchmarks]'
	@touch $@

# Half an hour on two cores that do nothing else; the tables of docs/evidence_speed.md are written.
bench: $(VENV)/.peers
	python benchmarks/everything.py

# Nodes that vanish, slow links, studies of many trials: a quarter of an hour. Their tables are in docs/evidence_scale.md,
# docs/evidence_reliability.md and docs/evidence_compression.md; full modes take 40 minutes and more (without --quick).
bench-scale: $(VENV)/.ready
	bash .ci/postgres
	failed=0; for name in spot compression sweep_scale; do python benchmarks/$$name.py --quick || failed=1; done; exit $$failed

# The pictures of README and docs/ (docs/pictures/): six minutes. Exit code 2 where a program that they need is missing.
pictures: $(VENV)/.ready
	-bash .ci/browser
	-bash .ci/terminal
	-bash .ci/prometheus
	python benchmarks/pictures.py

# The documentation as a site, in build/site; a warning is an error. Search needs a server: python -m http.server -d build/site
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 mkdocs build --quiet
	@echo build/site/index.html

ui: $(VENV)/.ready
	ratchet ui

clean:
	rm -rf $(VENV)
