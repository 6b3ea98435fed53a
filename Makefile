PYTHON ?= python3
BIN := .venv/bin
# Tests run in a process per core. One that is done takes over tests of another.
PARALLEL := -n auto --maxprocesses 8 --dist worksteal
READY := .venv/.ready

.PHONY: run test test-all lint bench docs

# Choose a layout for a large model. Then measure this machine (once), train the first example on 8
# local processes, compare the run with its plan, and prove the layout.
run: $(READY)
	$(BIN)/fivefold plan llama-3.1-8b --cluster dgx-h100 --gpus 64 --top 3
	@echo
	$(BIN)/fivefold plan examples/models/first-run.json --here --seq 256 --global-batch 16 --top 3
	@echo
	$(BIN)/fivefold train examples/first-run.yaml
	$(BIN)/fivefold check examples/first-run.yaml --steps 2
	@echo
	@echo "Try next:"
	@echo "  $(BIN)/fivefold check examples/first-run.yaml --steps 2 --layout 'dp2 zero3 ring2 ep4 mb2'"
	@echo "  $(BIN)/fivefold plan deepseek-v3 --cluster hgx-h800 --gpus 2048 --save plan.yaml"
	@echo "  $(BIN)/fivefold export plan.yaml --to megatron"
	@echo "  $(BIN)/fivefold layout 'tp2 sp pp2 dp2 ep2'     explain a layout"
	@echo "  $(BIN)/fivefold train examples/one-process.yaml --layout 'tp2 pp2' --steps 20"
	@echo "  docs/planning.md, docs/splits.md                choosing a layout; what each split sends"

test: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: $(READY)
	$(BIN)/python -m pytest $(PARALLEL)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The documentation site, in build/site.
docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q docs build/site

bench: $(READY)
	$(BIN)/python benchmarks/throughput.py

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -r requirements.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@
