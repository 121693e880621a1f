.DEFAULT_GOAL := help
SHELL := /bin/bash

EXTRAS ?= test,notebooks
PLUGIN ?= cuda13
PROMPT ?= What is the capital of France?
BIN := .venv/bin

.PHONY: help setup run test check check-gpu format bench docs

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv (does nothing the second time; EXTRAS=test,notebooks,cuda13 for a GPU)
	@scripts/setup.sh $(EXTRAS)

run: setup ## ask SmolLM2-135M a question (PROMPT="...")
	@echo "SmolLM2-135M-Instruct, weights quantized to int8 (--quantization int8), which is the fast form on a CPU"
	@echo "> $(PROMPT)"
	@$(BIN)/jaxinfer generate --model smollm2-135m --quantization int8 --max-num-seqs 8 --max-num-batched-tokens 64 --chat --prompt "$(PROMPT)"

test: setup ## the tests that every change runs
	$(BIN)/pytest -q

check: setup ## format, lint, types, import rules, documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports --no-logo
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check-gpu: setup ## what the GPU code compiles to, without a GPU or CUDA (PLUGIN=cuda13 or cuda12)
	@scripts/gpu_toolchain.sh $(PLUGIN) >/dev/null
	@$(BIN)/python -m tests.check_gpu --plugin $(PLUGIN)

format: setup ## format and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## latency and throughput of SmolLM2-135M on this machine
	$(BIN)/jaxinfer bench latency --model smollm2-135m --quantization int8
	$(BIN)/jaxinfer bench throughput --model smollm2-135m --quantization int8

docs: setup ## look at the documentation in a browser
	$(BIN)/mkdocs serve
