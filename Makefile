# make demo: the main job on a two-node cluster in a box, ending with its table. make test: the tests.
# make bench: speed and memory, each figure beside its peer (ARGS="--only planning" for a part). All make .venv and
# install the locked dependencies first. make PYTHON=python3.12 ... picks another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT := out/demo
RELAYMETER := $(BIN)/python -m relaymeter

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup demo test bench lint clean

setup: $(VENV)/.installed

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "relaymeter needs Python 3.10 or later: make PYTHON=python3.11 setup"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[deepspeed,report,test,dev]'
	@touch $@

demo: setup
	@mkdir -p $(OUT)
	$(RELAYMETER) calibrate --nodes 2 --ranks-per-node 2 --nic none --quick --executor send-recv --out $(OUT)/unshaped.json --force
	$(RELAYMETER) choose --profile $(OUT)/unshaped.json --scenario demo --json $(OUT)/choose-unshaped.json --force
	$(RELAYMETER) calibrate --nodes 2 --ranks-per-node 2 --nic 400mbit --nic-per rank --executor send-recv --out $(OUT)/profile.json --force
	$(RELAYMETER) choose --profile $(OUT)/profile.json --scenario demo --json $(OUT)/choose.json --force
	$(RELAYMETER) run --profile $(OUT)/profile.json --scenario demo \
	  --json $(OUT)/run.jsonl --plot $(OUT)/run.png --force
	@echo "files: $(OUT)/profile.json (calibration), choose.json (prices), run.jsonl (rows), run.png (plot)"

test: setup
	$(BIN)/pytest $(ARGS)

bench: setup
	$(BIN)/python -m relaymeter.harness.bench $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) out build dist
