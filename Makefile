# make setup   an environment in .venv, at the versions of constraints.txt
# make run     the smallest comparison: plain federated averaging against FOT on scikit-learn's digits
# make test    lint, types, tests
# make format  rewrite the sources in the house style

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP  := $(VENV)/.installed

.PHONY: setup run test format
.DELETE_ON_ERROR:

setup: $(STAMP)

# The stamp is the last thing written, so an install that fails is tried again the next time.
# torch and the build backend come first: the editable install then finds both and fetches neither.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fot needs Python 3.11 or newer: make setup PYTHON=python3.11")'
	@rm -f $@
	@echo "setup: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: installing torch (the largest download)"
	@$(PIP) torch
	@echo "setup: installing fot and its tools"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@
	@echo "setup: done"

run: setup
	$(BIN)/fot compare digits --methods fedavg,fot --seeds 3

# One thread a test process: two cores, two processes.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src reference
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
