# `make demo` and `make test` each do everything on a fresh machine: environment, installation, run.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed

# Threads that wait should sleep: spinning ones take the cores from whoever they wait for (15 times the time for one step,
# measured with other work on the same two cores).
export OMP_WAIT_POLICY ?= passive

.PHONY: help demo test lint format types clean
help:
	@echo 'make demo    train a small model on real text at 16,384 tokens of context (under 3 minutes on two cores)'
	@echo 'make test    lint, then the whole test-suite (8 to 15 minutes on two cores)'
	@echo 'make lint    ruff'
	@echo 'make format  ruff, with what it can mend by itself'
	@echo 'make types   mypy'
	@echo 'make clean   remove the environment, caches and build products'

# Installed anew when what is to be installed has changed.
$(STAMP): requirements-dev.txt $(wildcard packages/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

demo: $(STAMP)
	$(BIN)/oomb train

test: $(STAMP) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .

format: $(STAMP)
	$(BIN)/ruff check --fix .

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist packages/*/build packages/*/dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find packages tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
