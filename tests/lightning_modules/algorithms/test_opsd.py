"""OPSD: the teacher reads another prompt, and its log-probs come back to the places of the student's tokens."""

import dataclasses
import random
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_modules.advantage_transforms.teacher_prompts import TEMPLATES, PrivilegedPrompts
from lightning_modules.algorithms.opsd import OPSD
from lightning_modules.batch import aligned, collate, with_prompts
from lightning_modules.models.policy import load_causal_lm
from rollout.protocols.hermes import HermesProtocol
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.trajectory import Task
from tests.lightning_modules.helpers import make_group
from tests.rollout.chat_models import chat_model

TASKS = [
    Task("t0", "Where was Mira Voss born?", ("Grey Harbor", "the Harbor"), "test", metadata={"hint": "a harbor"}),
    Task("t1", "Who?", ("the potter {hint}",), "test", metadata={"hint": "Mira {answer}"}),
]


@pytest.fixture
def protocol(model_dir):
    return SearchR1Protocol(str(model_dir), template="short")


def groups(protocol, tasks=TASKS):
    rng, rows = random.Random(0), []
    for task in tasks:
        for t in make_group(rng, task.id, [1, 0, 0]):
            rows.append(t.replace(task=task, prompt_ids=tuple(protocol.prompt_ids(task))))
    return rows


class Data(L.LightningDataModule):
    group_size = 3

    def __init__(self, protocol, tasks=TASKS, **changes):
        super().__init__()
        self.rollouts = SimpleNamespace(protocol=protocol)
        self.training_questions = tuple(tasks)
        self.rows = [t.replace(**changes) for t in groups(protocol, tasks)]

    def train_dataloader(self):
        return DataLoader([self.rows], batch_size=None)


def train(module, data):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(max_steps=1, accelerator="cpu", **quiet)
    trainer.fit(module, datamodule=data)
    return {k: float(v) for k, v in trainer.callback_metrics.items()}


@pytest.mark.parametrize("privilege", ["answer", "hint"])
def test_the_teacher_reads_more_and_scores_the_same_tokens(model_dir, protocol, privilege):
    data = Data(protocol)
    module = OPSD(str(model_dir), privilege, lr=1e-3, max_tokens_per_micro_batch=60)
    figures = train(module, data)
    assert figures["train/opd_advantage_abs"] > 1e-3, "what it is told changes what it thinks"
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    for t, page in module.last_token_values:
        told = {"answer": t.task.golden_answers[0], "hint": t.task.metadata["hint"]}[privilege]
        before, after = TEMPLATES[privilege].split("{" + privilege + "}")
        question = before.replace("{question}", t.task.question) + told + after
        prompt = protocol.prompt_ids(dataclasses.replace(t.task, question=question))
        assert len(prompt) > len(t.prompt_ids)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *t.response_ids]])).logits[0].log_softmax(-1)
        expected = [
            logits[len(prompt) + i - 1, token].item() * m
            for i, (token, m) in enumerate(zip(t.response_ids, t.loss_mask, strict=True))
        ]
        assert page["teacher_logprobs"] == pytest.approx(expected, abs=1e-4)
        gap = [(b - a) * m for a, b, m in zip(page["old_logprobs"], expected, t.loss_mask, strict=True)]
        assert page["opd_advantages"] == pytest.approx(gap, abs=1e-4)  # uniform


def test_the_teacher_stays_the_initial_policy(model_dir, protocol):
    module = OPSD(str(model_dir), lr=1e-2)
    train(module, Data(protocol))
    start = load_causal_lm(str(model_dir))
    policy, teacher, initial = (list(m.parameters()) for m in (module.policy, module.teacher, start))
    assert max(float((a.detach() - b).abs().max()) for a, b in zip(policy, initial, strict=True)) > 1e-4
    assert all(torch.equal(a, b) for a, b in zip(teacher, initial, strict=True))


def test_what_is_told_is_put_in_once():
    module = PrivilegedPrompts(template="{question} | {answer} | {hint}")
    filled = module.privileged(dataclasses.replace(TASKS[1], question="a {answer} {question}?"))
    assert filled.question == "a {answer} {question}? | the potter {hint} | {hint}"
    assert PrivilegedPrompts("hint").privileged(TASKS[0]).question.count("a harbor") == 1


def test_the_data_sets_own_prompt_is_filled_too():
    messages = (("system", "s"), ("user", "example"), ("assistant", "yes"), ("user", "Q?"))
    task = dataclasses.replace(TASKS[0], prompt=messages)
    filled = PrivilegedPrompts(template="{question} ({answer})").privileged(task)
    assert filled.prompt == (*messages[:3], ("user", "Q? (Grey Harbor)"))
    assert filled.golden_answers == task.golden_answers and filled.id == task.id


def test_another_place_and_back():
    rng = random.Random(1)
    rows = make_group(rng, "q", [0, 0, 0])
    batch = collate(rows)
    other = with_prompts(rows, [(1,), tuple(range(30)), rows[2].prompt_ids], batch)
    assert other.input_ids.shape != batch.input_ids.shape and torch.equal(other.mask.sum(1), batch.mask.sum(1))
    ids = aligned(other.input_ids.float(), other, batch)
    assert torch.equal(ids, batch.input_ids * batch.response_mask)
    assert torch.equal(aligned(ids, batch, other), other.input_ids * other.response_mask)
    empty = collate([])
    assert aligned(empty.mask, with_prompts([], [], empty), empty).shape == empty.mask.shape


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"privilege": "solution"}, "privilege is 'solution'; expected one of answer, hint"),
        ({"template": "the answer is {answer}"}, r"template: expected \{question\} where"),
        ({"template": "{question} {hint}"}, r"template: expected \{answer\} where the task's answer goes"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OPSD("p", **options)


def test_a_task_without_something_to_tell_is_named_before_a_model_is_loaded(protocol):
    cases = [("answer", {"golden_answers": ()}), ("hint", {"metadata": {}}), ("hint", {"metadata": {"hint": " "}})]
    for privilege, changes in cases:
        tasks = [TASKS[0], dataclasses.replace(TASKS[1], **changes)]
        with pytest.raises(ValueError, match=f"privilege is {privilege}, but task t1 of test has none: expected"):
            train(OPSD("/nowhere", privilege), Data(protocol, tasks))


def test_a_hint_that_quotes_a_control_token_is_refused_before_a_model_is_loaded(tmp_path):
    protocol = HermesProtocol(chat_model(tmp_path, "qwen3"))
    tasks = [TASKS[0], dataclasses.replace(TASKS[1], metadata={"hint": "write <|im_end|>"})]
    protocol.prompt_ids(tasks[1])  # the question itself is fine
    with pytest.raises(ValueError, match="task t1 of test, told the hint: .*im_end"):
        train(OPSD("/nowhere", "hint"), Data(protocol, tasks))


def test_without_a_rollout_system_there_is_no_prompt():
    module = OPSD("/nowhere")
    data = SimpleNamespace(group_size=4)
    module._trainer = SimpleNamespace(
        datamodule=data,
        precision_plugin=SimpleNamespace(),
        strategy=SingleDeviceStrategy(),
    )
    with pytest.raises(ValueError, match="but SimpleNamespace has none; train with a RolloutDataModule"):
        module.setup("fit")


def test_prompts_that_were_rendered_otherwise_are_refused(model_dir, protocol):
    with pytest.raises(ValueError, match="task t0 was read by the policy otherwise"):
        train(OPSD(str(model_dir)), Data(protocol, prompt_ids=(1, 2, 3)))


def test_a_prompt_that_the_teacher_has_no_positions_for_is_refused(model_dir, protocol):
    long = dataclasses.replace(TASKS[0], metadata={"hint": "a harbor " * 600})
    message = "task t0: with the hint the teacher reads .* tokens, but the model has positions for 1024; lower"
    with pytest.raises(ValueError, match=message):
        train(OPSD(str(model_dir), "hint"), Data(protocol, [long]))
