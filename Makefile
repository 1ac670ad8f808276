# `make demo` and `make test` need nothing but Python 3.11 or newer: each makes its own environment first, and
# finds it up to date the next time.

PYTHON ?= python3
VENV ?= .venv
DEMO_VENV ?= .venv-demo
# For example: make test ARGS="tests/unit -x"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help python demo-venv venv demo test conformance lint format docs bench dist clean distclean

help:
	@echo "make demo     install what the demonstration needs into $(DEMO_VENV), and run it"
	@echo "make test     install everything, vLLM too, into $(VENV), and run all tests (ARGS=... goes to pytest)"
	@echo "make conformance  prove every point on a tiny model of each architecture of transformers (ARGS=\"llama gemma2\": only these)"
	@echo "make lint     ruff, mypy and the import contracts"
	@echo "make format   sort imports and format"
	@echo "make docs     write the pages that are made from tables, and build the site into build/site"
	@echo "make bench    run the benchmarks"
	@echo "make dist     build the wheels and source archives of all four distributions into dist/"
	@echo "make clean    remove what was built, and caches; make distclean: the environments too"

python:
	@command -v $(PYTHON) >/dev/null || { echo "make: '$(PYTHON)' is not there: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: Python 3.11 or newer is needed, and '$(PYTHON)' is older: make PYTHON=python3.11" >&2; exit 1; }

demo-venv: python
	@$(PYTHON) tools/make_venv.py demo "$(DEMO_VENV)"

venv: python
	@$(PYTHON) tools/make_venv.py test "$(VENV)"

demo: demo-venv
	@"$(DEMO_VENV)/bin/interp" demo

# One thread and little cache, so that real vLLM engines fit on two cores beside the tests; and no hub.
test: venv
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 "$(VENV)/bin/python" tools/run_tests.py $(ARGS)

conformance: venv
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$(VENV)/bin/python" tools/conformance.py $(ARGS)

lint: venv
	@"$(VENV)/bin/ruff" check .
	@"$(VENV)/bin/mypy"
	@"$(VENV)/bin/lint-imports"

format: venv
	@"$(VENV)/bin/ruff" check --quiet --select I --fix .
	@"$(VENV)/bin/ruff" format .

docs: venv
	@"$(VENV)/bin/python" tools/make_docs.py
	@"$(VENV)/bin/python" -m mkdocs build --strict --quiet

bench: venv
	@for script in benchmarks/[!_]*.py; do echo "== $$script"; HF_HUB_OFFLINE=1 "$(VENV)/bin/python" "$$script" || exit 1; done

dist: venv
	@rm -rf dist
	@for project in . plugins/*/; do "$(VENV)/bin/python" -m build --no-isolation --outdir dist "$$project" || exit 1; done

clean:
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path './.*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-demo
