# Two commands matter to a new user: `make quickstart` and `make test`. Both create the environment themselves.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.installed-docs

PML    := .venv-pml
TFSIM  := .venv-tfsim
TFA    := .venv-tfa

.PHONY: parity-pml parity-tfsim parity-tfa help install quickstart test test-slow lint format docs code-map wheel lock clean

help:
	@echo "make install     create $(VENV) and install tfdml with its development tools, versions as in constraints.txt"
	@echo "make quickstart  install, then train, evaluate, export and report on the built-in glyphs (no download)"
	@echo "make test        the tests;  make test-slow: the longest, which make test leaves out"
	@echo "make parity-pml  losses against pytorch-metric-learning itself, in an environment of its own ($(PML))"
	@echo "make parity-tfsim, make parity-tfa   the same against TensorFlow Similarity and TensorFlow Addons"
	@echo "make lint        ruff (lint, format), mypy and the layers of the imports"
	@echo "make docs        the documentation as a site, in site/;  make code-map: draw the picture of its code map anew"
	@echo "make wheel       a source archive and a wheel, in dist/"
	@echo "make lock        write constraints.txt anew from the versions installed in $(VENV)"

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "tfdml needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	@touch $(STAMP)

# The site has tools of its own, which neither the tests nor the package need.
$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[docs]' -c constraints.txt
	@touch $(DOCS)

install: $(STAMP)

quickstart: $(STAMP)
	$(BIN)/python bin/quickstart

# In three runs, one after another, all of them even if one fails: what networks leave in a process's memory goes with it.
NETWORKS := $(addprefix tests/,backbones layers losses mining models objectives)
FILES    := $(addprefix tests/,cluster data embeddings evaluation export retrieval)
define run_tests
	@failed=0; for part in "$(NETWORKS)" "$(FILES)" "tests $(addprefix --ignore=,$(NETWORKS) $(FILES))"; do \
	  $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m $(1) $$part || failed=1; \
	done; exit $$failed
endef

test: $(STAMP)
	$(call run_tests,"not slow")

test-slow: $(STAMP)
	$(call run_tests,slow)

# Each library compared with has an environment of its own: PyTorch, or TensorFlow with Keras 2.
$(PML)/.installed $(TFSIM)/.installed $(TFA)/.installed: .venv-%/.installed: tests/parity/requirements_%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet -r $<
	@touch $@

parity-pml: $(STAMP) $(PML)/.installed
	$(BIN)/python -m pytest tests/parity/test_pml.py

parity-tfsim: $(STAMP) $(TFSIM)/.installed
	$(BIN)/python -m pytest tests/parity/test_keras_peers.py -k similarity

# Needs Python 3.11: make parity-tfa PYTHON=python3.11
parity-tfa: $(STAMP) $(TFA)/.installed
	$(BIN)/python -m pytest tests/parity/test_keras_peers.py -k addons

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS)
	$(BIN)/mkdocs build --strict

code-map: $(STAMP)
	$(BIN)/python docs/tools/code_map.py

wheel: $(STAMP)
	$(BIN)/python -m build

lock: $(STAMP) $(DOCS)
	$(BIN)/python -m pip freeze --exclude-editable > constraints.txt

clean:
	rm -rf $(VENV) build dist site *.egg-info .import_linter_cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
