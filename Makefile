# The two commands of the README. Each sets itself up in .venv first; that is quick once it stands.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test matrix check docs clean

demo: $(INSTALLED)
	$(BIN)/syncline train
	$(BIN)/python examples/evaluate_exported_model.py outputs/demonstration

test: $(INSTALLED)
	$(BIN)/python -m pytest

# Every combination of the options of a gradient's life, or a share of them: SHARE=3/100 is the third hundredth.
SHARE ?= 1/1
matrix: $(INSTALLED)
	$(BIN)/python -m pytest --matrix $(SHARE) tests/verification/test_combinations.py \
		tests/verification/test_combination_runs.py

# Formatting, lint, types, and generated documents that are out of date.
check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tools.documentation --check

docs: $(INSTALLED)
	$(BIN)/python -m tools.documentation

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: \
		--constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[development]'
	touch $@

clean:
	rm -rf $(VENV) outputs
