"""Ledgers: the answer against another reader, the expert with the real notebook, verdicts, the files of the stage."""

import random
import re
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from data_modules.datasets.questions import load_tasks
from experiments.worlds.repair.build import BuildLedgers
from experiments.worlds.repair.environment import Ledger
from experiments.worlds.repair.expert import LedgerExpertEngine, LedgerPolicy
from experiments.worlds.repair.problems import TOTALS, as_task, draw_problems, make_problem
from rollout.engines.base import SamplingParams
from rollout.protocols.arpo_tags import ARPOProtocol
from rollout.rewards.qa import ExactMatchReward
from rollout.samplers.continuation import ContinuationSampler
from rollout.system import RolloutSystem
from rollout.tools.python.local import LocalSandbox
from rollout.tools.python.tool import PythonTool
from rollout.trajectory import Action, ActionKind, CallOutcome, StopReason, ToolCall, ToolRequest, ToolResult
from tests.callbacks.helpers import make_trajectory

CALL, ANSWER, INVALID = ActionKind.CALL, ActionKind.ANSWER, ActionKind.INVALID


def test_answers_follow_from_the_ledger():
    firsts = set()
    for problem in draw_problems(300, range(6, 9), random.Random(0), set()):
        totals = [int(re.findall(r"stock (\d\d)\.", problem.question)[0])]
        entries = re.findall(r"(\w+) (\d\d) (in|out)\.", problem.question)
        for _, change, where in entries:
            totals.append(totals[-1] + int(change) * {"in": 1, "out": -1}[where])
        assert tuple(totals) == problem.totals and all(total in TOTALS for total in totals)
        changes = [int(change.split()[1]) for change in problem.changes]
        assert len(set(changes)) == len(changes) == len(entries) and not set(changes) & set(TOTALS)
        months = [month for month, _, _ in entries]
        assert tuple(months) == problem.months and len(set(months)) == len(changes)
        firsts.add(months[0])
    assert len(firsts) == 12, "a month is found by its name, wherever it stands"
    with pytest.raises(ValueError, match="1 to 12 changes, not 13"):
        make_problem(random.Random(0), 13)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repair")
    return folder, BuildLedgers(train=20, val=3, test=5, demonstrations=30).run(folder)


def test_the_stage_writes_disjoint_splits_and_a_tokenizer_with_whole_numbers(world):
    folder, summary = world
    splits = {name: load_tasks(folder / f"{name}.parquet") for name in ("demonstrations", "train", "val", "test")}
    assert {name: len(tasks) for name, tasks in splits.items()} == {k: summary[k] for k in splits}
    questions = [task.question for tasks in splits.values() for task in tasks]
    assert len(set(questions)) == len(questions) == 58
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert len(tokenizer) == summary["vocabulary"]
    numbers = [f" {number}" for number in range(11, 100)]
    assert [tokenizer.decode([i]) for i in tokenizer("".join(numbers)).input_ids] == numbers


def system(world, **expert):
    folder, _ = world
    tokenizer, files = str(folder / "tokenizer"), [str(folder / "demonstrations.parquet")]
    limits = {"max_turns": 60, "final_turn": False, "max_response_tokens": 3000, "max_observation_tokens": 32}
    made = RolloutSystem(
        engine=LedgerExpertEngine(tokenizer, files, **expert),
        protocol=ARPOProtocol(tokenizer, system="none", tools={"python": "code"}),
        environment=Ledger({"python": PythonTool(LocalSandbox())}),
        reward=ExactMatchReward(),
        **limits,
    )
    return made, load_tasks(files)


def played(world, count=12, **expert):
    made, tasks = system(world, **expert)
    try:
        done = made.rollout(tasks[:count], sampling=SamplingParams(max_new_tokens=40), seed=0)
        return done, [made.environment.verdicts(t) for t in done]
    finally:
        made.close()


def slips(trajectory):
    return [";" in str(turn.action.calls) for turn in trajectory.turns]


def test_a_careful_expert_needs_a_cell_per_entry(world):
    done, verdicts = played(world, error_rate=0.0)
    assert all(t.reward.total == 1.0 and len(t.calls) == len(t.task.metadata["totals"]) for t in done)
    assert all(verdict is True for found in verdicts for verdict in found)
    texts = [call.result.text for call in done[0].calls]
    assert texts == [f"t = {total}" for total in done[0].task.metadata["totals"]]


def test_an_expert_that_repairs_gets_there_and_is_wrong_only_where_it_slips(world):
    done, verdicts = played(world, error_rate=0.4, repair=1.0)
    assert all(t.reward.total == 1.0 for t in done) and sum(map(any, map(slips, done))) > 6
    for trajectory, found in zip(done, verdicts, strict=True):
        assert found == [not error_rate for error_rate in slips(trajectory)]
        repairs = sum(slips(trajectory))
        assert len(trajectory.calls) == len(trajectory.task.metadata["totals"]) + 2 * repairs


def test_an_expert_that_does_not_repair_fails_wherever_it_slipped(world):
    done, verdicts = played(world, error_rate=0.4, repair=0.0)
    assert {t.stop_reason for t in done} == {StopReason.ANSWER}
    for trajectory, found in zip(done, verdicts, strict=True):
        went_wrong = any(slips(trajectory))
        assert trajectory.reward.total == (not went_wrong) == found[-1]
        if went_wrong:
            first = slips(trajectory).index(True)
            assert found[:first] == [True] * first and found[first] is False
            assert trajectory.calls[first].result.outcome is CallOutcome.ERROR


def test_a_fork_goes_on_in_the_notebook_of_its_parent(world):
    made, tasks = system(world, error_rate=0.5, repair=1.0)
    sampling = SamplingParams(max_new_tokens=40)
    try:
        [whole] = made.rollout(tasks[:1], sampling=sampling, seed=0)
        turn = slips(whole).index(True) + 1
        sampler = ContinuationSampler({whole.task.id: (whole, whole.turns[turn].start)})
        [fork] = made.rollout(tasks[:1], n=1, sampling=sampling, seed=0, sampler=sampler)
    finally:
        made.close()
    assert fork.response_ids == whole.response_ids and fork.reward.total == 1.0


def test_experts_differ_in_words_and_worry_after_an_error():
    task = as_task(make_problem(random.Random(1), 6), "t")
    start, month = task.metadata["totals"][0], task.metadata["months"][0]
    clean = f" Now note stock <python> t = {start} </python> <result>\nt = {start}\n</result>"
    sign, change = task.metadata["changes"][0].split()
    error_rate = f"t = {change}; t {sign}= s"
    slipped = f"{clean} Now {start} note {month} <python> {error_rate} </python> <result>\nt = {change}\n</result>"

    def leads(transcript, **options):
        return {LedgerPolicy(0.0, seed, **options).next_turn(task, transcript).split()[0] for seed in range(200)}

    assert len(leads(clean)) > 10 and not leads(clean) & leads(slipped)
    assert LedgerPolicy(0.0, 0, repair=1.0).next_turn(task, slipped).endswith(f"back <python> t = {start} </python>")
    assert task.metadata["months"][1] in LedgerPolicy(0.0, 0, repair=0.0).next_turn(task, slipped)
    first = [LedgerPolicy(0.0, seed).next_turn(task, clean).split()[0] for seed in range(300)]
    last = [LedgerPolicy(0.0, seed, backwards=True).next_turn(task, clean).split()[0] for seed in range(300)]
    assert first.count("Now") > 2 * last.count("Now")


def judged(*turns, totals=(50, 62, 40)):
    """Verdicts on turns: the total that is shown after a cell (with "!": of one that failed; None: nothing is shown),
    an answer as text, or a kind."""
    kinds, calls, answer = [], [], None
    for turn, shown in enumerate(turns):
        kinds.append(shown if isinstance(shown, ActionKind) else ANSWER if str(shown).startswith("A") else CALL)
        if kinds[-1] is CALL:
            outcome = CallOutcome.ERROR if shown is None or "!" in str(shown) else CallOutcome.OK
            text = "SyntaxError: no" if shown is None else f"t = {str(shown).strip('!')}"
            calls.append(ToolCall(turn, ToolRequest("python", {"code": "?"}), ToolResult(text, outcome), 0.0))
        elif kinds[-1] is ANSWER:
            answer = shown[1:]
    made = make_trajectory(kinds=tuple(kinds), calls=tuple(calls))
    turns = [
        replace(t, action=Action(t.action.kind, answer=answer)) if t.action.kind is ANSWER else t for t in made.turns
    ]
    task = replace(made.task, metadata={"totals": list(totals)})
    return Ledger.verdicts(made.replace(turns=tuple(turns), task=task))


def test_verdicts_by_hand():
    assert judged(50, 62, 40, "A40") == [True, True, True, True]
    assert judged(50, 12, 34, "A34") == [True, False, False, False], "it goes on as if nothing had happened"
    assert judged(50, "12!", 50, 62, 40, "A40") == [True, False, True, True, True, True]
    assert judged(50, 12, 62, 40, "A41") == [True, False, True, True, False], "restored and calculated in one cell"
    assert judged(50, 50, "50!", None, 62) == [True, None, False, False, True]
    assert judged(50, 62, 40, 22, "A40") == [True, True, True, False, False], "an entry that is not there"
    assert judged(50, INVALID, "A50") == [True, False, False]
