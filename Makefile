# make demo: set everything up and run the main job on the local lab
# make test: set everything up and pass the tests
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
BIN := .venv/bin
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Where it is set, each of the many Python processes here would compile all it imports anew: a fifth of make check.
unexport PYTHONDONTWRITEBYTECODE

# Tests wait for processes a third of their time: one more than there are cores.
TEST_PROCESSES := $(shell cores=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores + 1 : 8)))

# Marks of tests that make check leaves out.
LEFT_OUT := lab or gcloud or index

# The parts of make test after make check, in an order in which the last two end at about the same time. The tests of
# runs have deadlines: they stand beside the scenarios of the roles, which seldom keep both cores busy.
PARTS := molecule-roles lab-test-runs lab-test-plays check-debian13 demo-test molecule-site lab-test-rest
PART_LOGS := .build/parts
# Runtime versions of the workers in these parts. Their images are built beside make check.
IMAGES := tpu-ubuntu2204-base lab-debian12 lab-debian13
ROLE_SCENARIOS := $(filter-out site,$(patsubst molecule/%/molecule.yml,%,$(wildcard molecule/*/molecule.yml)))

.PHONY: help env tools browser engine demo demo-record test images check check-roles check-code check-tests lab-test \
	demo-test molecule bench bench-docs collection $(PARTS) $(PARTS:%=logged-%) format lock clean

help: ## Show this list
	@grep -E '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

env: ## Make .venv/ from requirements.lock
	@tools/setup.sh env

tools: ## Install what the commands call: ssh, rsync, git
	@tools/setup.sh tools

browser: ## Install the browser in which tests open pages
	@tools/setup.sh browser

engine: env ## Install and start what the lab needs: env, tools and a container engine
	@tools/setup.sh engine

demo: engine ## Run the main job once, from bare workers to a trained model, on the local lab
	@$(BIN)/python tools/demo.py

demo-record: engine ## Run the demo and write docs/demo.md from what it printed
	@$(BIN)/python tools/demo.py --record docs/demo.md

test: env tools browser ## Run every test: the fast ones, the lab, the demo, Molecule
	@$(MAKE) --no-print-directory images & images=$$!; code=0; $(MAKE) --no-print-directory check || code=$$?; \
		wait $$images || code=$$?; exit $$code
	@mkdir -p $(PART_LOGS) && rm -f $(PART_LOGS)/*.log
	@$(MAKE) --no-print-directory --keep-going --jobs=2 $(PARTS:%=logged-%) || { tools/failures.sh $(PART_LOGS)/*.log; exit 1; }

# On a new machine, this takes minutes. The fast tests leave a quarter of the processor's time for it.
images: engine
# The parts that need a release report it if it is not available.
	@for runtime in $(IMAGES); do $(BIN)/python -m tpu_ops.lab.image.build --runtime $$runtime >/dev/null || true; done

# Two at a time, and never three: what is waited for in the lab has to come in time. What each prints is kept, so that
# what failed can be said where it is looked for, at the end.
$(PARTS:%=logged-%): logged-%:
	@mkdir -p $(PART_LOGS)
	@$(MAKE) --no-print-directory $* 2>&1 | tee -i $(PART_LOGS)/$*.log

check: env tools browser ## Run the fast part: style, types, roles, packages, tests without containers
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-roles check-code
	@$(MAKE) --no-print-directory check-tests

check-tests:
	@$(BIN)/pytest -q -n $(TEST_PROCESSES) -m "not ($(LEFT_OUT))"

# Parts of check that stand side by side: each takes one core, and says what it has to say when it ends.
check-roles:
	@ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED=False $(BIN)/ansible-lint --offline -q
check-code:
	@$(BIN)/yamllint --strict .
	@$(BIN)/python tools/check_packages.py
	@$(BIN)/python tools/check_roles.py
	@$(BIN)/mypy

check-debian13: engine ## Run the tests of make check with Debian 13's Python 3.13, in a container
	@$(BIN)/python -m tools.check_debian13

lab-test: engine ## Run the tests of workers and runs in the lab, and those of the real gcloud and the package index
	@$(MAKE) --no-print-directory --jobs=2 lab-test-plays lab-test-runs lab-test-rest

# Tests of runs wait most of the time. Each process has workers of its own, and begins with one of the longest files.
LONGEST := $(addprefix tests/runs/test_,recovery_faults_on_workers.py together.py ends_on_workers.py)
lab-test-runs:
	@$(BIN)/pytest -v -n 3 --dist loadfile --no-loadscope-reorder -m lab $(LONGEST) \
		$(filter-out $(LONGEST),$(wildcard tests/runs/test_*.py)) --durations=12
# These tests share one lab.
lab-test-plays:
	@$(BIN)/pytest -v -m lab tests/playbooks --durations=12
lab-test-rest:
	@$(BIN)/pytest -v -n 2 --dist loadfile -m "lab or gcloud or index" --ignore=tests/demo_way --ignore=tests/runs \
		--ignore=tests/playbooks --durations=12

demo-test: engine ## Run the demo as a test
	@$(BIN)/pytest -v -m lab tests/demo_way --durations=12

molecule: engine ## Run every scenario of the roles on the lab's workers, on each release that there is an image for
	@tools/molecule.sh test

# Beside each other in make test, so on workers of their own.
molecule-roles: engine
	@tools/molecule.sh test $(addprefix -s ,$(ROLE_SCENARIOS))
molecule-site: engine
	@TPU_OPS_LAB=$${TPU_OPS_LAB:-molecule}site tools/molecule.sh test -s site

bench: engine ## Measure in the lab and with 512 sshd addresses, repeat tests of races, kill commands; write docs/benchmarks.md
	@$(BIN)/python -m tools.bench

bench-docs: env ## Rewrite docs/benchmarks.md from the samples in docs/benchmarks/
	@$(BIN)/python -m tools.bench --docs

collection: env ## Build the Ansible collection tpu_ops.fleet, for Ansible projects outside of a clone
	@$(BIN)/python -m tools.collection

format: env ## Format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

lock: env ## Resolve requirements.lock again
	@uv=$$(command -v uv || echo .build/uv/bin/uv); \
	$$uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --extra dev \
		--custom-compile-command "make lock" --upgrade pyproject.toml -o requirements.lock

clean: ## Take down every lab and remove what the other targets created
	@tools/clean.sh
