"""What a teacher is told of finished trajectories: solutions, errors, advice; and what it then teaches (SDPO, OPID)."""

import dataclasses
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_modules.advantage_transforms.distillation import Distillation
from lightning_modules.advantage_transforms.divergence_loss import DivergenceLoss
from lightning_modules.advantage_transforms.dual_distillation import DualDistillation, regimes_of
from lightning_modules.advantage_transforms.teacher_prompts import PrivilegedPrompts
from lightning_modules.advantage_transforms.teachers import SelfTeacher
from lightning_modules.advantage_transforms.trajectory_prompts import (
    ERRORS,
    SOLUTION,
    AttemptPrompts,
    LessonPrompts,
    cut,
    error_messages,
    transcript,
    without_control_tokens,
)
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.batch import collate
from lightning_modules.training import optimisation
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.protocols.text_protocol import control_tokens
from rollout.services.chat_client import ChatClient
from rollout.trajectory import Action, ActionKind, CallOutcome, InfrastructureError, ToolCall, ToolRequest, ToolResult
from tests.lightning_modules.algorithms.test_opsd import TASKS, Data, train
from tests.lightning_modules.completions_server import served
from tests.lightning_modules.helpers import make_group

TEMPLATE = "{question} ({told})"


@pytest.fixture
def protocol(model_dir):
    return SearchR1Protocol(str(model_dir), template="short")


class Told(Data):
    """Two groups: rewards 1, 0, 1 and 0, 0, 1; the first attempt of the second met an error."""

    def __init__(self, protocol):
        super().__init__(protocol)
        rng, self.rows = random.Random(0), []
        for task, rewards in zip(TASKS, ([1, 0, 1], [0, 0, 1]), strict=True):
            for t in make_group(rng, task.id, rewards):
                said = [protocol.tokenizer.encode(f"turn {k} of {t.index}.") for k in range(3)]
                ids, mask, turns = [], [], []
                for turn, words in zip(t.turns, said, strict=True):
                    seen = list(t.response_ids[turn.end : turn.observation_end])
                    start, end = len(ids), len(ids) + len(words)
                    ids, mask = [*ids, *words, *seen], [*mask, *[1] * len(words), *[0] * len(seen)]
                    action = Action(ActionKind.CALL)
                    turns.append(
                        dataclasses.replace(turn, start=start, end=end, observation_end=len(ids), action=action)
                    )
                calls = [
                    ToolCall(k, ToolRequest("search", {}), ToolResult(f"result {k}", CallOutcome.OK), 0.0)
                    for k in (0, 1)
                ]
                if (task.id, t.index) == ("t1", 0):
                    calls[1] = dataclasses.replace(calls[1], result=ToolResult("no such page", CallOutcome.ERROR))
                    turns[2] = dataclasses.replace(turns[2], action=Action(ActionKind.INVALID, error="no call found"))
                prompt = tuple(protocol.prompt_ids(task))
                changes = {
                    "response_ids": tuple(ids),
                    "loss_mask": tuple(mask),
                    "logprobs": tuple(-0.1 * m for m in mask),
                }
                changes |= {"turns": tuple(turns), "calls": tuple(calls), "task": task, "prompt_ids": prompt}
                self.rows.append(t.replace(**changes))


def solution(index):
    return SOLUTION.format(
        text="\n".join(x for k in range(3) for x in (f"turn {k} of {index}.", f"result {k}")[: 2 - k // 2])
    )


def texts(prompts, data, model_dir):
    module = GRPO(str(model_dir))
    module._trainer = type("Trainer", (), {"datamodule": data})()
    return prompts.texts(module, data.rows), module


def test_a_text_of_a_trajectory(model_dir, protocol):
    t = Told(protocol).rows[0]
    assert transcript(protocol.decode, t) == "turn 0 of 0.\nresult 0\nturn 1 of 0.\nresult 1\nturn 2 of 0."
    words = protocol.tokenizer.encode("<think> a </think> b")
    turn = dataclasses.replace(t.turns[0], start=0, end=len(words), observation_end=len(words))
    thought = t.replace(response_ids=tuple(words), loss_mask=(1,) * len(words), logprobs=(0.0,) * len(words),
                        turns=(turn,), calls=())  # fmt: skip
    assert transcript(protocol.decode, thought) == "b"
    assert transcript(protocol.decode, thought, thinking=True).replace(" ", "") == "<think>a</think>b"
    token = control_tokens(protocol.tokenizer)[0]
    assert without_control_tokens(protocol.tokenizer, f"a{token} b{token}") == "a b"
    assert cut(protocol.tokenizer, "a b", 100) == "a b"
    assert protocol.tokenizer.encode(cut(protocol.tokenizer, "one two three four", 4)) == protocol.tokenizer.encode(
        "one two three four"
    )[:4]  # fmt: skip


def test_solutions_and_errors(model_dir, protocol):
    """The first right attempt of another member; an attempt's errors only where there is none."""
    data = Told(protocol)
    found, module = texts(AttemptPrompts(), data, model_dir)
    assert found == [solution(2), solution(0), solution(0), solution(2), solution(2), None]
    assert module.metrics.reduce()["train/told_solution"] == pytest.approx(5 / 6)
    errors = ERRORS.format(text="no such page\nno call found")
    assert error_messages(data.rows[3]) == "no such page\nno call found"
    assert texts(AttemptPrompts(errors="always"), data, model_dir)[0][3] == f"{solution(2)}\n\n{errors}"
    assert texts(AttemptPrompts(solution=False), data, model_dir)[0] == [None, None, None, errors, None, None]
    assert texts(AttemptPrompts(own_solution=True), data, model_dir)[0][5] == solution(2)
    nothing = texts(AttemptPrompts(success_threshold=2.0), data, model_dir)[0]
    assert nothing == [None, None, None, errors, None, None]
    with pytest.raises(ValueError, match="there is nothing to tell the teacher"):
        AttemptPrompts(solution=False, errors="never")


@pytest.mark.parametrize("top_k", [7, None])
def test_the_policy_learns_from_itself_told_a_solution(model_dir, protocol, top_k):
    """SDPO: the divergence of every judged trajectory's tokens, from the model after both prompts."""
    prompts = AttemptPrompts(template=TEMPLATE)
    loss = DivergenceLoss(
        self_teacher=SelfTeacher(),
        prompts=prompts,
        divergence="jsd",
        top_k=top_k,
        support="student" if top_k else "teacher",
    )
    module = GRPO(
        str(model_dir), use_grpo=False, num_mini_batches=1, advantage_transforms=[loss], lr=1e-9,
        aggregation="sequence_mean",
    )  # fmt: skip
    data = Told(protocol)
    figures = train(module, data)
    assert figures["train/told"] == pytest.approx(5 / 6)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    total, tokens, divergence = 0.0, 0, 0.0
    for t, text in zip(data.rows, texts(prompts, data, model_dir)[0], strict=True):
        if text is None:
            continue
        prompt = protocol.prompt_ids(dataclasses.replace(t.task, question=f"{t.task.question} ({text})"))
        found = []
        for read in (t.prompt_ids, prompt):
            with torch.no_grad():
                logits = model(torch.tensor([[*read, *t.response_ids]])).logits[0, len(read) - 1 : -1]
            found.append(logits.double().softmax(-1)[torch.tensor(t.loss_mask) == 1])
        p, q = found
        if top_k is not None:
            ids = p.topk(top_k).indices
            p, q = (torch.cat([x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1, keepdim=True)], -1) for x in (p, q))
        m = (p + q) / 2
        js = 0.5 * (q * (q / m).log()).sum(-1) + 0.5 * (p * (p / m).log()).sum(-1)
        total, tokens, divergence = total + js.mean().item(), tokens + len(js), divergence + js.sum().item()
    assert figures["train/loss_policy"] == pytest.approx(total / 6, rel=1e-3), "the one without a text counts"
    assert figures["train/divergence"] == pytest.approx(divergence / tokens, rel=1e-3)
    judged = collate(data.rows).mask.sum()
    assert figures["train/judged_tokens"] == pytest.approx(tokens / judged.item())


def test_a_prompt_beyond_the_model_s_positions_is_not_judged(model_dir, protocol, monkeypatch):
    data = Told(protocol)
    prompts = AttemptPrompts(template=TEMPLATE)
    found, module = texts(prompts, data, model_dir)
    lengths = [
        len(protocol.prompt_ids(prompts.filled(t.task, text))) + len(t.response_ids) if text else 0
        for t, text in zip(data.rows, found, strict=True)
    ]
    module.policy = type("Model", (), {"config": type("C", (), {"max_position_embeddings": max(lengths) - 1})})
    read = prompts(module, data.rows)
    assert [ids is not None for ids in read] == [0 < n < max(lengths) for n in lengths]


def test_prompts_concern_the_teacher_s_tasks_alone(model_dir, protocol):
    """Tasks of others need no answer, and programs have no protocol that could render a prompt."""
    tasks = [
        dataclasses.replace(TASKS[0], data_source="a"),
        dataclasses.replace(TASKS[1], data_source="b", golden_answers=()),
    ]
    data = Data(protocol, tasks)
    loss = DivergenceLoss(self_teacher=SelfTeacher(), prompts=PrivilegedPrompts(), tasks={"data_source": ["a"]})
    figures = train(GRPO(str(model_dir), advantage_transforms=[loss], lr=1e-3), data)
    assert 0.2 < figures["train/judged_tokens"] < 0.8 and figures["train/divergence"] > 0
    data.rollouts.program = object()
    with pytest.raises(ValueError, match="AttemptPrompts renders the teacher's prompts with .* but Data has none"):
        AttemptPrompts().check_data(None, data, tasks)


# ---------------------------------------------------------------------- advice of a language model
def writer(body):
    asked = body["messages"][0]["content"]
    if "turn 0 of 1." in asked:
        return 500, "busy"
    word = "succeeded" if "Its attempt succeeded" in asked else "failed"
    return {"choices": [{"message": {"content": f"<think>Hm.</think>It {word}: go north."}}]}


def test_advice_about_each_trajectory(model_dir, protocol, caplog):
    data = Told(protocol)
    with served(writer) as server:
        prompts = LessonPrompts(ChatClient([server.url], "w", retries=0, backoff=0.001), template=TEMPLATE)
        found, _ = texts(prompts, data, model_dir)
        assert found == ["It succeeded: go north.", None, "It succeeded: go north.", "It failed: go north.", None,
                         "It succeeded: go north."]  # fmt: skip
        assert "no advice for 2 of 6" in caplog.text
        asked = server.bodies[0]["messages"][0]["content"]
        assert TASKS[0].question in asked and "turn 0 of" in asked and server.bodies[0]["temperature"] == 0.4
        signal = Distillation(self_teacher=SelfTeacher(), prompts=prompts, coef=0.001)
        module = GRPO(str(model_dir), advantage_transforms=[signal], lr=1e-3)
        figures = train(module, data)
        assert figures["train/told"] == pytest.approx(4 / 6) and figures["train/opd_advantage_abs"] > 0
        plain = GRPO(str(model_dir), lr=1e-3)
        train(plain, data)
        for (t, page), (_, other) in zip(module.last_token_values, plain.last_token_values, strict=True):
            same = page["advantages"] == pytest.approx(other["advantages"], abs=1e-7)
            assert same == (t.index == 1), "one without advice has the outcome alone"


def test_a_writer_that_never_answers_stops_the_training(model_dir, protocol):
    with served(lambda body: (500, "busy")) as server:
        prompts = LessonPrompts(ChatClient([server.url], "w", retries=0, backoff=0.001))
        for _ in range(2):
            assert texts(prompts, Told(protocol), model_dir)[0] == [None] * 6
        with pytest.raises(InfrastructureError, match="status 500: busy"):
            texts(prompts, Told(protocol), model_dir)


# ---------------------------------------------------------------------- DOPD
def test_regimes_by_hand():
    """Gaps 0, 0.1, 2, 2 and 9, the last an outlier: their mean is 1.025. Sums of probabilities: mean 0.66."""
    own = torch.tensor([0.5, 0.1, 0.7, 0.05, 0.3]).log()
    teacher = own + torch.tensor([0.0, 0.1, -2.0, 2.0, -9.0])
    assert regimes_of(teacher, own, 0.2).tolist() == [0, 1, 3, 2, 3]
    assert regimes_of(teacher, own, 0.0).tolist() == [0, 1, 0, 1, 3], "with it the mean is 2.62"
    assert regimes_of(own[:0], own[:0], 0.05).tolist() == []


@pytest.mark.parametrize("top_k", [7, 400])
def test_every_token_learns_from_one_of_two(model_dir, teacher_dir, protocol, top_k, monkeypatch):
    """Loss and gradient from whole distributions in float64; tokens of all four regimes."""
    prompts = PrivilegedPrompts("hint", "{question} ({hint})")
    weights = {"low_teacher": 0.6, "low_self": 0.3, "high_teacher": 1.0, "high_self": 0.7}
    loss = DualDistillation(str(teacher_dir), prompts=prompts, top_k=top_k, outliers=0.0, **weights)
    module = GRPO(str(model_dir), use_grpo=False, num_mini_batches=1, advantage_transforms=[loss], lr=1e-9,
                  max_tokens_per_micro_batch=300)  # fmt: skip
    data, seen, clip = Data(protocol), [], optimisation.clip_gradients

    def record(module, *args):
        seen.append(torch.cat([p.grad.flatten().clone() for p in module.policy.parameters()]))
        return clip(module, *args)

    monkeypatch.setattr(optimisation, "clip_gradients", record)
    figures = train(module, data)
    shares = [figures[f"train/dual/{name}"] for name in weights]
    assert sum(shares) == pytest.approx(1) and min(shares) > 0.02, shares
    student, teacher = (AutoModelForCausalLM.from_pretrained(d).double() for d in (model_dir, teacher_dir))
    rows = []
    for t in data.rows:
        prompt = protocol.prompt_ids(prompts.privileged(t.task))
        mask, ids = torch.tensor(t.loss_mask) == 1, torch.tensor(t.response_ids)
        found = []
        for model, read in ((student, t.prompt_ids), (student, prompt), (teacher, prompt)):
            logits = model(torch.tensor([[*read, *t.response_ids]])).logits[0, len(read) - 1 : -1]
            found.append(logits.log_softmax(-1)[mask])
        rows.append((*found, ids[mask]))
    s, p, q, ids = (torch.cat(x) for x in zip(*rows, strict=True))
    p, q = p.detach(), q.detach()
    mine, theirs = (x.gather(-1, ids[:, None])[:, 0] for x in (p, q))
    gap, sure = (theirs - mine).abs(), theirs.exp() + mine.exp()
    total = 0.0
    for i in range(len(ids)):
        if gap[i] > gap.mean():
            regime = "high_teacher" if theirs[i] >= mine[i] else "high_self"
        else:
            regime = "low_teacher" if sure[i] > sure.mean() else "low_self"
        target = (p if regime.endswith("self") else q)[i]
        kept = target.topk(top_k).indices
        a, b = (x[kept].exp() for x in (s[i], target))
        if top_k < 400:
            a, b = (torch.cat([x, 1 - x.sum()[None]]) for x in (a, b))
        m = (a + b) / 2
        js = 0.5 * (a * (a / m).log()).sum() + 0.5 * (b * (b / m).log()).sum()
        total = total + weights[regime] * (js if regime == "high_teacher" else (a * (a / b).log()).sum())
    (total / len(ids)).backward()
    expected = torch.cat([x.grad.flatten() for x in student.parameters()])
    assert figures["train/loss_policy"] == pytest.approx(total.item() / len(ids), rel=1e-4)
    assert expected.abs().max() > 1e-3 and (seen[0].double() - expected).abs().max() < 1e-5


def test_two_sides_told_nothing_are_refused():
    with pytest.raises(ValueError, match="prompts is null; DualDistillation tells teacher and policy more"):
        DualDistillation("t")
    with pytest.raises(ValueError, match="all four weights are 0"):
        DualDistillation("t", prompts=PrivilegedPrompts(), low_teacher=0, low_self=0, high_teacher=0, high_self=0)
