# make demo    from nothing to out/demo/report.html
# make test    lint, types and tests
# Both set up .venv first; all they need is Python 3.11 or later and make.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint pytest clean

demo: $(INSTALLED)
	PATH="$(abspath $(BIN)):$$PATH" bash examples/demo.sh out/demo

test: lint pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

pytest: $(INSTALLED)
	$(BIN)/python -m pytest -n 2

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,lab,dev]'
	touch $@

clean:
	rm -rf .venv build out .mypy_cache .pytest_cache .ruff_cache .hypothesis
