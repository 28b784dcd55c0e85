"""Our side: ``python -m benchmarks.against_trl.ours_tools PIPE``, started by tool_calls."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from benchmarks.against_trl.cases import Inputs
from benchmarks.against_trl.inputs import QUESTIONS, SIZES, WORDS, make_model, make_questions
from benchmarks.against_trl.ours import Clock, EvenIds, make_module, make_trainer, serve
from benchmarks.against_trl.tool_cases import CALLS, MODEL, RESULT, ToolCase
from callbacks.training.weight_sync import WeightSync
from data_modules.datasets.questions import load_tasks, write_tasks
from data_modules.rollout_data_module import RolloutDataModule
from experiments.worlds.tokenizer_training import train_tokenizer
from rollout.engines.vllm_engine import VLLMEngine
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.base import PromptMode
from rollout.protocols.hermes import HermesProtocol
from rollout.system import RolloutSystem
from rollout.tools.limits import ToolLimits
from rollout.trajectory import Action, ActionKind, CallOutcome, ToolRequest, ToolResult

SETTING = Path(__file__).parents[2] / "experiments/configs/smollm2/bases/setting.yaml"


class EveryTurnCalls(HermesProtocol):
    """Reads every turn as a call, because random weights never write one."""

    def parse(self, text: str, mode: PromptMode = PromptMode.AGENT) -> Action:
        return Action(ActionKind.CALL, (ToolRequest("search", {"query": "town"}),))


class SlowSearch:
    name = "search"

    def __init__(self, case: ToolCase) -> None:
        self.waits = case.waits()

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        await asyncio.sleep(next(self.waits))
        return ToolResult(RESULT, CallOutcome.OK)

    async def close(self) -> None:
        pass


def prepare(
    folder: Path,
    prompts: int,
    samples: int,
    turn_tokens: int,
    completion_tokens: int,
    model: str | None = None,
    questions: str | None = None,
) -> None:
    """Write the inputs of both sides: a model whose turns have ``turn_tokens`` on average, questions, prompts. Or link
    ``model``, and take the prompts of smollm2_grpo for the first questions of the file ``questions``."""
    draw = random.Random(0)
    if model is None or questions is None:
        tokenizer = train_tokenizer([" ".join(draw.choices(WORDS, k=400))], vocab_size=512)
        make_model(folder / MODEL, tokenizer, SIZES["small"][MODEL], turn_tokens)
        tasks = make_questions(prompts, draw)
    else:
        (folder / MODEL).symlink_to(Path(model).absolute())
        asked = OmegaConf.load(SETTING)["values"].rollouts.init_args.protocol.init_args.instruction
        tasks = [
            dataclasses.replace(task, question=asked.replace("{question}", task.question))
            for task in load_tasks(questions)[:prompts]
        ]
    write_tasks(folder / QUESTIONS, tasks)
    protocol = make_protocol(folder)
    ids = [protocol.prompt_ids(task) for task in tasks]
    Inputs([task.question for task in tasks], ids, samples, completion_tokens, {}).write(folder)


def make_protocol(folder: Path) -> EveryTurnCalls:
    tools_in = "trained" if (folder / MODEL).is_symlink() else "auto"  # SmolLM2's template shows no tools
    return EveryTurnCalls(str(folder / MODEL), tools=("search",), tools_in=tools_in)


def make_data(case: ToolCase, folder: Path, inputs: Inputs) -> RolloutDataModule:
    student, tokens = str(folder / MODEL), inputs.completion_tokens
    rollouts = RolloutSystem(
        VLLMEngine(student, max_length=inputs.longest, max_num_seqs=inputs.rows, threads=case.threads),
        make_protocol(folder),
        QuestionAnswering({"search": SlowSearch(case)}, ToolLimits(concurrency=inputs.rows)),
        EvenIds(),
        max_turns=CALLS,
        max_turn_tokens=tokens,
        max_response_tokens=tokens,
    )
    sizes = {"prompts_per_iteration": len(inputs.prompts), "group_size": inputs.samples}
    return RolloutDataModule(rollouts, [str(folder / QUESTIONS)], **sizes, iterations=case.iterations, seed=0)


def measure(case: ToolCase, folder: Path, inputs: Inputs) -> dict[str, Any]:
    torch.set_num_threads(case.threads)
    module, clock = make_module(case, folder, inputs), Clock()
    make_trainer(case, [clock, WeightSync()]).fit(module, datamodule=make_data(case, folder, inputs))
    return {"rows": clock.rows[1:] or clock.rows}


if __name__ == "__main__":
    serve(measure, prepare)
