# Everything a developer or a CI runner needs: `make run` and `make test` work on a fresh machine with
# Python >= 3.11, pip and make. The first call creates .venv with the versions of constraints.txt; later ones are fast.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp

# Relative on purpose: pip splits these at spaces. The second one pins the build environment for pip >= 25.3, which
# no longer lets the first one do it; older versions do not know it and pass over it.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The measured data, for the tests and commands that read it; an absolute path, and only if it is there.
POLLUX_DATA ?= ../shared/data
DATA_HERE := $(shell cd "$(POLLUX_DATA)" 2>/dev/null && pwd)
ifneq ($(DATA_HERE),)
override POLLUX_DATA := $(DATA_HERE)
export POLLUX_DATA
endif

# A virtual environment does not survive a move of its folder: the stamp holds the path it was made for.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

.DEFAULT_GOAL := help
.PHONY: help setup run simulate test lint format bench chaos constraints clean distclean

help: ## Show this list
	@echo "Usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  %-12s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## Create .venv and install Pollux with its pinned dependencies

simulate: $(STAMP) ## Compare all policies on a built-in workload, in a simulated cluster; writes a report to out/report
	@echo "24 jobs of five training tasks, submitted within 90 minutes to 4 nodes of 4 GPUs, under each policy:"
	@$(VENV)/bin/pollux compare demo --policies fifo,fifo-backfill,tiresias,srtf,optimus,pollux,castor --report out/report

run: $(STAMP) ## See it live: six jobs share 8 GPUs under Pollux, then FIFO; emulated without GPUs (EMULATE=0: CPU slots)
	@$(VENV)/bin/pollux demo $(if $(EMULATE),$(if $(filter 0,$(EMULATE)),--no-emulate,--emulate)) $(ARGS)

test: $(STAMP) ## Run all tests (ARGS="-k fit -x" is handed to pytest)
	@$(FIND_BROWSER)
	@$(COMPILE)
	@$(RUN_TESTS)

lint: $(STAMP) ## Check style, format and types (ruff, mypy)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: $(STAMP) ## Rewrite the code in the project's format, mend what ruff can mend
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

bench: $(STAMP) ## Measure, and write benchmarks/RESULTS.md (ONLY=area for one area)
	@$(COMPILE)
	@$(PY) -m benchmarks $(if $(ONLY),--only $(ONLY))

chaos: $(STAMP) ## Kill, stop and damage parts of a live cluster with real jobs, by a seed (MINUTES=5 SEED=0 ARGS=--list)
	@$(COMPILE)
	@$(PY) -m pollux.testing.chaos $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

constraints: ## Renew constraints.txt: the newest versions that pyproject.toml allows (torch by hand: its builds differ)
	@$(FIND_PYTHON); \
	echo "Resolving the newest versions …"; \
	tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT && \
	"$$py" -m venv "$$tmp/venv" && \
	grep '^torch==' constraints.txt > "$$tmp/kept" && \
	"$$tmp/venv/bin/python" -m pip install -qq -c "$$tmp/kept" -e '.[dev]' editables && \
	{ sed -n '/^#/p;/^#/!q' constraints.txt; \
	  "$$tmp/venv/bin/python" -m pip list --format=freeze --exclude-editable | sed '/^pip==/d; s/+cpu$$//'; } > "$$tmp/new" && \
	cp "$$tmp/new" constraints.txt && echo "constraints.txt is renewed: run make test, then look at git diff"

clean: ## Remove what commands produced: caches, builds, out/
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove .venv as well
	rm -rf $(VENV)

$(STAMP): pyproject.toml constraints.txt
	@$(FIND_PYTHON); \
	if [ "$$(cat $(STAMP) 2>/dev/null)" != "$(CURDIR)" ] || ! $(PY) -c 'import pip' 2>/dev/null; then \
		echo "Creating $(VENV) with $$("$$py" --version) …"; \
		"$$py" -m venv --clear $(VENV) || exit 1; \
	fi; \
	echo "Installing Pollux and its pinned dependencies (one to three minutes the first time: PyTorch is large) …"; \
	$(PY) -m pip install -qq -c constraints.txt -e '.[dev]' || { \
		echo "error: pip could not install the packages, see above. Is the package index reachable?" >&2; exit 1; }
	@$(COMPILE)
	@printf '%s' "$(CURDIR)" > $@
	@echo "Ready: $$($(VENV)/bin/pollux --version) in $(VENV)"

# Where PYTHONDONTWRITEBYTECODE is set, as in many containers, every command would compile us anew: tests start hundreds.
COMPILE = $(PY) -m compileall -q src/pollux

# Whole files to the processes: what a file sets up once is not set up in each of them. There is one more than cores,
# for many tests wait for real clusters. Then, one by one, the tests that need the machine for themselves, which are all
# in one folder: reading the others takes a while. Both always run; 5 means that ARGS leaves nothing to one of them,
# which is fine. What pytest makes of the tests is kept, also where PYTHONDONTWRITEBYTECODE is set.
define RUN_TESTS
export PYTHONDONTWRITEBYTECODE=; \
$(PY) -m pytest -n $$(($$(nproc) + 1)) --dist loadfile -m 'not quiet' $(ARGS); shared=$$?; \
$(PY) -m pytest -m quiet -o testpaths=tests/live $(ARGS); quiet=$$?; \
case $$shared-$$quiet in 0-0 | 0-5 | 5-0) ;; *) exit 1 ;; esac
endef

# The report is also tested in a browser. Installed where that is ours to do; elsewhere the test says what is missing.
define FIND_BROWSER
if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && ! command -v google-chrome >/dev/null \
	&& [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	echo "Installing chromium for the tests of the report …"; \
	(apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) >/dev/null 2>&1 \
		|| echo "chromium could not be installed: the tests that need it will say so"; \
fi
endef

# Sets $py to the first Python that is new enough and can create environments, or says what is missing.
define FIND_PYTHON
py=; seen=; \
for candidate in "$(PYTHON)" python3 python3.13 python3.12 python3.11; do \
	command -v "$$candidate" >/dev/null 2>&1 || continue; \
	"$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { seen="$$seen $$("$$candidate" --version 2>&1)"; continue; }; \
	"$$candidate" -c 'import venv, ensurepip' 2>/dev/null || { seen="$$seen $$candidate-without-venv-or-pip"; continue; }; \
	py="$$candidate"; break; \
done; \
if [ -z "$$py" ]; then \
	echo "error: Pollux needs Python 3.11 or newer with venv and pip; found:$${seen:- no Python at all}." >&2; \
	echo "Install one (Debian, Ubuntu: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python3.12 …" >&2; \
	exit 1; \
fi
endef
