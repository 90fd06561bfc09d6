# Runs at a time of one thread each: with small models, threads inside a run only get in each other's way.
export OMP_NUM_THREADS ?= 1

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
# A Python of its own choice: make setup PYTHON3=python3.12
PYTHON3 ?= $(shell command -v python3.11 || command -v python3)

.DEFAULT_GOAL := help
.PHONY: help setup demo digits docs test test-slow trials lint format settings dist bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 12

setup: $(READY)  ## make .venv and install everything into it

$(READY): pyproject.toml constraints.txt
	test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)  ## who does federated averaging leave behind, and which methods help? (under a minute)
	$(VENV)/bin/equipoise compare demo --jobs 2 --out runs/demo

digits: $(READY)  ## compare every method on the embedded digits, and write docs/results/digits.md (about 3 minutes)
	$(VENV)/bin/equipoise compare experiments/digits/all.yaml --jobs 2 --out runs/digits-all --markdown runs/digits-all/table.md
	$(PYTHON) experiments/digits/page.py runs/digits-all

# One thread a worker: threads of two workers that wait for each other on two cores can take thrice as long.
test: $(READY) lint  ## check the code and run all quick tests and the examples of the documentation
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2

# Every message to a Flower client starts a process that loads PyTorch: two federations at once would be slower than one
# after the other.
FEDERATIONS := tests/flower/test_processes.py tests/flower/test_deployment.py tests/flower/test_attacks.py
test-slow: $(READY)  ## run the tests that take long: killed processes, federations of processes, all combinations
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 -m slow $(FEDERATIONS:%=--ignore %)
	$(PYTHON) -m pytest -m slow --durations 0 $(FEDERATIONS)

# The tests of test-slow that repeat a trial make a tenth of these.
TRIALS := tests/fuzz tests/run/test_kill.py tests/run/test_damage.py
trials: $(READY)  ## kill runs, damage files and try odd input as often as the documentation says (about 10 minutes)
	OMP_NUM_THREADS=1 EQUIPOISE_TRIALS=1 $(PYTHON) -m pytest -n 2 -m slow $(TRIALS)

lint: $(READY)  ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(READY)  ## put the code into its usual form
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(READY)  ## build the documentation as a site, in docs/_build
	$(PYTHON) docs/pages.py
	$(PYTHON) -m sphinx -q -W -b html docs docs/_build
	@echo docs/_build/index.html

settings: $(READY)  ## write docs/settings.md, which is made from the code
	$(VENV)/bin/equipoise explain --markdown > docs/settings.md

dist: $(READY)  ## build the wheel and the source distribution in dist/
	rm -rf build dist
	$(PYTHON) -c "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
	rm -rf build

bench: $(READY)  ## measure the speed against other frameworks
	$(PYTHON) -m benchmarks.speed

clean:  ## remove the environment and the caches; runs stay
	rm -rf $(VENV) build dist docs/_build docs/methods *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
