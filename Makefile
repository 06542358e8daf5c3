# Everything from a fresh clone: `make train` trains the quickstart, `make test` runs what CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test verify lint install

train: install
	$(BIN)/gramian train configs/quickstart.yaml

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Long evidence: writes its figures, command and commit to docs/evidence/.
verify: install
	$(BIN)/python -m pytest -m verify

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("gramian needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
