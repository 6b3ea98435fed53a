PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: run test test-all lint bench

# Train the first example, split five ways on 8 local processes, then prove the split.
run: $(READY)
	$(BIN)/fivefold train examples/first-run.yaml
	$(BIN)/fivefold check examples/first-run.yaml --steps 2

test: $(READY)
	$(BIN)/python -m pytest -m "not slow"

test-all: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(READY)
	$(BIN)/python benchmarks/throughput.py

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -r requirements.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@
