# Every target sets up .venv by itself. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
# Two files of tests at a time, whatever the machine: some need more than a gigabyte.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile

.PHONY: demo test test-slow hostile mutants bench bench-busy docs lint format clean help

help: ## Show the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(INSTALLED) ## Train, attack and certify a network on MNIST (under five minutes).
	$(BIN)/python examples/demo.py

test: $(INSTALLED) ## Run the tests.
	$(PYTEST)

test-slow: $(INSTALLED) ## Run the slow tests too: real training and long fuzzing.
	$(PYTEST) -m "slow or not slow"

hostile: $(INSTALLED) ## Try two thousand damaged or malicious files with every command.
	$(BIN)/python tests/hostile/run.py

mutants: $(INSTALLED) ## Plant bugs in a copy of the package and see that the tests notice (ONLY='replay/*').
	$(BIN)/python tests/mutants/run.py $(if $(ONLY),--only '$(ONLY)')

bench: $(INSTALLED) ## Measure training steps, relative to a standard step, and bounds.
	$(BIN)/python benchmarks/data_loading.py
	$(BIN)/python benchmarks/latent.py
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/bounds.py

bench-busy: $(INSTALLED) ## Measure what busy neighbours cost training and the demo.
	$(BIN)/python benchmarks/busy.py
	$(BIN)/python benchmarks/busy_demo.py

docs: $(INSTALLED) ## Build the documentation; look at docs/_build/html/index.html.
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "the documentation is built: open docs/_build/html/index.html"

lint: $(INSTALLED) ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and caches.
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; set PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { echo "cannot make a virtual environment: on Debian, apt install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(INSTALLED)
