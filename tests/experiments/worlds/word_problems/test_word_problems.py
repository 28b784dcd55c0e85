"""Word problems: the answer against another reader of the story, the expert's turns, the files of the first stage."""

import asyncio
import json
import random
import re

import pytest
from transformers import AutoTokenizer

from data_modules.datasets.questions import load_tasks
from experiments.worlds.word_problems.build import BuildWordProblems
from experiments.worlds.word_problems.expert import WordExpertEngine, WordExpertPolicy, response_failed
from experiments.worlds.word_problems.problems import as_task, draw_problems, make_problem
from rollout.engines.base import SamplingParams
from rollout.storage import load_trajectories


def read_story(question: str) -> int:
    """The answer, worked out from the words alone."""
    value, cost = 0, None
    for sentence in re.split(r"(?<=[.?]) ", question):
        numbers = [int(n) for n in re.findall(r"\d+", sentence)]
        if re.search(r"years old|minutes|day \d|How many|What comes", sentence):
            if not re.search(r"\d", sentence) or "years" in sentence or "minutes" in sentence or "day" in sentence:
                continue
        if re.search(r"packs|owns|In the shop", sentence):
            value = numbers[0] * numbers[1]
        elif len(numbers) == 2:
            value += numbers[0] * numbers[1]
        elif re.search(r"more|added|finds", sentence):
            value += numbers[0]
        elif re.search(r"away|lost|gives", sentence):
            value -= numbers[0]
        elif re.search(r"cents", sentence):
            cost = numbers[0]
        elif re.search(r"friends|rows", sentence):
            return value % numbers[0]
    return value if cost is None else value * cost


def test_answers_follow_from_the_story():
    rng = random.Random(0)
    for problem in draw_problems(600, {2: 1, 3: 1, 4: 1, 5: 1}, rng, set()):
        assert read_story(problem.question) == int(problem.answer), problem.question
        assert len(problem.calculations) == int(problem.family) == len(problem.results) == len(problem.told)
        for told, formula in zip(problem.told, problem.calculations, strict=True):
            if told != "Together.":  # in the story, and with the numbers of its formula
                assert told in problem.question
                assert re.findall(r"\d+", told) == re.findall(r"\b(?<!\{)\d+\b(?!\})", formula)


def test_every_calculation_is_needed_and_the_hint_holds_no_result():
    rng = random.Random(1)
    for _ in range(200):
        task = as_task(make_problem(rng, 4), "t", "train")
        hint, results = task.metadata["hint"], task.metadata["results"]
        values = {}
        for part in hint.split("; "):
            name, formula = part.split(" = ")
            values[name] = eval(formula, {}, values)
        assert str(values[name]) == task.golden_answers[0]
        assert not any(re.search(rf"\b{result}\b", hint) for result in results if len(result) > 2)
        used = " ".join(part.split(" = ")[1] for part in hint.split("; "))
        assert all(re.search(rf"\b{name}\b", used) for name in list(values)[:-1])


@pytest.fixture
def task():
    problem = next(p for p in draw_problems(50, {3: 1}, random.Random(2), set()))
    return as_task(problem, "demo", "demonstrations")


def response(text: str) -> str:
    return f"<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n"


def code_of(turn: str) -> str:
    return json.loads(re.search(r"<tool_call>\n(.*)\n</tool_call>", turn)[1])["arguments"]["code"]


def test_a_careful_expert_calculates_step_by_step(task):
    expert, transcript = WordExpertPolicy(error_rate=0.0), ""
    for number, (formula, result) in enumerate(zip(task.metadata["formulas"], task.metadata["results"], strict=True)):
        turn = expert.next_turn(task, transcript)
        assert code_of(turn) == f"print('=', {formula})" and turn.startswith(task.metadata["told"][number])
        transcript += response(f"= {result}")
    assert expert.next_turn(task, transcript) == f"The answer is \\boxed{{ {task.golden_answers[0]} }}."


def test_a_careless_expert_recovers_from_each_of_its_slips(task):
    seen = set()
    formula, result = task.metadata["formulas"][1], task.metadata["results"][0]
    for seed in range(300):
        turn = WordExpertPolicy(error_rate=0.99, seed=seed).next_turn(task, response(f"= {result}"))
        try:
            code = code_of(turn)
        except json.JSONDecodeError:
            seen.add("broken")
            continue
        seen.add("stale" if code.startswith("print('=', x") else "silent" if code == f"x = {formula}" else "none")
        failed = response(f"= {result}") + response("NameError: x")
        again = WordExpertPolicy(error_rate=0.99, seed=seed).next_turn(task, failed)
        assert again.startswith("Again") and code_of(again) == f"print('=', {formula})"
    assert {"broken", "stale", "silent"} <= seen


def test_a_response_is_a_number_or_a_failure():
    assert not any(map(response_failed, ("= 5", "= -5", "-5\n")))
    assert all(map(response_failed, ("= ", "= -", "= --5", "NameError: x")))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    build = BuildWordProblems(
        train=30, val=5, test=10, demonstrations=40, articles=20, article_tokens=160, vocab_size=600
    )
    return folder, build.run(folder)


def test_the_stage_writes_disjoint_splits_articles_and_a_tokenizer(world):
    folder, summary = world
    splits = {name: load_tasks(folder / f"{name}.parquet") for name in ("demonstrations", "train", "val", "test")}
    assert {name: len(tasks) for name, tasks in splits.items()} == {k: summary[k] for k in splits}
    questions = [task.question for tasks in splits.values() for task in tasks]
    assert len(set(questions)) == len(questions) == 85
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert [tokenizer.decode([i]) for i in tokenizer("x 23").input_ids] == ["x", " 23"]
    articles = load_trajectories(folder / "articles.parquet")
    assert len(articles) == 20 and all(len(a.response_ids) == 160 for a in articles)
    text = "".join(tokenizer.decode(a.response_ids) for a in articles)
    assert "tool_call" not in text and "print" not in text and " = " in text


def test_the_experts_turns_end_with_eos(world):
    folder, _ = world
    engine = WordExpertEngine(str(folder / "tokenizer"), [str(folder / "demonstrations.parquet")], error_rate=0.0)
    asyncio.run(engine.start())
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    task = load_tasks(folder / "demonstrations.parquet")[3]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": task.question}], add_generation_prompt=True, tokenize=False
    )
    said = asyncio.run(engine.generate(tokenizer(prompt).input_ids, SamplingParams(max_new_tokens=80)))
    assert said.token_ids[-1] == tokenizer.eos_token_id and said.finish_reason == "eos"
    assert len(said.logprobs) == len(said.token_ids)
    assert code_of(tokenizer.decode(said.token_ids)) == f"print('=', {task.metadata['formulas'][0]})"
