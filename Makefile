# Everything a newcomer needs. On a bare machine with python3 and make:
#
#   make bench    set up, then run the ladder
#   make test     set up, then run the tests
#
# Both make a virtual environment in .venv, with uv if it is on PATH; in another
# place with make test VENV=DIRECTORY. To use an interpreter that already has the
# dependencies: make test PYTHON=python3. Neither is taken from the environment.

SHELL := /bin/sh
VENV := .venv
OLDEST_JAX ?= 0.11.2
# Flags of experiments.ladder: make bench ARGS="--kernels=7,8 --sizes=4096"
# or of experiments.release: make release ARGS=--seconds=480
# or of tools/check_dist.py: make dist ARGS=--python=python3.13
ARGS ?=
# Test processes, and their cap on a large machine.
JOBS ?= auto
MAX_JOBS ?= 8

ifeq ($(origin PYTHON),command line)
  SETUP = @:
else
  PYTHON := $(VENV)/bin/python
  SETUP = @sh tools/setup_env.sh $(VENV) $(EXTRAS)
endif
PYTEST = -m pytest -n $(JOBS) --maxprocesses=$(MAX_JOBS) --dist worksteal
GPU_EXTRAS = $(shell sh tools/has_nvidia_gpu.sh && echo ,cuda13,triton)

# compute-sanitizer's memcheck, initcheck or synccheck. racecheck does not follow
# TMA and mbarriers: what it says of rungs 8 to 12 and of the ops is no verdict.
TOOL ?= memcheck
# Without XLA's pool each array is an allocation with bounds of its own. A busy
# host starts Python in more than the 10 s for which the tool waits by default.
SANITIZER = XLA_PYTHON_CLIENT_ALLOCATOR=platform \
  XLA_PYTHON_CLIENT_PREALLOCATE=false \
  compute-sanitizer --tool $(TOOL) --launch-timeout 600 --error-exitcode 1
# Every rung at an odd size, with C, and the ops: dense, grouped with empty groups
# and rows of no group, gradients by weights. Of 8 bits small products, dense and
# grouped, with blocks and without, a recipe's derivatives, and quantising. Of
# float32 in planes a product, kept planes, and groups, by threads too.
SANITIZED = tests/test_ladder_gpu.py tests/test_ops_gpu.py \
  tests/test_ops_ragged_gpu.py tests/test_ops_eight_bits_gpu.py \
  tests/test_ops_float32_gpu.py \
  -k "test_alpha_and_beta and 0.5 or written_outside \
  or products[9] or products[14] or products[19] \
  or those_of_xla[sums-float8_e4m3fn-block] \
  or orders[rows-bfloat16-int8] or orders[blocks-float32-float8_e4m3fn] \
  or kept_planes or random_groups[3-3] or groups_are_those_of_planes"

.DEFAULT_GOAL := help

.PHONY: help
help: ## what the targets do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' \
	  $(MAKEFILE_LIST)

.PHONY: bench
bench: EXTRAS = bench$(GPU_EXTRAS)
bench: ## set up; measure every rung against jnp.dot (ARGS=...)
	$(SETUP)
	$(PYTHON) -m experiments.ladder $(ARGS)

.PHONY: release
release: EXTRAS = bench,test$(GPU_EXTRAS)
release: ## set up; measure all that is published, on one commit (ARGS=...)
	$(SETUP)
	$(PYTHON) -m experiments.release $(ARGS)

.PHONY: test
test: EXTRAS = test,aot,triton
test: ## set up; tests that need no GPU: interpret, lower, compile
	$(SETUP)
	$(PYTHON) $(PYTEST)

.PHONY: targets
targets: EXTRAS = test,aot
targets: ## set up; compile every rung for every kind of GPU; no GPU needed
	$(SETUP)
	$(PYTHON) $(PYTEST) -m targets
	$(PYTHON) -m experiments.targets

.PHONY: test-gpu
test-gpu: EXTRAS = test$(GPU_EXTRAS)
test-gpu: ## set up; tests that need a GPU
	$(SETUP)
	$(PYTHON) -m pytest -m gpu

.PHONY: sanitize
sanitize: EXTRAS = test$(GPU_EXTRAS)
sanitize: ## set up; some GPU tests under compute-sanitizer (TOOL=initcheck)
	$(SETUP)
	$(SANITIZER) $(PYTHON) -m pytest -v -m gpu $(SANITIZED)

.PHONY: test-oldest
test-oldest: ## set up .venv-oldest; lower, and call each op, on the oldest JAX
	@sh tools/setup_env.sh .venv-oldest test "jax==$(OLDEST_JAX)"
	.venv-oldest/bin/python $(PYTEST) -m smoke

.PHONY: docs
docs: EXTRAS = docs
docs: ## set up; run and check the pages; build docs/_build/html; check its links
	$(SETUP)
	$(PYTHON) -m docs.write --check --cells
	$(PYTHON) -m sphinx -b html -W --keep-going docs docs/_build/html
	$(PYTHON) -m docs.extensions.links docs/_build/html

.PHONY: dist
dist: EXTRAS = dist
dist: ## set up; build wheel and sdist, and try the wheel (ARGS=...)
	$(SETUP)
	rm -rf dist
	$(PYTHON) -m build
	$(PYTHON) tools/check_dist.py $(ARGS)

.PHONY: lint
lint: EXTRAS = dev
lint: ## set up; ruff
	$(SETUP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

.PHONY: format
format: EXTRAS = dev
format: ## set up; rewrite the sources in the project's format
	$(SETUP)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

.PHONY: clean
clean: ## remove environments and caches
	rm -rf .venv .venv-oldest .pytest_cache .ruff_cache .hypothesis
	rm -rf docs/_build docs/_generated build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
