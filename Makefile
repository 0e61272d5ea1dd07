# Two commands matter: `make demo` and `make test`. Each sets everything up on a machine with Python 3.11 and make.

PYTHON ?= python3
BIN := .venv/bin
# The stamp is newer than what it was made from, so set-up runs once and again only when dependencies change.
READY := .venv/.ready

.PHONY: help demo test slow check bench docs clean

help:
	@echo "make demo    calm quickstart: the whole idea on the embedded corpus, in a quarter of an hour"
	@echo "make test    all checks and tests"
	@echo "make check   lint, format, types, import directions"
	@echo "make slow    the long tests (they read ../shared where it exists)"
	@echo "make bench   benchmarks, as ratios"
	@echo "make docs    build the documentation into site/"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "calm needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/calm quickstart --output demo

test: check
	$(BIN)/pytest -n 2

slow: $(READY)
	$(BIN)/pytest -m slow

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest tests/test_imports.py

bench: $(READY)
	$(BIN)/calm bench
	$(BIN)/python benchmarks/allocator.py
	$(BIN)/python benchmarks/autoencoder_vocabulary.py
	$(BIN)/python benchmarks/small_batch.py
	$(BIN)/python benchmarks/layers.py
	$(BIN)/python benchmarks/preparation.py
	$(BIN)/python benchmarks/training_overhead.py
	$(BIN)/python benchmarks/energy_loss.py
	$(BIN)/python benchmarks/language_model_step.py
	$(BIN)/python benchmarks/brier_lm.py
	$(BIN)/python benchmarks/start.py

docs: $(READY)
	$(BIN)/mkdocs build --strict
	@echo "site/index.html"

clean:
	rm -rf .venv site demo
