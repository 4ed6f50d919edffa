# Two commands are enough for most readers: `make report` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Options for pip, such as an index with CPU-only torch builds: see the README.
PIP_OPTIONS ?=
# Options for the report, such as: make report REPORT="--quick --device cpu"
REPORT ?=
READY := $(VENV)/.ready

.PHONY: report test quick data lab lint types schema clean help

help:  ## Show what there is
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*##/\t/'

report: $(READY)  ## Fetch the data, run the notebooks on the best device, write results/<run>/
	$(BIN)/labhelpers report $(REPORT)

quick: $(READY)  ## A first look in a minute or two
	$(BIN)/labhelpers report --quick $(REPORT)

test: $(READY) lint types  ## Run every test
	$(BIN)/python -m pytest

data: $(READY)  ## Fetch and verify FashionMNIST
	$(BIN)/labhelpers data

lab: $(READY)  ## Open the report in JupyterLab, on loopback and with its token
	-$(BIN)/labhelpers data
	$(BIN)/jupyter lab --ip 127.0.0.1 notebooks/00_report.ipynb

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

schema: $(READY)  ## Write the JSON Schema of exported results anew
	$(BIN)/python -m labhelpers.export

environment: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "Python's venv module is missing. On Debian, Ubuntu and WSL2: sudo apt-get install python3-venv"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt --editable '.[test]'
	@touch $(READY)

clean:  ## Remove the environment and caches; data and results stay
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis labhelpers.egg-info
