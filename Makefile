# Compact Agents. `make` prints the help below. Commands run in this folder with the environment in .venv.

# Variables of commands. Other variables are refused, except those in ENVIRONMENT.
VARIABLES := EXP SEED COMPARE RESUME FRESH ARGS LAUNCH NNODES NPROC PARTITION ACCOUNT TIME SBATCH MASTER_ADDR MASTER_PORT \
	NODE_RANK LAUNCH_TIMEOUT CKPT TRUST PORT INDEX EXPS TO DTYPE LIKE ALGORITHM HARDWARE GPUS GPU Q SEEDS ABLATION_SEEDS ALL FORCE \
	BENCHMARKS ALLOW QUESTIONS FAULTS ONLY PUBLIC
ENVIRONMENT := COMPACT_AGENTS_% CUDA_% FORCE_CPU FORCE_CUDA HF_% HTTP_% HTTPS_% MLFLOW_% NCCL_% OMP_% PIP_% PYTHON% TMPDIR UV_% VLLM_% http_% https_%
GIVEN := $(foreach v,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $v))),$v))
UNKNOWN := $(firstword $(filter-out $(VARIABLES) $(ENVIRONMENT) MAKE%,$(GIVEN)))
ifneq ($(UNKNOWN),)
NEAREST := $(shell python3 -c 'import difflib, sys; print(*difflib.get_close_matches(sys.argv[1].upper(), sys.argv[2:], n=1))' \
	'$(UNKNOWN)' $(VARIABLES) 2>/dev/null)
$(error unknown variable $(UNKNOWN)$(if $(NEAREST),; did you mean $(NEAREST)?,; valid: $(VARIABLES)))
endif

ifeq ($(origin EXP),undefined) # the default experiment ends with its whole table
COMPARE ?= 1
endif
EXP ?= dgpo_tiny
PY := .venv/bin/python
RUN := $(PY) -m experiments
SEED_FLAG := $(if $(SEED),--seed $(SEED))
RESUME_FLAG := $(if $(RESUME),--resume $(RESUME))
COMPARE_FLAG := $(if $(filter-out 0,$(COMPARE)),--compare)
FRESH_FLAG := $(if $(filter-out 0,$(FRESH)),--fresh)
ALLOW_FLAG := $(if $(ALLOW),--allow $(ALLOW))
SBATCH_ALL := $(strip $(if $(PARTITION),--partition=$(PARTITION)) $(if $(ACCOUNT),--account=$(ACCOUNT)) $(if $(TIME),--time=$(TIME)) $(SBATCH))
LAUNCH_FLAGS = $(if $(LAUNCH),--launch $(LAUNCH)) $(if $(NNODES),--nodes $(NNODES)) $(if $(NPROC),--processes $(NPROC)) $(if $(SBATCH_ALL),--sbatch="$(SBATCH_ALL)")
BENCHMARKS := trl_comparison tool_calls smollm2_training agent_programs distribution_losses
PYTEST := PYTHONHASHSEED=0 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
export Q

.DEFAULT_GOAL := help
.PHONY: help examples help-launch setup lock alfworld environments trl templates train smoke evaluate lint test test-all chaos retriever engine compare metrics ui export experiments dry-run check-data agent-check size ask download preconditions reproduce benchmark gpu-check status clean docs docs-serve

help: ## print this text
	@echo "usage: make TARGET [EXP=dgpo_tiny] [SEED=0] [ARGS=\"--model.kl_coef 0.01\"]"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "New here?       make smoke     sets up, trains in small, prints a table; then: make ui"
	@echo "The real thing: make train     dgpo_tiny with all its stages, or EXP=NAME"

setup: ## make .venv (most other targets run it first)
	@./scripts/setup.sh

lock: ## write requirements/*.txt again; ARGS=--upgrade for new versions
	@./scripts/lock.sh $(ARGS)

alfworld: ## make .venv-alfworld, for original ALFWorld games (4 minutes)
	@./scripts/setup_alfworld.sh

environments: ## make .venv-openenv and .venv-verifiers, for environments of theirs (2 minutes)
	@./scripts/setup_environments.sh

trl: ## make .venv-trl, for the comparison with TRL (2 minutes)
	@./scripts/setup_trl.sh

templates: setup ## fetch published chat templates into .templates, for tests (30 s)
	@./scripts/setup_templates.sh

train: setup ## run an experiment; COMPARE=1, RESUME=last, FRESH=1
	@$(RUN) train $(EXP) $(SEED_FLAG) $(COMPARE_FLAG) $(RESUME_FLAG) $(FRESH_FLAG) $(ALLOW_FLAG) $(LAUNCH_FLAGS) $(ARGS)

help-launch: ## show commands for several devices, nodes, torchrun, Slurm
	@echo "several devices:       make train EXP=... ARGS=\"--trainer.strategy=zero3 --trainer.devices 8\""
	@echo "by torchrun, 2 nodes:  make train EXP=... LAUNCH=torchrun NNODES=2 NPROC=8 MASTER_ADDR=host0 NODE_RANK=0"
	@echo "                       and the same on the other node with NODE_RANK=1 (MASTER_PORT=29400 LAUNCH_TIMEOUT=600)"
	@echo "by Slurm:              make train EXP=... LAUNCH=slurm NNODES=2 NPROC=8 PARTITION=gpu TIME=24:00:00 SBATCH=\"--mem=0\""
	@echo "NNODES and NPROC are short for --trainer.num_nodes and --trainer.devices in ARGS; docs/scaling.md has the rest"

smoke: setup ## run a small chain in 3 minutes: search, SFT, GRPO, tests, a table
	@$(RUN) train smoke --compare $(ARGS)

evaluate: setup ## test a checkpoint or model folder; CKPT=path
	@$(RUN) evaluate $(EXP) $(SEED_FLAG) $(if $(CKPT),--checkpoint "$(CKPT)") $(if $(filter-out 0,$(TRUST)),--trust) $(ARGS)

lint: setup ## run ruff, pyright and the import contract
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/pyright --pythonpath $(PY)
	@.venv/bin/lint-imports

test: setup ## run the fast tests, 8 minutes; ARGS="tests/rollout -k parse"
	@$(PYTEST) -m "not slow" $(ARGS)

test-all: setup ## run all tests (ranks, servers, every experiment), 60 minutes
	@$(PYTEST) $(ARGS)

chaos: setup ## inject random faults into small runs, 60 min; SEED=0 FAULTS=100
	@$(PY) -m tests.chaos $(SEED_FLAG) $(if $(FAULTS),--faults $(FAULTS)) $(if $(ONLY),--only $(ONLY)) $(ARGS)

retriever: setup ## serve an experiment's search index; PORT=8000 INDEX=folder
	@$(RUN) retriever $(EXP) --port $(or $(PORT),8000) $(if $(INDEX),--index "$(INDEX)") $(ARGS)

engine: setup ## serve an experiment's engine; PORT=8100 CKPT=folder
	@$(RUN) engine-server $(EXP) $(SEED_FLAG) --port $(or $(PORT),8100) $(if $(CKPT),--checkpoint "$(CKPT)") $(ARGS)

metrics: setup ## send the metrics to MLflow that it lacks
	@$(RUN) metrics $(EXP) $(COMPARE_FLAG) $(ARGS)

compare: setup ## print a table of runs (curves: make ui); EXPS="a b" for some
	@$(RUN) compare $(EXPS) $(ARGS)

ui: setup ## open the runs in MLflow; PORT=5000
	@$(RUN) ui --port $(or $(PORT),5000) $(ARGS)

export: setup ## write a Hugging Face folder; CKPT=last|best|path TO=dir|hub:owner/name
	@$(RUN) export $(EXP) $(SEED_FLAG) $(if $(CKPT),--checkpoint "$(CKPT)") $(if $(filter-out 0,$(TRUST)),--trust) $(if $(TO),--to "$(TO)") $(if $(DTYPE),--dtype $(DTYPE)) $(if $(filter-out 0,$(PUBLIC)),--public) $(ARGS)

experiments: setup ## list experiments; LIKE=sod ALGORITHM=GRPO HARDWARE=cpu
	@$(RUN) list $(if $(LIKE),--like "$(LIKE)") $(if $(ALGORITHM),--algorithm "$(ALGORITHM)") $(if $(HARDWARE),--hardware "$(HARDWARE)")

examples: setup ## write examples/*.yaml again from the registry
	@for file in examples/*.yaml; do \
	  name=$$(basename $$file .yaml); $(RUN) flatten $$name >$$file.new && mv $$file.new $$file || exit 1; done

dry-run: setup ## print and validate the configuration; loads no model
	@$(RUN) dry-run $(EXP) $(SEED_FLAG) $(COMPARE_FLAG) $(ARGS)

check-data: setup ## read questions, traces and corpus; report faults and lengths
	@$(RUN) check-data $(EXP) $(ARGS)

size: setup ## estimate GPU memory by component; GPUS=1,8 GPU=4090
	@$(RUN) size $(EXP) $(if $(GPUS),--gpus $(GPUS)) $(if $(GPU),--gpu $(GPU)) $(ARGS)

agent-check: setup ## run an agent program once and show its rows; Q="..." CKPT=path
	@$(RUN) agent-check $(EXP) $(SEED_FLAG) $(if $(Q),--question "$$Q") $(if $(CKPT),--checkpoint "$(CKPT)") $(ARGS)

ask: setup ## ask a trained model a question; Q="..."
	@$(RUN) ask $(EXP) $(SEED_FLAG) $(if $(Q),--question "$$Q") $(ARGS)

download: setup ## fetch the weights and data of an experiment
	@$(RUN) download $(EXP) $(COMPARE_FLAG) $(ARGS)

preconditions: setup ## check if SOD, SDAR, ARPO can train; QUESTIONS=64 ALLOW=a,b
	@$(RUN) preconditions $(EXP) $(SEED_FLAG) $(if $(QUESTIONS),--questions $(QUESTIONS)) $(ALLOW_FLAG) $(ARGS)

reproduce: setup ## run seeds and ablations, write docs/results/; SEEDS=0,1,2
	@$(RUN) reproduce $(EXP) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(ABLATION_SEEDS),--ablation-seeds $(ABLATION_SEEDS)) $(ALLOW_FLAG) $(ARGS)

benchmark: setup ## run all benchmarks; print rows for docs/results/
	@for name in $(BENCHMARKS); do $(PY) -m benchmarks.$$name --markdown || exit 1; done
	@echo "The rows above belong in docs/results/benchmarks.md"

gpu-check: setup ## check training on this GPU: PASS or FAIL, 10 min; ARGS="--cpu"
	@$(PY) -m benchmarks.gpu $(ARGS)

status: setup ## list the stages of an experiment and their state
	@$(RUN) status $(EXP) $(SEED_FLAG) $(COMPARE_FLAG) $(ARGS)

docs: setup ## build the site; warnings are errors
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "make docs-serve shows it with its search; site/index.html, opened as a file, has no search"

docs-serve: setup ## serve the site while you write; PORT=8001
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs serve --dev-addr 127.0.0.1:$(or $(PORT),8001)

clean: setup ## remove stages that cannot resume; FORCE=1, ALL=1 for more
	@$(RUN) clean $(if $(filter-out 0,$(ALL)),--all) $(if $(filter-out 0,$(FORCE)),--force) $(ARGS)
