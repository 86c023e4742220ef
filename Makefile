# `make demo` and `make test` are the two commands of a fresh machine; each sets up all that it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The package index has CUDA builds of torch for Linux, gigabytes each; PORT_ALLOW_CUDA=yes with PORT_TORCH_INDEX takes one.
PORT_TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# `make test ROOM=policy`: the tests of every folder or module by that name. A path of tests/ or of the product will do, too.
ROOM ?=
NAMED := $(subst /port_planner/,/,$(subst /port_agent/,/,$(patsubst %.py,%,$(patsubst %/,%,$(ROOM)))))
ROOMS = $(or $(wildcard $(filter tests tests/%,$(ROOM))),$(shell find tests -type d -path '*/$(NAMED)' -o -path '*/$(patsubst ./%,%,$(dir $(NAMED)))test_$(notdir $(NAMED)).py'),$(error no tests by the name of $(ROOM)))
QUICK := not long and not slow and not process and not root and not attack

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-llm demo-mcu test fast check-long check-systemd check-arm check-peers check-gpu check-torch docs screenshots release deb lint format clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## the virtual environment that everything else runs in (every command sets it up by itself)

$(STAMP): pyproject.toml deploy/requirements.txt tests/constraints.txt tests/flower.txt $(wildcard agent/port_agent/malloc/*.[ch]) $(wildcard agent/port_agent/guard/*.[ch]) $(wildcard agent/port_agent/packing/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q --no-deps --index-url "$(PORT_TORCH_INDEX)" "torch==2.13.0" || { echo "no torch for this machine at $(PORT_TORCH_INDEX); PORT_TORCH_INDEX=URL names another index of CPU builds"; exit 1; }
	$(BIN)/python deploy/versions.py cpu-build
	$(BIN)/pip install -q -e . --group dev -c deploy/requirements.txt -c tests/constraints.txt
	$(BIN)/pip install -q --no-deps -r tests/flower.txt
	touch $@

demo: setup ## a training in a minute, with and without a budget
	$(BIN)/python -m examples.demo

# A small language model learns to write, then another style, inside a budget: a few minutes.
demo-llm: setup ## a small language model learns to write, then another style, inside a budget
	$(BIN)/python -m examples.demo_llm

# A gesture recogniser adapts on an emulated board; needs qemu-system-arm and gcc-arm-none-eabi.
demo-mcu: setup ## a gesture recogniser adapts on an emulated microcontroller board
	$(BIN)/port-agent mcu simulate examples/imu_gestures

# Bytecode is kept whatever the environment says: each of the hundreds of processes that tests start would compile the same
# modules again. Files in the order of their names: the last ones are small, so no worker waits long for the others
# at the end; one worker more than two cores have, as tests wait for processes and clocks.
test fast check-long: export PYTHONDONTWRITEBYTECODE =
ifeq ($(ROOM),)
test: setup ## everything that can be tested here in minutes; `make test ROOM=policy` (or a path): one room of it
	$(BIN)/ruff check .
	@echo "$(BIN)/mypy, meanwhile; what it finds is told at the end"; $(BIN)/mypy > $(VENV)/types.txt 2>&1 & types=$$!; \
	$(BIN)/pytest -m "not long" -n 3 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types || { cat $(VENV)/types.txt; exit 1; }; exit $$tests
else
test: setup
	$(BIN)/pytest -m "not long" $(ROOMS)
endif

fast: setup ## the tests that start no process and compute little, in less than a minute; also of one room
	$(BIN)/pytest -m "$(QUICK)" -n 2 --dist loadfile $(if $(ROOM),$(ROOMS))

check-long: setup ## what `make test` leaves out: heavy checks, every attack
	$(BIN)/pytest -m "long or attack"

# Real systemd 257 and 252 in emulated machines; needs root, fetches and keeps about 3 GB under .cache/ the first time.
check-systemd: setup ## the package under real systemd in emulated machines (root)
	deploy/vm/build.sh tools
	deploy/vm/build.sh all
	$(BIN)/pytest tests/systemd -m "long or root" -v

# An emulated Raspberry Pi: programs for arm64 in a Debian root with a Pi's /sys, then a machine with pages of 16 KiB and systemd; needs root,
# keeps about 10 GB under .cache/. Half an hour of processor time, and as much to build; what an emulated core cannot show is in README.md's table.
check-arm: setup ## tests, training and the package on an emulated Raspberry Pi (root)
	deploy/arm/build.sh tools
	deploy/arm/build.sh all
	deploy/arm/check.sh

# Real agents in network namespaces on bridges that lead nowhere; needs root and iproute2, skipped with a reason elsewhere.
check-peers: setup ## real agents in network namespaces (root)
	$(BIN)/pytest tests/agent/peers -m "long or root" -s -v -rs

# What the GPU here does to our promises: bits, bytes, speeds, and what fits below plain PyTorch; says so where there is none. Under eight
# minutes: what has not begun by then is named. `python -m benchmarks.gpu` alone takes large models, and an hour.
check-gpu: setup ## what the GPU here does to bits, bytes and speeds
	$(BIN)/python -m benchmarks.gpu_exec
	$(BIN)/python -m benchmarks.gpu --small --seconds 60

# Another version of torch, in a virtual environment of its own under .cache/: its private
# parts, what is new in it, and a sample of the zoo and of followed programs.
TORCH := .cache/torch-$(VERSION)
check-torch: ## another version of torch: make check-torch VERSION=2.14.1
	@test -n "$(VERSION)" || { echo "say which: make check-torch VERSION=2.14.1"; exit 2; }
	test -x $(TORCH)/bin/pytest || { $(PYTHON) -m venv $(TORCH) && grep -v "^torch==" deploy/requirements.txt > $(TORCH)/constraints.txt && \
	$(TORCH)/bin/pip install -q --no-deps --index-url "$(PORT_TORCH_INDEX)" "torch==$(VERSION)" && $(TORCH)/bin/python deploy/versions.py cpu-build && \
	$(TORCH)/bin/pip install -q -e . -c $(TORCH)/constraints.txt "pytest>=8" "hypothesis>=6.100" "transformers>=4.50" "peft>=0.17"; }
	$(TORCH)/bin/python -m port_planner.torch_compat.probes
	$(TORCH)/bin/pytest tests/planner/torch_compat tests/planner/ir/lowering/test_optimizer_scalars.py
	$(TORCH)/bin/pytest -m "not long" tests/agent/intercept/patches
	for kind in "--features --sample 12" "--operators --sample 24" "--operators --bundles --sample 12"; do \
	$(TORCH)/bin/python -m benchmarks.zoo $$kind --results $(TORCH)/zoo.jsonl || exit 1; rm -f $(TORCH)/zoo.*; done

# Sphinx makes the pages; nothing is fetched but its packages, once.
docs: setup ## the documentation as a site in build/site; warnings are errors
	$(BIN)/pip install -q --group docs
	$(BIN)/python docs/build_site.py

# The live page, the page of a plan and the terminal, wide, narrow and dark; needs chromium, takes some minutes.
screenshots: setup ## photograph the running program for the documents
	$(BIN)/python docs/drawings.py
	$(BIN)/python docs/screenshots.py

release: setup ## sources, the wheel of this machine, bill of materials and hashes, in dist/
	$(BIN)/python deploy/release.py dist

deb: setup ## the Debian package
	deploy/build-deb.sh

lint: setup ## style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## format all sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and what was built
	rm -rf $(VENV) build dist *.egg-info
