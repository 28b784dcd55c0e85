# Compact Agents. `make` prints the help below; everything runs from this folder with the environment in .venv.

EXP ?= dgpo_tiny
PY := .venv/bin/python
RUN := $(PY) -m experiments
SEED_FLAG := $(if $(SEED),--seed $(SEED))
RESUME_FLAG := $(if $(RESUME),--resume $(RESUME))
FRESH_FLAG := $(if $(FRESH),--fresh)
SBATCH_ALL := $(strip $(if $(PARTITION),--partition=$(PARTITION)) $(if $(ACCOUNT),--account=$(ACCOUNT)) $(if $(TIME),--time=$(TIME)) $(SBATCH))
LAUNCH_FLAGS = $(if $(LAUNCH),--launch $(LAUNCH)) $(if $(NNODES),--nodes $(NNODES)) $(if $(NPROC),--processes $(NPROC)) $(if $(SBATCH_ALL),--sbatch="$(SBATCH_ALL)")
BENCHMARKS := retrieval engines weight_push rollouts branching sandbox chunked_logprobs step_weights sod_cost household staleness packing memory sharding trl_comparison
export Q

.DEFAULT_GOAL := help
.PHONY: help help-launch setup alfworld trl train evaluate test retriever engine compare ui export experiments dry-run size ask download reproduce benchmark status clean

help: ## this text
	@echo "usage: make TARGET [EXP=dgpo_tiny] [SEED=0] [ARGS=\"--model.kl_coef 0.01 --trainer.max_steps 20\"]"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "A new machine: make train (sets up, trains dgpo_tiny with all its stages, prints a table). Then: make ui"

setup: ## make .venv with everything in it (the other targets do this by themselves)
	@./scripts/setup.sh

alfworld: ## make .venv-alfworld, for original ALFWorld games (compiles for about 4 minutes; nothing else needs it)
	@./scripts/setup_alfworld.sh

trl: ## make .venv-trl, for `python -m benchmarks.trl_comparison` (about 2 minutes; nothing else needs it)
	@./scripts/setup_trl.sh

train: setup ## make an experiment and its stages; RESUME=last continues, FRESH=1 starts its own stage anew; LAUNCH=torchrun|slurm: see `make help-launch`
	@$(RUN) train $(EXP) $(SEED_FLAG) $(RESUME_FLAG) $(FRESH_FLAG) $(LAUNCH_FLAGS) $(ARGS)

help-launch: ## training on several devices, on several nodes, by torchrun or Slurm
	@echo "several devices:       make train EXP=... ARGS=\"--trainer.strategy=zero3 --trainer.devices 8\""
	@echo "by torchrun, 2 nodes:  make train EXP=... LAUNCH=torchrun NNODES=2 NPROC=8 MASTER_ADDR=host0 NODE_RANK=0"
	@echo "                       and the same on the other node with NODE_RANK=1 (MASTER_PORT=29400 LAUNCH_TIMEOUT=600)"
	@echo "by Slurm:              make train EXP=... LAUNCH=slurm NNODES=2 NPROC=8 PARTITION=gpu TIME=24:00:00 SBATCH=\"--mem=0\""
	@echo "NNODES and NPROC are short for --trainer.num_nodes and --trainer.devices in ARGS; docs/scaling.md has the rest"

evaluate: setup ## test a checkpoint or model folder: EXP=... CKPT=path (default: the experiment's own result)
	@$(RUN) evaluate $(EXP) $(SEED_FLAG) $(if $(CKPT),--checkpoint "$(CKPT)") $(ARGS)

test: setup ## run the tests; ARGS="tests/rollout -k parse" for some of them
	@PYTHONHASHSEED=0 $(PY) -m pytest -n 2 --dist loadfile $(ARGS)

retriever: setup ## serve an experiment's search index by itself; PORT=8000 INDEX=folder ARGS="--threads 8 --host 0.0.0.0 --gpu"
	@$(RUN) retriever $(EXP) --port $(or $(PORT),8000) $(if $(INDEX),--index "$(INDEX)") $(ARGS)

engine: setup ## serve an experiment's engine to trainers (ServerEngine, docs/scaling.md); PORT=8100 CKPT=folder ARGS="--host 0.0.0.0"
	@$(RUN) engine-server $(EXP) $(SEED_FLAG) --port $(or $(PORT),8100) $(if $(CKPT),--checkpoint "$(CKPT)") $(ARGS)

compare: setup ## a table of runs and a page with curves; EXPS="dgpo_tiny ppo_tiny" for some
	@$(RUN) compare $(EXPS)

ui: setup ## open the runs in MLflow; PORT=5000
	@$(RUN) ui --port $(or $(PORT),5000)

export: setup ## a model, or a checkpoint CKPT=last|best|path, sharded or not, as a Hugging Face folder; TO=folder DTYPE=bfloat16
	@$(RUN) export $(EXP) $(SEED_FLAG) $(if $(CKPT),--checkpoint "$(CKPT)") $(if $(TO),--to "$(TO)") $(if $(DTYPE),--dtype $(DTYPE)) $(ARGS)

experiments: setup ## list the experiments
	@$(RUN) list

dry-run: setup ## print an experiment's resolved configuration and validate it; loads no model
	@$(RUN) dry-run $(EXP) $(SEED_FLAG) $(ARGS)

size: setup ## GPU memory by component and the roofline's speeds, before any download; GPUS=1,8,16 GPU=h100
	@$(RUN) size $(EXP) $(if $(GPUS),--gpus $(GPUS)) $(if $(GPU),--gpu $(GPU)) $(ARGS)

ask: setup ## put a question to a trained model and watch it search: Q="..."
	@$(RUN) ask $(EXP) $(SEED_FLAG) $(if $(Q),--question "$$Q") $(ARGS)

download: setup ## fetch the weights and data that an experiment needs
	@$(RUN) download $(EXP) $(ARGS)

reproduce: setup ## three seeds of an experiment and its ablations, then docs/results/EXP.md; SEEDS=0,1,2 ABLATION_SEEDS=0
	@$(RUN) reproduce $(EXP) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(ABLATION_SEEDS),--ablation-seeds $(ABLATION_SEEDS)) $(ARGS)

benchmark: setup ## run all benchmarks, one after the other; prints rows for docs/results/benchmarks.md
	@for name in $(BENCHMARKS); do $(PY) -m benchmarks.$$name --markdown || exit 1; done
	@echo "The rows above belong into docs/results/benchmarks.md"

status: setup ## which stages of an experiment are done, and where they lie
	@$(RUN) status $(EXP) $(SEED_FLAG) $(ARGS)

clean: setup ## remove unfinished stages; ALL=1 removes all outputs
	@$(RUN) clean $(if $(ALL),--all)
