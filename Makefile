# Two commands for a newcomer:  make demo   make test
# Everything installs into .venv; uv is used where it is present.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(shell command -v uv 2>/dev/null)
PIP := $(if $(UV),VIRTUAL_ENV=$(VENV) $(UV) pip install -q,$(BIN)/python -m pip install -q --disable-pip-version-check)
INSTALL := $(PIP) -c constraints.txt
# Bytecode is kept even where the environment forbids it: else every process compiles the tests and posbench anew.
TESTS := PYTHONDONTWRITEBYTECODE= POSBENCH_REQUIRE_ORACLES=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --durations=10

.DEFAULT_GOAL := help
.PHONY: help demo compare install dev locked audit test test-slow test-all lowest gpu lint format types docs pages build release clean bench bench-peers

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.core ## train rope on the built-in corpus and draw its extrapolation curve (about five minutes, the environment included)
	$(BIN)/posbench train

compare: $(VENV)/.core ## six schemes side by side, two at a time, with curves and a report (about six minutes where the processor has AVX-512)
	$(BIN)/posbench sweep sweep=compare --n-jobs 2

install: $(VENV)/.core ## the environment that the commands need
dev: $(VENV)/.dev ## that, and what tests and linters need

locked: $(VENV)/bin/python ## the same as dev, of files whose sha256 is in locked.txt (Linux; torch by its version)
	$(INSTALL) torch
	$(PIP) --no-deps --require-hashes -r locked.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $(VENV)/.core $(VENV)/.dev

audit: ## known vulnerabilities of what constraints.txt names (asks a service on the network)
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install -q --disable-pip-version-check pip-audit
	build/audit/bin/pip-audit --disable-pip --no-deps -r constraints.txt

test: $(VENV)/.dev ## the tests: each behaviour, in four minutes on two cores
	$(TESTS) -m "not slow and not gpu"
	@echo "Left out: further cases, kills and launches (make test-slow), a GPU (make gpu)"

test-slow: $(VENV)/.dev ## what make test leaves out (half an hour)
	$(TESTS) -m "slow and not gpu"

test-all: test test-slow ## both

lowest: ## the tests with the lowest versions that pyproject.toml allows, in build/lowest (needs uv)
	uv venv -q --clear --python 3.11 build/lowest
	VIRTUAL_ENV=build/lowest uv pip install -q --resolution lowest-direct -e . --group test --group oracles
	VIRTUAL_ENV=build/lowest uv pip install -q --no-deps --group oracles-no-deps
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest -n auto --dist worksteal -m "not slow and not gpu"

gpu: $(VENV)/.dev ## on a machine with CUDA: whole runs, a resume, a sweep, the tests, then speed and share of peak (10 minutes)
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
		|| { echo "make gpu needs a CUDA device and a torch built for it; posbench --version says what is here" >&2; exit 2; }
	@scripts/gpu.sh $(BIN)/python

lint: $(VENV)/.dev ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(VENV)/.dev ## let ruff mend what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

docs: $(VENV)/.docs ## the documentation site, build/docs/site/index.html (half a minute)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/cards.py
	OMP_NUM_THREADS=1 $(BIN)/python scripts/docs.py build/docs
	$(BIN)/zensical build --strict --clean --config-file build/docs/mkdocs.yml

pages: ## put the site that make docs has built on the branch gh-pages of origin
	touch build/docs/site/.nojekyll
	cd build/docs/site; export GIT_DIR="$$(git rev-parse --absolute-git-dir)" GIT_WORK_TREE="$$PWD" GIT_INDEX_FILE="$(CURDIR)/build/pages.index"; \
	git add --all --force . && site=$$(git -c user.name=posbench -c user.email= commit-tree -m "The site" "$$(git write-tree)") \
		&& git push --quiet --force origin "$$site:refs/heads/gh-pages"

build: $(VENV)/.dev ## wheel and source archive into dist/
	$(BIN)/python -m build

release: ## tag the version of posbench/__init__.py and push the tag: GitHub tests it and puts it on PyPI
	@version=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' posbench/__init__.py); \
	test -z "$$(git status --porcelain)" || { echo "commit first: git status" >&2; exit 2; }; \
	grep -q "^## $$version" CHANGELOG.md || { echo "CHANGELOG.md has no section $$version" >&2; exit 2; }; \
	grep -q "^version: $$version" CITATION.cff || { echo "CITATION.cff has another version than $$version" >&2; exit 2; }; \
	git tag -a "v$$version" -m "posbench $$version" && git push origin "v$$version"

bench: $(VENV)/.core ## speed and memory of every encoding, side by side (a quiet machine, some minutes)
	$(BIN)/posbench bench

bench-peers: $(VENV)/.core ## training speed beside other implementations
	$(INSTALL) --group peers
	$(BIN)/python scripts/bench_peers.py --compile

clean: ## remove the environment and what was built (never outputs/)
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "posbench needs Python 3.11 or later; $$($(PYTHON) --version) found: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(if $(UV),$(UV) venv -q --python $(PYTHON) $(VENV),$(PYTHON) -m venv $(VENV))

$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	$(if $(UV),,$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1')
	$(INSTALL) -e .
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	$(INSTALL) --group docs
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(INSTALL) --group oracles --group test --group lint --group docs
	$(INSTALL) --no-deps --group oracles-no-deps
	@touch $@
