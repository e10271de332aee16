# SPDX-License-Identifier: Apache-2.0
# Everything runs from the top of the checkout with relative paths, so a checkout path with spaces works.
.DEFAULT_GOAL := help
.NOTPARALLEL:
SHELL := /bin/sh

# The host of `make setup`, `make demo` and `make test-gpu`; launch/image.lock says what each name stands for.
# Some shells and tool chains export HOST with the name of the machine: such a value is not meant for us.
ifeq ($(origin HOST),environment)
ifeq ($(filter nvidia ascend,$(HOST)),)
HOST := nvidia
endif
endif
HOST ?= nvidia

# The interpreter that the environments are made from: the first of these that is 3.11 or 3.12.
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
endif
ifeq ($(strip $(PYTHON)),)
override PYTHON = $(error Python 3.11 or 3.12 is needed: install one, or name it with PYTHON=/path/to/python3.12)
endif

# Without compiled files every server start compiles the host again, some 20 s of processor time.
unexport PYTHONDONTWRITEBYTECODE

IN_HOST = .venv-$(HOST)/bin
IN_TEST = .venv-nvidia/bin

.PHONY: help setup demo test test-quick test-gpu soak serving lint docs docs-check results lock clean
.PHONY: preflight build up status logs down smoke verify provenance

help:  ## Show this help.
	@echo "vllm-h3-plugin: MiniMax-H3 on hardware that is too small for it."
	@echo
	@echo "On a bare machine with Python 3.11 or 3.12 (no GPU, no ffmpeg needed):"
	@echo "  make demo      installs the pinned host once, then makes and verifies two clips"
	@echo "  make test      proves the contracts on both hosts"
	@echo
	@echo "Targets:"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'
	@echo
	@echo "Variables: HOST=nvidia|ascend (now $(HOST)), PYTHON=/path/to/python3.12, ARGS='...' for demo and pytest."
	@echo "The first run of a host downloads about 5 GB and fills .venv-HOST with 8.5 GB, shared between hosts by hard links."

setup:  ## Install the environment of HOST into .venv-HOST; costs nothing when nothing changed.
	@"$(PYTHON)" -m tools.environment $(HOST)

demo: setup  ## Make and verify two clips with a small synthetic checkpoint on this machine.
	@$(IN_HOST)/vllm-h3 demo $(ARGS)

test:  ## Lint, unit, contract and server tests of both hosts side by side; then what was slow, what could not run and why.
	@"$(PYTHON)" -m tools.environment nvidia ascend
	@"$(PYTHON)" -m tools.oracle
	@$(IN_TEST)/python -m tools.testrun $(ARGS)

test-quick:  ## The same without starting servers.
	@"$(PYTHON)" -m tools.environment nvidia ascend
	@"$(PYTHON)" -m tools.oracle
	@$(IN_TEST)/python -m tools.testrun --quick $(ARGS)

test-gpu: setup  ## Tests that need a CUDA device, on HOST; keeps their figures in docs/results/gpu.json.
	@$(IN_HOST)/python -m tools.measure_gpu $(ARGS)

preflight: .venv-kit/ready  ## Check this machine before anything is built or started (ARGS=--deep reads every shard).
	@.venv-kit/bin/vllm-h3 preflight $(ARGS)

smoke: .venv-kit/ready  ## Make two clips through the running server and verify them (ARGS=--full for full size).
	@.venv-kit/bin/vllm-h3 smoke $(ARGS)

# By the shell's variable: make hands FILE on, and a name may hold spaces.
verify: .venv-kit/ready  ## Verify the newest clip of `make smoke`, or FILE='my clip.mp4'.
	@.venv-kit/bin/vllm-h3 verify $${FILE:+"$$FILE"} $(ARGS)

# Light: a machine that only starts containers needs no 8.5 GB of host for its checks.
.venv-kit/ready: pyproject.toml
	@"$(PYTHON)" -m venv .venv-kit
	@.venv-kit/bin/pip install --quiet --editable .
	@touch $@

build:  ## Build the container image of HOST on the digest in launch/image.lock (ARGS='--base NAME@sha256:…' for ascend; CLUSTER=1 adds Ray).
	@"$(PYTHON)" -m tools.image build --host $(HOST) $(if $(filter 1,$(CLUSTER)),--cluster) $(ARGS)

up: .venv-kit/ready  ## Start the server's container and wait until it is ready (ARGS='--cards 4' on Ascend).
	@.venv-kit/bin/vllm-h3 up $(ARGS)

status: .venv-kit/ready  ## Say what the server is and does (ARGS=--watch).
	@.venv-kit/bin/vllm-h3 status $(ARGS)

logs: .venv-kit/ready  ## Show the server's log (ARGS=-f follows it, ARGS=--errors shows only the cause).
	@.venv-kit/bin/vllm-h3 logs $(ARGS)

down: .venv-kit/ready  ## Wait for the running job, stop the container, see the memory come back (ARGS=--now).
	@.venv-kit/bin/vllm-h3 down $(ARGS)

provenance: setup  ## Say what this checkout's installation is made of, as JSON (ARGS='--sbom FILE' writes the SBOM).
	@$(IN_HOST)/vllm-h3 provenance $(ARGS)

soak: setup  ## Tests that take long: four ranks, twenty prompts in a row, 200 callers, 20 kills, on HOST.
	@$(IN_HOST)/python -m pytest --soak -m soak $(ARGS)

serving: setup  ## Soak the server on HOST and keep its figures in docs/results/serving.json.
	@$(IN_HOST)/python -m tools.measure_serving $(ARGS)
	@$(IN_TEST)/python -m tools.docs

lint:  ## ruff, ruff format, mypy, shellcheck.
	@"$(PYTHON)" -m tools.environment nvidia
	@$(IN_TEST)/python -m tools.lint

docs:  ## Write the generated parts of docs/: CLI.md, SETTINGS.md, RESULTS.md.
	@"$(PYTHON)" -m tools.environment nvidia
	@$(IN_TEST)/python -m tools.docs

docs-check:  ## Fail if a generated part of docs/ has drifted.
	@"$(PYTHON)" -m tools.environment nvidia
	@$(IN_TEST)/python -m tools.docs --check

results: setup  ## Measure `make demo` and write docs/results/demo.json (test_s: from the last `make test`).
	@$(IN_HOST)/python -m tools.measure_demo
	@$(IN_TEST)/python -m tools.docs

lock:  ## Resolve requirements/*.txt again from launch/image.lock (ARGS=--upgrade for newest versions).
	@"$(PYTHON)" -m tools.lock $(ARGS)

clean:  ## Remove environments, caches and build output (keeps demo-output/).
	rm -rf .venv-kit .venv-boot .venv-nvidia .venv-ascend .cache .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
	find tools tests vllm_h3_plugin -name __pycache__ -type d -prune -exec rm -rf {} +
