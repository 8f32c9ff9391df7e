# The main targets are `train` and `test`. Both create a virtual environment in .venv first.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# The versions of all other packages, so that a new release of one cannot break the commands below. `make newest` updates it.
CONSTRAINTS ?= tests/constraints.txt
VENV := .venv
BIN := $(VENV)/bin
PYTEST = $(BIN)/pytest -n 4 --dist worksteal

.PHONY: train test test-system release lint types docs peers test-adapters test-gpu test-lowest test-newest-torch newest soak sim mutants clean

train: $(VENV)/installed
	$(BIN)/samestep train digits --nproc-per-node 2 $(ARGS)
	@echo 'To use the command samestep in this shell: source $(BIN)/activate'

test: $(VENV)/installed-dev
	$(BIN)/python -m compileall -q -j 0 src tests  # read by many processes, which may not write it
	$(PYTEST) -m "not soak and not packages and not release"

# Run the tests that need Debian packages (.ci/packages installs them as root), and the checks of what is released.
test-system: $(VENV)/installed-dev $(VENV)/installed-docs
	$(PYTEST) -m "(packages or release) and not soak"

# Run what `make test` leaves out, before a release. Downloads several GB.
release: test-system test-adapters test-lowest test-newest-torch

lint: $(VENV)/installed-dev
	$(BIN)/ruff check src tests benchmarks website
	$(BIN)/ruff format --quiet --check src
	$(BIN)/lint-imports --no-cache

types: $(VENV)/installed-dev
	$(BIN)/mypy
	$(BIN)/basedpyright --level error --pythonpath $(BIN)/python

# Build the documentation site in website/build/public.
docs: $(VENV)/installed-docs
	$(BIN)/python website/build.py
	@echo 'The site: website/build/public/index.html'

# Compare five trainers under the same faults, in a separate environment: make peers ARGS="--write" updates docs/peers.md.
peers:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet "$(TORCH)" --editable . accelerate lightning torchdata transformers
	.venv-peers/bin/python benchmarks/peers/compare.py $(ARGS)

# Run the tests that need a GPU. One is enough: ranks share it.
test-gpu: $(VENV)/installed-dev
	timeout --foreground --signal INT --kill-after 30 1200 $(BIN)/pytest -m gpu

# Run the tests and pages that need large optional packages (transformers, Ray, W&B, ...), in a separate environment.
ADAPTERS := tests/adapters tests/watch/test_trackers.py tests/sources/test_sources.py
ADAPTERS += tests/tools/test_verify.py tests/test_docs.py tests/launch/test_launchers.py
test-adapters:
	$(PYTHON) -m venv .venv-adapters
	.venv-adapters/bin/pip install --quiet "$(TORCH)" --editable ".[adapters]"
	.venv-adapters/bin/pytest $(ADAPTERS) -k "transformers or lightning or continues or trainers \
		or hugging or arrow or ray_train or coming-from or launcher"

# Run the same tests with the oldest supported torch, in a separate environment.
test-lowest:
	$(MAKE) test VENV=.venv-lowest TORCH="torch==2.11.*"

# Run them with the newest supported torch, whose build takes several GB.
test-newest-torch:
	$(MAKE) test VENV=.venv-newest-torch TORCH="torch==2.15.*"

# Run the tests with the newest packages, in a separate environment, and record their versions.
newest:
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=/dev/null
	.venv-newest/bin/pip freeze --exclude-editable | grep -v "^torch==" >tests/constraints.txt

# Run all cases of all tests, including similar ones: half an hour on 2 cores.
soak: $(VENV)/installed-dev
	$(BIN)/pytest -n 3 --dist worksteal

# Sets of strings have the same order in each process.
SIMULATE = PYTHONHASHSEED=0 PYTHONPATH=tests:$$PYTHONPATH $(BIN)/python

# Run simulated scenarios, thousands of starts and faults in one process: make sim ARGS="--minutes 10 --seed 1".
sim: $(VENV)/installed-dev
	$(SIMULATE) -m sim.explore $(ARGS)

# Plant faults in the source, one at a time, and show which the simulation finds: 10 minutes.
mutants: $(VENV)/installed-dev
	$(SIMULATE) -m sim.mutants $(ARGS)

# pip would compile the packages on one core. Some contain files that do not compile, which pip ignores, too.
define install
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint $(CONSTRAINTS) "$(TORCH)" --editable "$(1)"
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
endef

$(VENV)/installed: pyproject.toml tests/constraints.txt
	$(call install,.[recipes])
	touch $@

$(VENV)/installed-dev: pyproject.toml tests/constraints.txt
	$(call install,.[dev])
	touch $(VENV)/installed $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) "$(TORCH)" --editable ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest .venv-adapters .venv-peers website/build
