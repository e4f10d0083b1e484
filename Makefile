# Every target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.
# The demo needs the package alone; tests need all extras, of which cuda compiles device code even where there is no GPU.

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
EXTRAS ?= triton,cuda,models,serve,ray,slurm
BIN := .venv/bin
# Files stay together, for their rank groups take seconds to start; in the order of their folders, for the longest come first there.
PYTEST := $(BIN)/python -m pytest -ra -n 2 --dist loadfile --no-loadscope-reorder
# Folders of src/peerlane, and docs; and the folders of tests that say something about each, where it is not the one of its name.
ROOMS := cli docs emulator device evaluate generate hardware nn ops problems publish report results sandbox service solutions
ROOM_device := device ops ranks
ROOM_docs := docs_build project
ROOM_emulator := device
ROOM_evaluate := evaluate ranks e2e adversarial sandbox selftest
ROOM_nn := ops ranks
ROOM_ops := ops ranks
ROOM_problems := problems ranks
ROOM_report := report docs_build
ROOM_results := results evaluate report
ROOM_sandbox := sandbox e2e adversarial
ROOM_solutions := device
BASE := .venv/.installed-base
STAMP := .venv/.installed
# Hundreds of processes import torch: bytecode is kept even where the environment says not to, which would cost each of them a second.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-room test-all test-torch test-foreign mutants test-trainers check docs site lock clean

help:
	@echo "make demo    judge six examples, right and wrong, on CPU ranks; sets up .venv without extras"
	@echo "make test    run the tests that every change has to pass, in about five minutes on two cores"
	@echo "make test-room ROOM=evaluate  run the slow tests of a room too, when it has changed: $(sort $(ROOMS))"
	@echo "make test-all run every test, nightly"
	@echo "make test-torch  run PyTorch's own tests of process groups on gloo and on the backend, on CPU; nightly"
	@echo "make test-foreign DIR=FOLDER  run the public kernels of tests/foreign_kernels.toml that lie in a folder"
	@echo "make mutants  put faults into copies of the source, one at a time, and tell which the tests catch; nightly"
	@echo "make test-trainers  install RL trainers beside .venv, and run the adapters in them"
	@echo "make check   the gate: lint, format, types, generated docs, and make test"
	@echo "make docs    regenerate what is generated in docs and committed"
	@echo "make site    draw the pictures and build the documentation as a site, in site/"
	@echo "make lock    choose versions anew with uv: uv.lock, and constraints.txt from it"
	@echo "make clean   remove the virtual environment and everything generated"

setup: $(STAMP)

# torch comes first and by its bare pin of constraints.txt, so that pip keeps whichever build of that version the machine offers (CPU or CUDA).
# The build back end is installed and pinned too, hence --no-build-isolation. Only what ranks import
# is compiled to bytecode: they may not write any themselves, and would compile a thousand modules of torch in every evaluation.
$(BASE): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "peerlane needs Python 3.11 or newer, got $$(python3 --version 2>&1); \
	install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	f"peerlane needs Python 3.11 or newer, got {v[0]}.{v[1]} ($(PYTHON)); name another: make PYTHON=/path/to/python3.11")'
	@echo "setting up .venv with $(PYTHON) (once; some minutes if torch has to be fetched)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/pip install --quiet --no-compile -c constraints.txt --upgrade pip hatchling editables
	$(BIN)/pip install --quiet --no-compile -c constraints.txt --no-build-isolation -e .
	$(BIN)/python -c "import peerlane.evaluate.ranks.serve"
	@touch $@

$(STAMP): $(BASE)
	@echo "adding what tests and documentation need"
	$(BIN)/pip install --quiet --no-compile -c constraints.txt --no-build-isolation --group dev -e '.[$(EXTRAS)]'
	$(BIN)/python -c "import torch._dynamo, torch._inductor.compile_fx"
	@touch $@

demo: $(BASE)
	$(BIN)/peerlane demo

# At most 500 CPU seconds of all processes. What costs more is marked slow, or long; CONTRIBUTING.md says which promises are held where.
test: $(STAMP)
	$(PYTEST) -m "not slow and not long"

# In one run: tests are collected once, and the slow ones find what the quick ones have compiled and started.
test-room: $(STAMP)
	@case " $(ROOMS) " in *" $(or $(ROOM),none) "*) ;; *) echo "ROOM is $(or $(ROOM),not given): expected one of $(sort $(ROOMS)): make test-room ROOM=evaluate" >&2; exit 2;; esac
	$(PYTEST) -m "not long" $(addprefix tests/,$(or $(ROOM_$(ROOM)),$(ROOM)))

test-foreign: $(STAMP)
	$(dir $(STAMP))bin/python tests/foreign_kernels.py $(or $(DIR),$(error DIR is not given: make test-foreign DIR=FOLDER))

test-all: $(STAMP)
	$(PYTEST)

# Ten minutes on two cores. Every difference to gloo needs a reason in tests/ranks/torch_suite.toml.
test-torch: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -W ignore tests/ranks/torch_suite.py

mutants: $(STAMP)
	$(BIN)/python tests/mutants.py

# Trainers conflict with each other: each has a virtual environment of its own, on top of .venv.
test-trainers: $(STAMP)
	@for trainer in trl==1.16.0 verl==0.9.1 verifiers==0.4.0; do \
	venv=.venv-$${trainer%%==*} && $(BIN)/python -m venv --without-pip $$venv && \
	echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python*/site-packages)')" > $$(echo $$venv/lib/python*/site-packages)/base.pth && \
	$$venv/bin/python -m pip install --quiet $$(grep ^torch== constraints.txt) uv $$trainer || exit; done
	$(PYTEST) -m long tests/service/test_trainers.py

check: $(STAMP)
	$(BIN)/ruff check src tests examples docs/build
	$(BIN)/ruff format --check src tests examples docs/build
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m docs.build --check
	$(BIN)/python -m docs.build.budget
	$(PYTEST) -m "not slow and not long"

docs: $(STAMP)
	$(BIN)/python -m docs.build --write

site: $(STAMP)
	$(BIN)/python -m docs.build --site build/site
	$(BIN)/zensical build --strict

# Versions are chosen once, in uv.lock; uv is on PyPI. Markers go: the lock has one version of each package.
lock:
	uv lock
	{ echo "# Made by \`make lock\` from uv.lock: exact versions of everything that the development environment installs."; \
	uv export --frozen --no-hashes --all-extras --all-groups --no-emit-project --no-annotate --no-header | sed 's/ ;.*//'; } > constraints.txt

clean:
	rm -rf .venv .venv-* build dist site demo-results peerlane-results .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples docs -name __pycache__ -type d -prune -exec rm -rf {} +
