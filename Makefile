# Two commands matter to a new user: `make quickstart` and `make test`. Both create the environment themselves.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
BASE   := $(VENV)/.installed-base
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.installed-docs

PML    := .venv-pml
TFSIM  := .venv-tfsim
TFA    := .venv-tfa
# What needs no extra, to be tried without: on the lowest versions, and on other systems.
ROOMS := tests/test_pairs.py tests/test_kernels.py $(addprefix tests/,evaluation io losses mining)

.PHONY: parity-pml parity-tfsim parity-tfa help install quickstart test test-slow test-processors test-jax test-lowest test-required test-mathematics test-images lint format docs wheel lock clean

help:
	@echo "make install     create $(VENV) and install tfdml with its development tools, versions as in constraints.txt"
	@echo "make quickstart  install what the package requires, then train, evaluate, export and report on the built-in glyphs (no download)"
	@echo "make test        the tests;  make test-slow: the longest, which make test leaves out"
	@echo "make test-processors   the tests, computed as an older processor does"
	@echo "make test-mathematics  a step of training where nothing is installed that only the platform needs"
	@echo "make test-jax    training on JAX;  make test-required: without extras;  make test-lowest: and on the lowest versions"
	@echo "make test-images TFDML_TEST_DATA=FOLDER   the tests on real images and weights: see CONTRIBUTING.md"
	@echo "make parity-pml  losses against pytorch-metric-learning itself, in an environment of its own ($(PML))"
	@echo "make parity-tfsim, make parity-tfa   the same against TensorFlow Similarity and TensorFlow Addons"
	@echo "make lint        ruff (lint, format), mypy, codespell, and the layers and size of the package"
	@echo "make docs        the documentation as a site, in site/"
	@echo "make wheel       a source archive and a wheel with the pages, in dist/"
	@echo "make lock        write constraints.txt from the versions installed in $(VENV)"

# What the package itself requires, which is all that `make quickstart` needs.
$(BASE): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "tfdml needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -e . -c constraints.txt
	@touch $(BASE)

$(STAMP): $(BASE)
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	@touch $(STAMP)

# The site has tools of its own, which neither the tests nor the package need.
$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[docs]' -c constraints.txt
	@touch $(DOCS)

install: $(STAMP)

quickstart: $(BASE)
	$(BIN)/python -m tools.quickstart

# glibc keeps what a step frees for the next one, which saves a tenth of the time.
test test-slow: export MALLOC_MMAP_THRESHOLD_ := 2000000000
test test-slow: export MALLOC_TRIM_THRESHOLD_ := 8000000000
test test-slow: export MALLOC_TOP_PAD_ := 67108864
test: $(STAMP)
	$(BIN)/python -m tests.support.groups "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m tests.support.groups slow

# As on a processor without AVX-512, with other libraries and another number of threads: sums have another order, and
# last digits differ. Other settings go before make, such as OMP_NUM_THREADS=1 make test. ONEDNN_MAX_CPU_ISA=AVX2 on a
# processor with AVX-512 ends the process in TensorFlow's bfloat16 products, so tests of mixed_bfloat16 cannot run there.
test-processors: export TF_ENABLE_ONEDNN_OPTS := 0
test-processors: export XLA_FLAGS := --xla_cpu_max_isa=AVX2
test-processors: export OPENBLAS_CORETYPE := Haswell
test-processors: export NPY_DISABLE_CPU_FEATURES := X86_V4 AVX512_ICL
test-processors: export OMP_NUM_THREADS := 3
test-processors: test

test-jax: $(STAMP)
	KERAS_BACKEND=jax $(BIN)/tfdml train --flagfile=configs/quickstart.flags --epochs=1 --run_dir=$$(mktemp -d)/run
	$(BIN)/python -m pytest $$(find tests -name 'test_jax*.py')

.venv-required/.installed .venv-lowest/.installed: .venv-%/.installed: setup.cfg
	$(PYTHON) -m venv .venv-$*
	if [ $* = lowest ]; then sed -n '/^install_requires/,/^$$/s/^ *\([a-z0-9-]*\)[>=]=\([0-9.]*\).*/\1==\2/p' setup.cfg; fi > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet -e . pytest hypothesis -c .venv-$*/constraints.txt
	@touch $@

test-required test-lowest: test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest -m "not slow" $(ROOMS)

# What losses, objectives, models and metrics need, and nothing else.
.venv-mathematics/.installed: setup.cfg
	$(PYTHON) -m venv .venv-mathematics
	.venv-mathematics/bin/python -m pip install --quiet tensorflow keras numpy scipy h5py absl-py typing-extensions packaging -c constraints.txt
	.venv-mathematics/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

test-mathematics: .venv-mathematics/.installed
	.venv-mathematics/bin/python -m tests.support.mathematics_alone

test-images: $(STAMP)
	@test -d "$(TFDML_TEST_DATA)/data" || { echo "no data/ in TFDML_TEST_DATA=$(TFDML_TEST_DATA): CONTRIBUTING.md"; exit 1; }
	TFDML_TEST_DATA="$(TFDML_TEST_DATA)" $(BIN)/python -m tests.support.groups shared_data

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
	$(BIN)/codespell -D - -D tools/words.txt
	$(BIN)/python -m tools.house

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS)
	$(BIN)/mkdocs build --strict

# With the pages, which `tfdml docs` shows.
wheel: docs
	$(BIN)/python -m build

lock: $(STAMP) $(DOCS)
	$(BIN)/python -m pip freeze --exclude-editable > constraints.txt

clean:
	rm -rf $(VENV) build dist site *.egg-info .import_linter_cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
