# The verbs: install, lint, check, test. Each installs what it needs first; nothing is installed twice.
#
#   make train ARGS="recipe=toy trainer.max_epochs=3"    overrides for the run
#   make test ARGS="tests/unit -k sampler"               arguments for pytest; test-all takes them, too
#   make install PYTHON=python3.12                       the interpreter .venv is made with
#   make gpu PYTHON=python3 ARGS="--only tests"          on a machine with a GPU; installs nothing, see docs/gpu.md

PYTHON ?= python3
ARGS ?=
WHEELS ?= wheels
HAVE ?=
PYTHON_VERSION ?= 3.12

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PARALLEL := --numprocesses=3 --dist=worksteal

# The coming versions of what is supported, beside $(VENV), and the tests that they concern.
NEXT := .next
NEXT_PACKAGES := hydra-core==1.4.0rc3 omegaconf==2.4.1rc1
NEXT_TESTS := tests/unit/config tests/unit/sweeps tests/unit/test_composing.py tests/unit/test_cli.py \
  tests/unit/test_answers.py tests/unit/test_completion.py tests/unit/test_build.py tests/features/test_search_path.py

# For its published schema, which a test reads; of what it depends on, nothing is installed.
SKYPILOT := $(VENV)/skypilot
SKYPILOT_PACKAGE := skypilot==0.14.1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install train test test-all test-next gpu gpu-test gpu-wheels lint check format wheel docs pictures clean

help:
	@echo "make install   make $(VENV) and install the project and its tools in it"
	@echo "make train     train the default recipe; ARGS=\"recipe=toy trainer.gpus=0\" passes overrides"
	@echo "make test      run the tests, in twelve minutes on two cores; ARGS=\"tests/unit\" passes arguments to pytest"
	@echo "make test-all  run all of them, with the further variants and slow ones that make test leaves out"
	@echo "make test-next run the tests of the configuration with Hydra's next version, in three minutes on two cores"
	@echo "make gpu       test and benchmark on a GPU in twenty minutes; the report is benchmarks/GPU.md"
	@echo "make gpu-test  run tests/gpu alone, with $(VENV)"
	@echo "make gpu-wheels  download what make gpu needs without a network; PYTHON_VERSION=3.12 HAVE=pip-list.txt"
	@echo "make lint      style and format (ruff)"
	@echo "make check     types (mypy)"
	@echo "make format    format the code and fix what ruff can fix"
	@echo "make wheel     build dist/*.whl and dist/*.tar.gz"
	@echo "make docs      build the documentation's site, build/docs/index.html, without a network"
	@echo "make pictures  make the pictures of README and docs again; needs chromium"
	@echo "make clean     remove $(VENV), $(NEXT), dist and caches; outputs stay"

install: $(STAMP)

# The stamp is written last, so an install that was interrupted is done again. An environment that can't run its own
# Python (another machine's, or one whose interpreter was removed) is made afresh.
$(STAMP): pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "'$(PYTHON)' was not found. Install Python 3.10 or newer, or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "'$(PYTHON)' is $$("$(PYTHON)" --version 2>&1); Python 3.10 or newer is needed." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' can't make virtual environments: its venv module is missing." >&2; \
	  echo "On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@"$(BIN)/python" -m pip --version >/dev/null 2>&1 || { \
	  echo "Making $(VENV) with $$("$(PYTHON)" --version)"; "$(PYTHON)" -m venv --clear "$(VENV)"; }
	@echo "Installing the project and its tools in $(VENV); the first time this downloads PyTorch"
	"$(BIN)/python" -m pip install --disable-pip-version-check --quiet --editable '.[dev]'
	@touch "$@"

train: install
	"$(BIN)/python" -m framework $(ARGS)

test: install
	"$(BIN)/python" -m pytest $(PARALLEL) $(ARGS)

test-all: install $(SKYPILOT)/.installed
	"$(BIN)/python" -m pytest $(PARALLEL) --exhaustive $(ARGS)

$(SKYPILOT)/.installed: Makefile $(STAMP)
	rm -rf "$(SKYPILOT)"
	"$(BIN)/python" -m pip install --disable-pip-version-check --quiet --no-deps --target "$(SKYPILOT)" $(SKYPILOT_PACKAGE)
	@touch "$@"

$(NEXT)/.installed: Makefile $(STAMP)
	rm -rf "$(NEXT)"
	"$(BIN)/python" -m pip install --disable-pip-version-check --quiet --no-deps --target "$(NEXT)" $(NEXT_PACKAGES)
	@touch "$@"

test-next: install $(NEXT)/.installed
	PYTHONPATH="$(CURDIR)/$(NEXT)" "$(BIN)/python" -m pytest $(PARALLEL) $(or $(ARGS),$(NEXT_TESTS))

# PYTHON is an interpreter that has torch; other packages that it lacks come from WHEELS.
gpu:
	"$(PYTHON)" -m benchmarks.prove_gpu --wheels "$(WHEELS)" $(ARGS)

gpu-test: install
	"$(BIN)/python" -m pytest tests/gpu -m gpu $(ARGS)

# HAVE is a file with the output of the other machine's `pip list`; what it has is left out.
gpu-wheels:
	"$(PYTHON)" -m benchmarks.gpu_wheels --wheels "$(WHEELS)" --python-version "$(PYTHON_VERSION)" \
	  $(if $(HAVE),--have "$(HAVE)") $(ARGS)

lint: install
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .

check: install
	"$(BIN)/mypy"

format: install
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

wheel: install
	"$(BIN)/python" -m build

# Built anew each time: what is generated from the code isn't among the files that Sphinx compares.
docs: install
	rm -rf build/docs
	"$(BIN)/python" -m sphinx -W --keep-going -q -E -b html -d build/doctrees -c docs/site . build/docs
	@echo "Built build/docs/index.html"

pictures: install
	"$(BIN)/python" -m docs.pictures

clean:
	rm -rf "$(VENV)" "$(NEXT)" build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path "./$(VENV)" -prune -o -path ./.git -prune -o -name __pycache__ -type d -exec rm -rf {} +
