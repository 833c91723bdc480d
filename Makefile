.DEFAULT_GOAL := help
.PHONY: help run chat serve bench kernels profile test fuzz mutate lint clean

MODEL ?= models/tales
PROMPT ?= Once upon a time
ARGS ?=
GPUS ?= 1
PYTHON ?= python3
VENV = .venv/bin
# with several GPUs, each has its own process and a part of the model
RUN = $(if $(filter 1,$(GPUS)),$(VENV)/python,OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/torchrun --nproc-per-node $(GPUS))
# the shell outlives Ctrl-C, and 130 is what the program then returns: make has no error to report
CTRL_C = trap : INT;
INTERRUPTED = || [ $$? -eq 130 ]
# pip shows its progress at a terminal
PIP = $(VENV)/pip install $$(test -t 2 || echo --quiet)
TESTS = test_all.py training/test_training.py
# a test that hangs ends the run with a traceback
PYTEST = -o faulthandler_timeout=1800 -o faulthandler_exit_on_timeout=true

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-8s %s\n", $$1, $$2}'
	@echo 'settings: MODEL=folder  PROMPT='"'"'text'"'"'  GPUS=2  ARGS="more flags, see run.py --help"'

run: export TEXT := $(value PROMPT)
run: .venv/ready  ## continue PROMPT, taken as it is, by 300 tokens (ARGS="-n N": by N)
	@$(CTRL_C) $(RUN) run.py -m "$(MODEL)" --no-escape --prompt="$$TEXT" -n 300 $(ARGS) $(INTERRUPTED)
	@echo "next: make chat, make run PROMPT='The fox said', $(VENV)/python run.py --help" >&2

chat: .venv/ready  ## talk with the model
	@$(CTRL_C) $(RUN) run.py -m "$(MODEL)" --chat $(ARGS) $(INTERRUPTED)

serve: .venv/ready  ## answer over HTTP as OpenAI's API does, on port 8080 (ARGS="--port N": another)
	@$(CTRL_C) $(RUN) serve.py -m "$(MODEL)" $(ARGS) $(INTERRUPTED)

bench: .venv/ready  ## tokens per second
	$(RUN) bench.py -m "$(MODEL)" $(ARGS)

kernels: .venv/ready  ## each op against its ceiling and plain PyTorch (on a CPU: torch's ops, not the kernels)
	$(VENV)/python dev/kernels.py -m "$(MODEL)" $(ARGS)

profile: .venv/ready  ## one step, kernel by kernel (on a CPU: torch's ops)
	$(VENV)/python dev/steps.py -m "$(MODEL)" $(ARGS)

test: .venv/ready-test  ## all tests; no GPU needed: five minutes on two cores, six the first time
	$(VENV)/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal $(PYTEST) $(TESTS) $(ARGS)

fuzz: .venv/ready-test  ## corrupt checkpoints, templates, texts and options at random for a minute
	$(VENV)/python dev/fuzz.py $(ARGS)

mutate: .venv/ready-test  ## small wrong changes to the program, each of which the tests must notice: ten minutes
	$(VENV)/python dev/mutate.py $(ARGS)

lint: .venv/ready-test  ## ruff: style and formatting
	$(VENV)/ruff check . && $(VENV)/ruff format --check .

clean:  ## remove .venv and caches
	rm -rf .venv __pycache__ */__pycache__ .pytest_cache .ruff_cache

.venv/ready: requirements.txt
	@echo "setting up .venv with torch: 2.8 GB to download, minutes"
	$(PYTHON) -m venv .venv
	@$(PIP) -r requirements.txt
	@touch $@

.venv/ready-test: .venv/ready requirements-test.txt
	@echo "adding what the tests need: pytest, ruff, transformers"
	@$(PIP) -r requirements-test.txt
	@touch $@
