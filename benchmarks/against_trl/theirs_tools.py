"""TRL's side, run in .venv-trl: ``python -m benchmarks.against_trl.theirs_tools PIPE``, started by tool_calls."""

from __future__ import annotations

import functools
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
import trl.trainer.grpo_trainer
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.against_trl import serving
from benchmarks.against_trl.cases import Inputs, reward
from benchmarks.against_trl.theirs import LOSSES, SCALES, Clock, observe, training_options
from benchmarks.against_trl.tool_cases import CALLS, MODEL, RESULT, ToolCase

# SmolLM2's chat template with calls and results in the form of our side (Hermes), and no schemas.
TEMPLATE = """{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}
{%- endif %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def every_turn_calls(*_: Any, **__: Any) -> dict[str, Any]:
    """Replaces TRL's ``parse_response`` and reads every turn as a call, because random weights never write one."""
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "town"}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def measure(case: ToolCase, folder: Path, inputs: Inputs) -> dict[str, Any]:
    torch.set_num_threads(case.threads)
    trl.trainer.grpo_trainer.parse_response = every_turn_calls
    waits, made = case.waits(), []

    def search(query: str):  # without its return value, which TRL would show the model and we do not
        """Searches a text collection and returns the passages that fit the query best.

        Args:
            query: What to look for.
        """
        made.append(query)
        time.sleep(next(waits))
        return RESULT

    def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward(ids) for ids in completion_ids]

    options = training_options(case, folder, inputs)
    config = GRPOConfig(
        **options,
        num_generations=inputs.samples,
        steps_per_generation=options["gradient_accumulation_steps"],
        beta=0.0,
        epsilon=0.2,
        loss_type=LOSSES[case.aggregation],
        scale_rewards=SCALES[case.advantage],
        max_tool_calling_iterations=CALLS,
    )
    model = str(folder / MODEL)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_schema = {}  # unused, but TRL requires one
    if "tool_calls" not in tokenizer.chat_template:  # SmolLM2's, which TRL refuses
        tokenizer.chat_template = TEMPLATE
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in inputs.prompts]})
    trainer = GRPOTrainer(
        model, reward_funcs=rewards, args=config, train_dataset=dataset, processing_class=tokenizer, tools=[search]
    )
    clock = Clock(1)
    observe(trainer, clock, inputs)
    trainer.train()
    if len(made) != case.iterations * inputs.rows * CALLS:
        raise RuntimeError(f"TRL made {len(made)} calls; expected {case.iterations * inputs.rows * CALLS}")
    return {"rows": clock.rows[1:] or clock.rows}


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    serving.serve({"measure": functools.partial(serving.with_peak, measure)}, {"trl": trl.__version__})
