# Two commands on a fresh machine with Python 3.11+ and make:
#   make run [ARGS="engine=gpipe model=unet batch.micro_batches=4"]
#   make test [ARGS="tests/harness -k sweep"]          make test-full: all tests
# PYTHON=python3.12 chooses the interpreter, PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" where
# packages come from (that one has a torch without CUDA, which saves some GB on a machine without GPU).

PYTHON ?= python3
PIP_ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
ARGS ?=

# Where it is set, each of the many processes of a test or a sweep compiles all sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := run
.PHONY: setup run test test-full lint types docs docs-serve bench tables lab report replay mutants matrix soak gpu

setup: $(STAMP)

# One resolution with every pin: a torch that is not pinned can bring another build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"{sys.executable} is Python {v.major}.{v.minor}, Regatta needs 3.11 or newer: make setup PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev,docs,hf,mpi,notebooks,peers]'
	@touch $@

run: $(STAMP)
	$(BIN)/python run.py $(or $(ARGS),engine=gpipe model=unet)

# Several tests run at a time, each with one thread; those on the emulated Slurm one after the other. tests/tiers.py has
# the tiers. Three for two cores in the full tier: many of its tests wait for a process.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadgroup

# The fast tier: four minutes. With ARGS, these tests alone, of both tiers.
test: $(STAMP)
ifeq ($(ARGS),)
	$(PYTEST) -n 2 -m "not soak and not full" --hypothesis-profile=fast
else
	$(BIN)/python -m pytest $(ARGS)
endif

# Both tiers: twelve minutes. What takes longer than these allow is in make soak.
test-full: $(STAMP)
	$(PYTEST) -n 3 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

types: $(STAMP)
	$(BIN)/mypy

# The documentation as a site, in build/site. A broken link, or a page that the navigation lacks, is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

bench: $(STAMP)
	$(BIN)/python -m analysis.bench $(ARGS)

# All sweeps of the papers' tables, the notebooks and the report page: 20 minutes on two cores; FULL=1 for all points.
tables: $(STAMP)
	$(BIN)/python -m analysis.make_tables $(if $(FULL),--full)

# The asynchronous laboratory: an hour on two cores, with a second `make lab` in another terminal; FULL=1 for the whole grid
# (weeks). What was interrupted goes on where it was, and what has ended well is not run again.
lab: $(STAMP)
	$(BIN)/python run.py -m +sweeps=async_lab $(if $(FULL),scale=full)
	$(BIN)/python run.py -m +sweeps=async_lab_pipelines
	$(BIN)/python -m analysis.async_lab $(if $(FULL),runs/async_lab-full runs/async_lab_pipelines)

# The report page, build/report.html, from the committed records and those in runs/.
report: $(STAMP)
	$(BIN)/python -m analysis.page $(ARGS)

replay: $(STAMP)
	$(BIN)/python -m analysis.replay $(ARGS)

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(ARGS)

# Some 800 short runs, two at a time: an hour and a quarter. ARGS="--engine delayed pipeline": these rows alone.
matrix: $(STAMP)
	$(BIN)/python -m tests.matrix $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m tests.any_model)

# Tests that take long, faults, and sweeps that are killed, preempted and cancelled, here and on an emulated Slurm: an
# hour and a half. ARGS="4 20": minutes, as continuous integration does.
soak: $(STAMP)
	$(BIN)/python -m tests.soak $(ARGS)

# On a machine with GPUs: tests, calibration, profiles and races in half an hour. ARGS=--dry-run: on CPU devices.
gpu: $(STAMP)
	$(BIN)/python -m analysis.gpu_day $(ARGS)
