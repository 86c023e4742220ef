# `make demo` and `make test` are the two commands of a fresh machine; each sets up all that it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo demo-llm demo-mcu test check-long check-systemd check-peers check-gpu deb lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml deploy/requirements.txt tests/constraints.txt tests/flower.txt $(wildcard agent/port_agent/malloc/*.[ch]) $(wildcard agent/port_agent/packing/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q "torch==2.13.0"
	$(BIN)/pip install -q -e . --group dev -c deploy/requirements.txt -c tests/constraints.txt
	$(BIN)/pip install -q --no-deps -r tests/flower.txt
	touch $@

demo: setup
	$(BIN)/python -m examples.demo

# A small language model learns to write, then another style, inside a budget: a few minutes.
demo-llm: setup
	$(BIN)/python -m examples.demo_llm

# A gesture recogniser adapts on an emulated board; needs qemu-system-arm and gcc-arm-none-eabi.
demo-mcu: setup
	$(BIN)/port-agent mcu simulate examples/imu_gestures

# Bytecode is kept whatever the environment says: each of the hundreds of processes that tests start would compile the same
# modules again. Files in the order of their names: the last ones are small, so no worker waits long for the other at the end.
test check-long: export PYTHONDONTWRITEBYTECODE =
test: setup
	$(BIN)/ruff check .
	@echo "$(BIN)/mypy, meanwhile; what it finds is told at the end"; $(BIN)/mypy > $(VENV)/types.txt 2>&1 & types=$$!; \
	$(BIN)/pytest -m "not long" -n 2 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types || { cat $(VENV)/types.txt; exit 1; }; exit $$tests

check-long: setup
	$(BIN)/pytest -m "long or attack"

# Real systemd 257 and 252 in emulated machines; needs root, fetches and keeps about 3 GB under .cache/ the first time.
check-systemd: setup
	deploy/vm/build.sh tools
	deploy/vm/build.sh all
	$(BIN)/pytest tests/systemd -m "long or root" -v

# Real agents in network namespaces on bridges that lead nowhere; needs root and iproute2, skipped with a reason elsewhere.
check-peers: setup
	$(BIN)/pytest tests/agent/peers -m "long or root" -s -v -rs

# What the GPU here does to our promises: bits, bytes, speeds, and what fits below plain PyTorch; says so where there is none.
check-gpu: setup
	$(BIN)/python -m benchmarks.gpu

deb: setup
	deploy/build-deb.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info
