# farfill: `make demo` shows it, `make test` proves it. Everything is installed into .venv in this folder.

SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
# Small models on few cores: one thread each beats threads that wait for each other, and numbers do not vary.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo up test test-vllm check lint venv clean

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: ## two sites on this machine, real requests, a table; then everything is gone again
	@scripts/venv hf
	@$(BIN)/farfill demo

up: ## the same, and stays up for your own requests until Ctrl-C
	@scripts/venv hf
	@$(BIN)/farfill demo --stay

test: lint ## every check and every test
	@$(BIN)/python -m pytest

test-vllm: ## the tests with real vLLM servers on this CPU (some 25 minutes; installs vLLM into .venv-vllm)
	@scripts/venv dev
	@scripts/vllm-venv
	@FARFILL_HF_PYTHON=$(CURDIR)/$(BIN)/python .venv-vllm/bin/python -m pytest -m vllm tests/vllm

check: lint ## every check, and the tests that are quick (what to run before a commit)
	@$(BIN)/python -m pytest -m "not slow and not e2e and not torch"

lint: venv ## style, types, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

venv: ## .venv with everything for development
	@scripts/venv dev

clean: ## removes .venv and what the tools left; keeps the demo's model (~/.cache/farfill)
	rm -rf .venv .venv-vllm .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
