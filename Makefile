# Two commands matter to a new user: `make quickstart` and `make test`. Both create the environment themselves.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help install quickstart test test-slow lint format lock clean

help:
	@echo "make install     create $(VENV) and install tfdml with its development tools, versions as in constraints.txt"
	@echo "make quickstart  install, then train, evaluate, export and report on the built-in glyphs (no download)"
	@echo "make test        the tests;  make test-slow: the longest, which make test leaves out"
	@echo "make lint        ruff (lint, format) and mypy"
	@echo "make lock        write constraints.txt anew from the versions installed in $(VENV)"

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "tfdml needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	@touch $(STAMP)

install: $(STAMP)

quickstart: $(STAMP)
	$(BIN)/python bin/quickstart

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(STAMP)
	$(BIN)/python -m pip freeze --exclude-editable > constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
