# Needs make and a Python of at least 3.11; everything else goes into .venv here.
#
#   make demo     train a Vision Transformer in fp16 on 2 processes, on the CPU; draws runs/naive_fp16/training.png
#   make test     what a change has to pass while one works on it, 2 files at a time (WORKERS=0: one after the other);
#                 ROOM=amp: those of tests/amp only; PYTEST_FLAGS: further options of pytest
#   make test-all   the slow ones, too: what CI runs each night
#   make test-composition   all cells of the composition table's product: 40 minutes or so
#   make test-kills   training is killed 50 times, and resumes: benchmarks/results/kills.md, in 5 minutes or so
#   make simulated-gpu   the tests of GPUs and of ranks on a host that says it is 8 GPUs, with a build of torch without CUDA
#                 (TESTS=tests/gpu: those only)
#   make bench    beside hand-written loops and other engines: benchmarks/RESULTS.md, in 15 minutes or so
#   make bench-gpu   the same on one CUDA device: benchmarks/results/gpu.md
#   make bench-pipeline   how long ranks wait under each schedule, and what they keep
#   make bench-overlap    how many bytes are sent while ranks compute
#   make test-times   how long the tests take, by room: benchmarks/results/tests.md
#   make soak     20,000 steps of a tiny model on 2 ranks: whether anything grows: benchmarks/results/soak.md
#   make docs     the documentation, into site/       make names   write tests/frozen_names.txt again
#   make promises   write docs/promises.md again, from the marks on tests
#   make lint     ruff, mypy, and .github        make format   put the code into shape
#   make clean    remove what these made, but not .venv

BIN := .venv/bin
INSTALLED := .venv/.installed
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3)
RANKS ?= 2
DEVICE ?= cpu
WORKERS ?= 2

# One thread per process: there are several processes, and they share the cores.
export OMP_NUM_THREADS := 1

.PHONY: demo promises test test-all test-times test-composition test-kills simulated-gpu bench bench-gpu bench-pipeline bench-overlap soak docs names lint format clean

demo: $(INSTALLED)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_vit.py \
	  --config configs/naive_fp16.py --data digits --device $(DEVICE) --min-accuracy 95

# All tests of a file run in one process, in order: they share what is costly to make.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS) tests/$(ROOM)

test: $(INSTALLED)
	$(PYTEST) -m "not slow"

test-all: $(INSTALLED)
	$(PYTEST)

test-composition: $(INSTALLED)
	COMPOSITION=full $(BIN)/python -m pytest -n $(WORKERS) tests/composition

test-kills: $(INSTALLED)
	KILLS=50 $(BIN)/python -m pytest tests/faults/test_kills.py

# Its kernels are slow: the slow tests are left out.
WITHOUT_CUDA := .venv-without-cuda
TESTS ?= $(shell grep -rlE "run_ranks|mark\.gpu" tests --include="test_*.py")
test-times: $(INSTALLED)
	$(BIN)/python -m benchmarks.suite --workers $(WORKERS) --out benchmarks/results/tests.md

simulated-gpu: $(WITHOUT_CUDA)/.installed
	$(WITHOUT_CUDA)/bin/python -m tests.simulated_gpu.build $(CURDIR)/build/simulated_gpu
	PYTHONPATH=$(CURDIR)/tests/simulated_gpu/at_start:$(CURDIR) RANKS_ON=nccl \
	  SIMULATED_GPU=$(CURDIR)/build/simulated_gpu/simulated_gpu.so \
	  $(WITHOUT_CUDA)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" $(TESTS)

$(WITHOUT_CUDA)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv $(WITHOUT_CUDA)
	$(WITHOUT_CUDA)/bin/python -m pip install --quiet --disable-pip-version-check \
	  torch==2.13.0+cpu torchvision==0.28.0 ninja setuptools --editable '.[examples,dev]'
	@touch $@

# DeepSpeed by itself: it builds a part at installation, which fails on some machines; the page says so then.
bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check deepspeed
	$(BIN)/python -m benchmarks --out benchmarks/RESULTS.md

bench-gpu: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu --out benchmarks/results/gpu.md

bench-pipeline: $(INSTALLED)
	$(BIN)/python -m benchmarks.pipeline_schedules --out benchmarks/results/pipeline_schedules.md

bench-overlap: $(INSTALLED)
	$(BIN)/python -m benchmarks.overlap

soak: $(INSTALLED)
	$(BIN)/python -m benchmarks.soak --out benchmarks/results/soak.md

docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site

names: $(INSTALLED)
	$(BIN)/python -m docs_tools.public_names

promises: $(INSTALLED)
	$(BIN)/python -m docs_tools.promises

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[bf]*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --quiet --offline .github

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf runs build dist site .pytest_cache .mypy_cache .ruff_cache
	find halfmesh examples configs tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is newer than pyproject.toml as long as nothing has to be installed.
$(INSTALLED): pyproject.toml | $(BIN)/python
	@echo "Installing halfmesh with its examples and developer tools into .venv (torch is large: a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[examples,dev]'
	@touch $@

$(BIN)/python:
	@for python in $(PYTHONS); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then \
	    echo "Creating .venv with $$($$python --version) ($$(command -v $$python))"; \
	    $$python -m venv .venv && exit 0; \
	    rm -rf .venv; \
	    echo "$$python cannot create a virtual environment (on Debian and Ubuntu: apt install python3-venv)"; \
	  fi; \
	done; \
	echo "No usable Python: halfmesh needs 3.11 or later. Looked for: $(PYTHONS)." >&2; \
	echo "Install one, or name one: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python3.11" >&2; \
	exit 1
