# Needs make and Python 3.11. `make demo` and `make test` set up .venv the first time; a second run reinstalls nothing.
PYTHON ?= python3.11
VENV ?= .venv
DATA ?= demo-data
RUN ?= runs/demo
OTHER ?= .venv/other-transformers
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow lint

demo: $(INSTALLED)
	$(VENV)/bin/python -m ropesearch.demo $(DATA)
	$(VENV)/bin/ropesearch search $(DATA)/model corpus.path=$(DATA)/texts run=$(RUN) target_length=2048

test: $(INSTALLED)
	$(VENV)/bin/pytest -n auto --maxprocesses 4 -m "not slow"

test-slow: $(INSTALLED) $(OTHER)/4.57.6/.installed $(OTHER)/5.16.1/.installed
	ROPESEARCH_OTHER_TRANSFORMERS=$(OTHER) $(VENV)/bin/pytest -m slow

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	touch $@

# The other transformers versions lie in folders of their own, put before the environment's on PYTHONPATH by the tests.
$(OTHER)/4.57.6/.installed: $(INSTALLED)
	$(PIP) --no-deps --target $(@D) transformers==4.57.6 "huggingface-hub<1" "tokenizers<=0.23.0"
	$(PIP) --target $(@D) requests
	touch $@
$(OTHER)/5.16.1/.installed: $(INSTALLED)
	$(PIP) --no-deps --target $(@D) transformers==5.16.1 "huggingface-hub<2"
	$(PIP) --target $(@D) httpx
	touch $@
