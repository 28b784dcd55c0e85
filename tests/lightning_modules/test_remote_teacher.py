"""A teacher behind HTTP says what the same model says here; and what happens when the server does not."""

import asyncio
import copy
import functools
import io
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from transformers import AutoTokenizer

from data_modules.datasets.questions import write_tasks
from data_modules.rollout_data_module import RolloutDataModule
from lightning_modules.advantage_transforms.distillation import TeacherPrompts
from lightning_modules.advantage_transforms.divergence_loss import DivergenceLoss
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.sod import SOD
from lightning_modules.batch import collate
from lightning_modules.models.policy import load_frozen_lm, token_logprobs
from lightning_modules.models.remote_teacher import RemoteTeacher
from rollout.environments.question_answering import QuestionAnswering
from rollout.loop.agent_loop import Budgets
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.rewards.qa import ExactMatchReward
from rollout.services import round_robin
from rollout.system import RolloutSystem
from rollout.tools.search import SearchTool
from rollout.trajectory import InfrastructureError, Task
from tests.conftest import make_model_dir
from tests.lightning_modules.completions_server import Completions, served
from tests.lightning_modules.helpers import fit, make_group, make_trajectory
from tests.lightning_modules.test_configuration import parse
from tests.rollout.scripted import ToyRetriever
from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.serving import free_port


@pytest.fixture(scope="module")
def completions(teacher_dir):
    return Completions(str(teacher_dir))


@pytest.fixture(scope="module")
def protocol(model_dir):
    return SearchR1Protocol(str(model_dir), template="short")


@pytest.fixture
def make_data(protocol):
    """``make_data(ranks, **options) -> RolloutDataModule``, which is not set up."""

    def make(ranks, **options):
        environment = QuestionAnswering({"search": SearchTool(ToyRetriever())})
        system = RolloutSystem(ScriptedEngine([], protocol.tokenizer), protocol, environment, ExactMatchReward())
        data = RolloutDataModule(system, ["none"], prompts_per_iteration=2, group_size=2, **options)
        data.trainer = SimpleNamespace(world_size=ranks)
        return data

    return make


def remote(server, **options):
    return RemoteTeacher([server.url + "/v1"], "teacher", **({"backoff_s": 0.001} | options))


def rows():
    """Turns with tool results between them; the last row has no sampled token, the one before ends with the tool's."""
    rng = random.Random(0)
    made = make_group(rng, "a", [1, 0, 0]) + make_group(rng, "b", [0, 1, 1])
    return [*made, make_trajectory(rng, 8, spans=[3, 4]), make_trajectory(rng, 9, spans=[])]


def test_the_same_log_probs_as_the_same_model_here(completions, teacher_dir):
    batch = collate(rows())
    with torch.no_grad():
        expected = token_logprobs(load_frozen_lm(str(teacher_dir)), batch).logprobs
    with served(completions) as server:
        found = remote(server).score(batch)
        assert len(server.bodies) == 1
    assert found.dtype == torch.float32 and torch.allclose(found, expected, atol=1e-4)
    assert not found[batch.mask == 0].any() and (found[batch.mask == 1] < 0).all()


def test_requests_are_bounded_and_hold_the_sampled_ids(completions):
    batch = collate(rows())
    with served(completions) as server:
        whole = remote(server).score(batch)
        split = remote(server, max_tokens_per_request=40).score(batch)
        alone = remote(server, max_tokens_per_request=1, concurrency=2).score(batch)
    assert torch.allclose(whole, split, atol=1e-5) and torch.allclose(whole, alone, atol=1e-5)
    one, *bodies = server.bodies
    sizes = [sum(map(len, body["prompt"])) for body in bodies[:-7]]
    assert len(sizes) > 1 and all(size <= 40 or len(b["prompt"]) == 1 for size, b in zip(sizes, bodies, strict=False))
    assert [len(body["prompt"]) for body in bodies[-7:]] == [1] * 7, "no token was sampled in the eighth row"
    sent = sorted(tuple(ids) for ids in one["prompt"])
    ids = [t.prompt_ids + t.response_ids for t in rows()]
    ids[6] = ids[6][: len(rows()[6].prompt_ids) + 3]  # what the tool said at the end is not needed
    assert sent == sorted(ids[:7])


def test_nothing_to_ask():
    teacher = RemoteTeacher(["http://127.0.0.1:1"], "teacher")
    assert teacher.score(collate([])).shape == (0, 1)
    batch = collate([make_trajectory(random.Random(0), 0, spans=[])])
    assert not teacher.score(batch).any()


def test_training_with_a_server_is_training_with_the_folder(completions, model_dir, teacher_dir):
    options = {"lr": 1e-3, "epochs": 2, "clip_high": 0.28}
    local = SOD(str(model_dir), str(teacher_dir), **options)
    with served(completions) as server:
        distant = SOD(str(model_dir), teacher_server=remote(server), **options)
        figures = [fit(module, [rows()[:6]] * 2).callback_metrics for module in (local, distant)]
        assert len(server.bodies) == 2 + 2  # the check before, and one per iteration
    assert distant.teacher is None
    for a, b in zip(local.policy.parameters(), distant.policy.parameters(), strict=True):
        assert (a - b).detach().abs().max() < 1e-5
    for name, value in figures[0].items():
        assert float(figures[1][name]) == pytest.approx(float(value), rel=1e-3, abs=1e-5), name


def test_a_server_s_likeliest_tokens_are_those_of_the_folder(completions, model_dir, teacher_dir, monkeypatch):
    """Ids and log-probs, and the weights after training on them."""
    batch = collate(rows())
    with served(completions) as server:
        sampled, ids, support = remote(server).score_top(batch, 7)
        module = GRPO(str(model_dir), advantage_transforms=[DivergenceLoss(str(teacher_dir), top_k=7)])
        module._trainer = SimpleNamespace(strategy=None)
        module.build_models()
        here = module.advantage_transforms[0].said(module, batch, batch)
        assert ids.joined.dtype == torch.int32 and torch.equal(ids.joined, here.ids.joined)
        assert torch.allclose(support.joined, here.support.joined, atol=1e-4)
        assert torch.allclose(sampled.column(0, batch.mask), here.logprobs, atol=1e-4)
        trained = []
        for teacher in ({"teacher": str(teacher_dir)}, {"server": remote(server)}):
            loss = DivergenceLoss(**teacher, top_k=7, tasks={"data_source": ["test"]})
            module = GRPO(str(model_dir), advantage_transforms=[loss], use_grpo=False, lr=1e-3)
            fit(module, [rows()])
            trained.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
        assert (trained[0] - trained[1]).abs().max() < 1e-4  # after Adam, which divides by the gradient's size
        _, ids, support = remote(server).score_top(batch, 7, vocabulary=200)
        known = here.ids.joined < 200
        assert torch.equal(ids.joined >= 0, known) and torch.equal(ids.joined[known], here.ids.joined[known])
        loss = DivergenceLoss(server=remote(server), top_k=21)
        monkeypatch.setattr("lightning_modules.training.policy_module.load_causal_lm", None)
        message = (
            r"does not return its 21 likeliest tokens \(400: .*\); start it with --max-logprobs 21 or more, or lower"
        )
        with pytest.raises(ValueError, match=message):
            fit(GRPO(str(model_dir), advantage_transforms=[loss], use_grpo=False), [rows()])


@pytest.fixture
def vllm_server(teacher_dir):
    """The address of vLLM's own server."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    port = free_port()
    words = f"serve {teacher_dir} --served-model-name teacher --port {port} --max-logprobs 50 --max-model-len 1024"
    words += " --dtype float32 --enforce-eager --max-num-seqs 8"
    process = subprocess.Popen(
        [Path(sys.executable).with_name("vllm"), *words.split()],
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if "Application startup complete" in line:
                break
        assert process.poll() is None and "startup complete" in said[-1], "".join(said[-30:])
        threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would stop it
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_vllms_own_server_says_what_the_same_model_says_here(vllm_server, teacher_dir, monkeypatch):
    batch, sizes, k = collate(rows()), [], 50
    teacher = RemoteTeacher([vllm_server], "teacher")
    teacher.check(str(teacher_dir), 1023, k)
    with pytest.raises(ValueError, match=r"its 51 likeliest tokens .* --max-logprobs 51"):
        teacher.check(str(teacher_dir), 1023, k + 1)
    with pytest.raises(ValueError, match="takes 1024 tokens"):
        teacher.check(str(teacher_dir), 1024)

    async def counted(*words, post=round_robin.post_json):
        answer = await post(*words)
        sizes.append(len(answer.body))
        return answer

    monkeypatch.setattr(round_robin, "post_json", counted)
    sampled, ids, support = teacher.score_top(batch, k)
    model = load_frozen_lm(str(teacher_dir))
    with torch.no_grad():
        logprobs = model(batch.input_ids).logits.float().log_softmax(-1)
        expected = token_logprobs(model, batch).logprobs
    at = batch.mask.nonzero()
    before = logprobs[at[:, 0], at[:, 1] - 1]
    assert torch.allclose(sampled.column(0, batch.mask), expected, atol=1e-4)
    assert torch.allclose(support.joined, before.topk(k).values, atol=1e-4)
    assert torch.allclose(before.gather(1, ids.joined.long()), support.joined, atol=1e-4)
    read = sum(int(row.nonzero()[-1]) + 1 for row in batch.mask if row.any())
    assert 40 < sum(sizes) / (read * k) < 100, "bytes per token and likeliest token, as on the page"


# ---------------------------------------------------------------------- while others roll out
def test_the_first_trajectory_is_scored_before_the_second_is_sampled(
    completions, model_dir, teacher_dir, protocol, tmp_path
):
    """And what is learnt is what the same model teaches here, afterwards."""
    scored = threading.Event()

    def answers(body):
        said = completions(body)
        if len(body["prompt"][0]) > 10:  # no probe
            scored.set()
        return said

    class Waiting(ScriptedEngine):
        async def generate(self, ids, sampling):
            if self.requests:
                assert await asyncio.to_thread(scored.wait, 300), "nobody asked the teacher"
            return await super().generate(ids, sampling)

    write_tasks(tmp_path / "questions.parquet", [Task("0", "Where?", ("here",), "made_up")])
    questions = str(tmp_path / "questions.parquet")
    options, weights = {"lr": 1e-3, "epochs": 2, "clip_high": 0.28}, []
    with served(answers) as server:
        for module, engine in (
            (SOD(str(model_dir), teacher_server=remote(server), **options), Waiting),
            (SOD(str(model_dir), str(teacher_dir), **options), ScriptedEngine),
        ):
            replies = engine(["<answer> here </answer>", "<answer> there </answer>"], protocol.tokenizer)
            environment = QuestionAnswering({"search": SearchTool(ToyRetriever())})
            system = RolloutSystem(replies, protocol, environment, ExactMatchReward(), concurrency=1)
            data = RolloutDataModule(system, [questions], prompts_per_iteration=1, group_size=2)
            quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
            L.Trainer(accelerator="cpu", max_steps=1, **quiet).fit(module, datamodule=data)
            weights.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
        assert [len(body["prompt"]) for body in server.bodies if len(body["prompt"][0]) > 10] == [1, 1], "each once"
    assert (weights[0] - weights[1]).abs().max() < 1e-5


def test_what_was_asked_early_is_not_asked_again(completions):
    first, second, third, fourth, *_ = rows()
    with served(completions) as server:
        expected = [remote(server).score_top(collate(some), 5) for some in ([first, second], [third])]
        del server.bodies[:]
        teacher = remote(server)
        for trajectory, ahead in ((first, 0), (first, 0), (third, 1), (fourth, 0)):
            teacher.begin(trajectory, 5, ahead)
        found = [teacher.score_top(collate([first, second]), 5)]
        assert {key[1][:5] for key in teacher._begun} == {third.prompt_ids[:5]}, "nobody will ask for the fourth"
        found.append(teacher.score_top(collate([third]), 5))
        assert len(server.bodies) <= 4 and not teacher._begun
        sent = [tuple(ids) for body in server.bodies for ids in body["prompt"]]
        assert len(set(sent)) == len(sent)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one[1].joined, other[1].joined)
        assert all(torch.allclose(one[i].joined, other[i].joined, atol=1e-5) for i in (0, 2))


def test_an_early_failure_is_raised_where_the_answer_is_needed(completions):
    with served([(400, "too long")]) as server:
        teacher = remote(server)
        teacher.begin(rows()[0])
        with pytest.raises(InfrastructureError, match="status 400: too long"):
            teacher.score(collate(rows()))
        assert not teacher._begun
    with served(completions) as server:
        teacher = remote(server)
        for trajectory in (make_trajectory(random.Random(0), 0, spans=[]), rows()[0]):
            teacher.begin(trajectory)
        assert len(teacher._begun) == 1, "no token was sampled in the other"
        assert teacher.score(collate(rows())).any()


def test_an_outage_while_others_roll_out_ends_nothing(completions):
    """The answer is asked for again where it is needed, with the whole patience."""
    answers = iter([(502, "starting")])
    with served(lambda body: next(answers, None) or completions(body)) as server:
        teacher = remote(server, patience_s=0.0)
        teacher.begin(rows()[0])
        assert isinstance(next(iter(teacher._begun.values())).answer.exception(60), InfrastructureError)
        assert torch.allclose(teacher.score(collate(rows())), remote(server).score(collate(rows())), atol=1e-5)


def test_requests_end_with_the_training(model_dir, completions, make_data):
    """With several ranks that exchange trajectories, or dynamic sampling, there are none: others may be learnt from."""
    asked, release = threading.Event(), threading.Event()

    def waits(body):
        asked.set()
        release.wait(60)

    with served(waits) as server:
        teacher = remote(server)
        data = make_data(1)
        loss = SOD(str(model_dir), teacher_server=teacher).advantage_transforms[0]
        data.listen(functools.partial(loss._begin, 0), teacher.forget)
        data._tell(rows()[0])
        try:
            assert asked.wait(60) and not copy.deepcopy(teacher)._begun
            [one] = teacher._begun.values()
            data.teardown("fit")
            assert one.answer.cancelled() and not teacher._begun
        finally:
            release.set()
    for data in (make_data(2), make_data(1, dynamic_sampling=2)):
        data.listen(lambda trajectory: None, lambda: None)
        assert not data._listeners
    unexchanged = make_data(2, balance_tokens=False)
    unexchanged.listen(lambda trajectory: None, lambda: None)
    assert unexchanged._how(0)["on_finished"] == unexchanged._tell


def test_a_server_reads_other_prompts_too(completions, model_dir, teacher_dir):
    class Told(TeacherPrompts):
        def __call__(self, module, trajectories):
            return [(7, 8, 9, *t.prompt_ids) for t in trajectories]

    said = []
    with served(completions) as server:
        for teacher in ({"teacher": str(teacher_dir)}, {"teacher_server": remote(server)}):
            for prompts in (None, Told()):
                module = SOD(str(model_dir), **teacher)
                module.advantage_transforms[0].prompts = prompts
                fit(module, [rows()[:6]])
                said.append(torch.tensor([x for _, page in module.last_token_values for x in page["teacher_logprobs"]]))
    plain, told, distant_plain, distant_told = said
    assert torch.allclose(plain, distant_plain, atol=1e-4) and torch.allclose(told, distant_told, atol=1e-4)
    assert (plain - told).abs().max() > 1e-2


def test_an_outage_is_waited_for(completions, caplog):
    batch = collate(rows())
    answers = iter([(502, "starting")] * 12)
    with caplog.at_level(logging.WARNING), served(lambda body: next(answers, None) or completions(body)) as server:
        teacher = remote(server, max_tokens_per_request=60)
        found = teacher.score(batch)
        assert len(server.bodies) > 12
        assert torch.allclose(found, remote(server).score(batch), atol=1e-5)
    warnings = [r.getMessage() for r in caplog.records if "asking on for" in r.getMessage()]
    assert len(warnings) == 1 and "status 502: starting); asking on for 1500 s" in warnings[0], "one a minute"


def test_patience_runs_out(completions):
    for patience, least in ((0.0, 1), (0.2, 2)):
        with served([(500, "out of memory")]) as server, pytest.raises(InfrastructureError) as caught:
            remote(server, patience_s=patience).score(collate(rows()))
        attempts = len(server.bodies)
        assert attempts >= least and (patience > 0 or attempts == 1)
        assert f"no reply from the teacher teacher after {attempts} attempt(s)" in str(caught.value)
        assert "status 500: out of memory" in str(caught.value)


def test_what_no_patience_helps_against_is_said_at_once():
    with served([(400, "too long")]) as server, pytest.raises(InfrastructureError, match="status 400: too long"):
        remote(server).score(collate(rows()))
    assert len(server.bodies) == 1


def test_an_impossible_token_is_bounded(completions, caplog):
    def change(choices):
        next(iter(choices[0]["prompt_logprobs"][-1].values()))["logprob"] = -9999.0

    batch = collate(rows()[:6])
    with caplog.at_level(logging.WARNING), served(changed(completions, change)) as server:
        found = remote(server).score(batch)
    with served(completions) as server:
        expected = remote(server).score(batch)
    differs = (found - expected).abs() > 1e-4
    assert int(differs.sum()) == 1 and float(found[differs]) == -100.0
    assert "1 tokens are impossible to it, counted as log-prob -100" in caplog.text


def changed(completions, change):
    def answer(body):
        said = copy.deepcopy(completions(body))
        change(said["choices"])
        return said

    return answer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop(), "expected 7 choices; found"),
        (lambda c: c[0]["prompt_logprobs"].pop(), "expected prompt_logprobs of [0-9]+ positions with token"),
        (lambda c: [v.update(logprob=float("nan")) for e in c[0]["prompt_logprobs"][1:] for v in e.values()], "nan"),
    ],
)
def test_answers_with_something_missing_are_refused(completions, change, message):
    with served(changed(completions, change)) as server, pytest.raises(InfrastructureError, match=message):
        remote(server).score(collate(rows()))
    assert len(server.bodies) == 1, "it would come again"


# ---------------------------------------------------------------------- the check before a training
def test_a_server_that_fits_passes(completions, model_dir, caplog):
    with served(completions) as server:
        remote(server).check(str(model_dir))
        paths = ["prompt" if isinstance(body["prompt"], str) else "ids" for body in server.bodies]
    assert paths == ["ids", "prompt"] and "cannot compare" not in caplog.text


def test_a_server_that_takes_too_few_tokens_is_refused(completions, model_dir):
    with served(completions) as server:
        remote(server).check(str(model_dir), longest=1023)  # and one
        with pytest.raises(ValueError, match="takes 1024 tokens, but .* 1024 together.* --max-model-len 1025"):
            remote(server).check(str(model_dir), longest=1024)
        module = SOD("/nowhere", teacher_server=remote(server))
        module.policy_path = str(model_dir)
        rollouts = SimpleNamespace(budgets=Budgets(max_length=2000))
        datamodule = SimpleNamespace(group_size=4, rollouts=rollouts)
        module._trainer = SimpleNamespace(
            datamodule=datamodule,
            precision_plugin=SimpleNamespace(),
            strategy=SingleDeviceStrategy(),
        )
        with pytest.raises(ValueError, match="--max-model-len 2001"):
            module.setup("fit")


def test_another_tokenizer_is_refused(completions, model_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    student = make_model_dir(tmp_path / "student")
    tokenizer.save_pretrained(student)
    with served(completions) as server, pytest.raises(ValueError, match="another tokenizer than the student at"):
        SOD(str(student), teacher_server=remote(server)).advantage_transforms[0].server.check(str(student))


def test_a_server_that_does_not_know_a_token_of_the_student_is_refused(completions, model_dir):
    def smaller(body):
        """As vLLM refuses what its model has no embedding for; the tokenizers are the same."""
        if largest := max((max(ids) for ids in body["prompt"] if isinstance(ids, list)), default=0) // 390:
            return 400, {"error": {"message": f"Token id {389 + largest} is out of vocabulary", "code": 400}}
        return completions(body)

    with served(smaller) as server, pytest.raises(ValueError, match="refuses token 399, which .* at least 400 embed"):
        remote(server).check(str(model_dir))


def test_servers_that_cannot_be_compared_are_told_of(completions, model_dir, caplog):
    for answer, told in (((404, "Not Found"), "status 404, Not Found"), ("<html>", "status 200, <html>")):

        def without(body, answer=answer):
            return answer if isinstance(body["prompt"], str) else completions(body)

        with caplog.at_level(logging.WARNING), served(without) as server:
            remote(server).check(str(model_dir))
        assert f"{told}; cannot compare the teacher's tokenizer" in caplog.text


def test_wrong_models_and_addresses_are_found_before_the_policy_is_loaded(completions, model_dir):
    with served(completions) as server:
        other = RemoteTeacher([server.url], "student")
        with pytest.raises(InfrastructureError, match="found 404: .*`student` does not exist"):
            other.check(str(model_dir))
    nobody = RemoteTeacher([f"http://127.0.0.1:{free_port()}/v1"], "teacher")
    module = SOD(str(model_dir), teacher_server=nobody)
    with pytest.raises(InfrastructureError, match="Connect"):
        fit(module, [rows()[:6]])
    assert module.policy is None


# ---------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": "t"}, r"two teachers, 't' and RemoteTeacher\(m at http://a/v1/completions\)"),
        ({"temperature": 0.7}, "temperature is 0.7, but a server's log-probs are those of 1.0"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        SOD("p", teacher_server=RemoteTeacher(["http://a/v1"], "m"), **options)


def test_it_is_named_in_a_configuration_and_in_checkpoints_by_its_text():
    server = {"class_path": "lightning_modules.models.remote_teacher.RemoteTeacher",
              "init_args": {"urls": ["http://a/v1/"], "model": "m", "max_tokens_per_request": 9000}}  # fmt: skip
    module = parse("sod.SOD", policy="p", teacher_server=server)
    assert module.advantage_transforms[0].server.max_tokens_per_request == 9000
    assert module.advantage_transforms[0].server.urls == ["http://a/v1/completions"]
    file = io.BytesIO()
    torch.save(dict(module.hparams), file)
    file.seek(0)
    assert "m at http://a/v1/completions" in torch.load(file, weights_only=True)["teacher_server"]
    assert parse("sod.SOD", policy="p", opd_mode="none", teacher_server=server).advantage_transforms == []
