import dataclasses
import json
import logging
from contextlib import ExitStack, closing

import polars as pl
import pytest

from data_modules.datasets.files import DatasetError
from data_modules.evaluation_data import EvaluationData
from data_modules.loading.question_loading import QuestionLoading, short_enough
from data_modules.rollout_data_module import RolloutDataModule
from rollout.environments.question_answering import QuestionAnswering
from rollout.loop.agent_loop import Budgets, FirstPrompts
from rollout.protocols.arpo_tags import ARPOProtocol
from rollout.protocols.episodes import EpisodeProtocol
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.rewards.qa import ExactMatchReward
from rollout.skills.injection import Skills
from rollout.skills.retrieval import Full
from rollout.system import RolloutSystem
from rollout.tools.search import SearchTool
from tests.data_modules.toys import Recorder, make_task, trainer
from tests.rollout.scripted import ToyRetriever
from tests.rollout.scripted_engine import ScriptedEngine


def loaded(loading, file, limit=None, *rest):
    return loading.select(loading.read([file]), file, limit, *rest)


@pytest.fixture(scope="session")
def shows_prompts(model_dir):
    return SearchR1Protocol(str(model_dir), template="dataset")


@pytest.fixture
def files(tmp_path):
    """(RL file of four problems in two data sources, the second of each long; AIME file as name:path)"""
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"What is {i}?" + " and so on" * 300 * i}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(i), "style": "rule"},
            "extra_info": {"index": i},
        }
        for source in ("train-math-one", "train-math-two")
        for i in range(2)
    ]
    pl.DataFrame(rows).write_parquet(tmp_path / "rl.parquet")
    aime = [{"Problem": "How many?" + " Really?" * 300 * i, "Answer": "7"} for i in range(2)]
    (tmp_path / "aime.jsonl").write_text("".join(json.dumps(row) + "\n" for row in aime))
    return str(tmp_path / "rl.parquet"), f"aime24:{tmp_path}/aime.jsonl"


@pytest.fixture
def system(shows_prompts):
    engine = ScriptedEngine(lambda ids, sampling: "<answer> 0 </answer>", shows_prompts.tokenizer, 0.0)
    environment = QuestionAnswering({"search": SearchTool(ToyRetriever())})
    system = RolloutSystem(engine, shows_prompts, environment, ExactMatchReward())
    yield system
    system.close()


def test_length_is_that_of_the_prompt_as_the_protocol_writes_it(shows_prompts, files, caplog):
    tasks = loaded(QuestionLoading(shows_prompts), files[0])
    lengths = [len(shows_prompts.prompt_ids(task)) for task in tasks]
    assert lengths[0] < lengths[1]
    writer = FirstPrompts(shows_prompts, Budgets())
    assert short_enough(tasks, writer, max(lengths), None, "here") == tasks
    assert not caplog.text
    assert short_enough(tasks, writer, lengths[0], None, "here") == [tasks[0], tasks[2]]
    assert "here is" in caplog.text and "2 of 4 questions with longer prompts" in caplog.text
    assert "train-math-one 1 of 2, train-math-two 1 of 2 (id train-math-one_1, train-math-two_1)" in caplog.text
    message = f"here is {lengths[0] - 1}, but the shortest of 4 prompts has {lengths[0]} tokens"
    with pytest.raises(DatasetError, match=message):
        short_enough(tasks, writer, lengths[0] - 1, None, "here")


def test_what_stands_around_the_question_is_counted(model_dir):
    """Of a protocol whose system text is long a short question is long: so are tool schemas."""
    task = make_task(0)
    plain, instructed = (
        FirstPrompts(ARPOProtocol(str(model_dir), system=system), Budgets()) for system in ("none", "arpo")
    )
    limit = len(plain.prompt_ids(task))
    assert short_enough([task], plain, limit, None, "here") == [task]
    with pytest.raises(DatasetError, match="the shortest of 1 prompts"):
        short_enough([task], instructed, limit, None, "here")


def test_at_most_so_many_are_taken_of_those_that_are_short_enough(shows_prompts, files):
    loading, writer = QuestionLoading(shows_prompts), FirstPrompts(shows_prompts, Budgets())
    limit = max(len(shows_prompts.prompt_ids(t)) for t in loaded(loading, files[0])[::2])
    assert [t.id for t in loaded(loading, files[0], 2, writer, limit)] == ["train-math-one_0", "train-math-two_0"]


def test_prompts_of_the_tasks_reach_the_engine_in_training_and_test(system, files, tmp_path):
    data = RolloutDataModule(
        system, [files[0]], prompts_per_iteration=2, test_files=[files[1]], seed=1, prompts="tool_reasoning",
        max_prompt_tokens=1000, max_eval_prompt_tokens=1000,
    )  # fmt: skip
    module, runner = Recorder(), trainer(tmp_path, max_epochs=1)
    runner.fit(module, datamodule=data)
    assert sorted(t.task.question for batch in module.train_batches for t in batch) == ["What is 0?", "What is 0?"]
    runner.test(module, datamodule=data)
    ((_, tested),) = module.test_batches
    assert [t.task.question for t in tested] == ["How many?"]
    for trajectory in [*module.train_batches[0], *tested]:
        shown = system.protocol.decode(trajectory.prompt_ids)
        assert trajectory.task.prompt[0][1] in shown and "in \\boxed{}" in shown


@pytest.fixture
def long_system(model_dir):
    """``long_system(**options)``: a system that is closed after the test."""
    with ExitStack() as made:

        def make(**options):
            protocol = SearchR1Protocol(str(model_dir), template="dataset")
            engine = ScriptedEngine(lambda ids, sampling: "<answer> 0 </answer>", protocol.tokenizer, 0.0)
            environment = QuestionAnswering({"search": SearchTool(ToyRetriever())})
            system = RolloutSystem(engine, protocol, environment, ExactMatchReward(), **options)
            return made.enter_context(closing(system))

        yield make


def test_prompts_that_leave_no_room_are_left_out_by_default(long_system, model_dir, files, caplog, tmp_path):
    """And nothing else is: the longest prompt that leaves room for one token stays."""
    (short, long) = sorted({len(p) for p in prompts_of(model_dir, files[0])})
    for max_length, left in ((long, 2), (long + 1, 4), (short + 1, 2), (None, 4)):
        caplog.clear()
        system = long_system(max_length=max_length)
        data = RolloutDataModule(system, [files[0]], prompts_per_iteration=2, seed=1, group_size=2)
        module = Recorder(push=False)
        trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
        assert len(data.training_questions) == left, max_length
        assert all(any(t.loss_mask) for batch in module.train_batches for t in batch)
        told = f"rl.parquet: max_prompt_tokens is {(max_length or 1) - 1} (what max_length leaves): 2 of 4 questions"
        assert (told in caplog.text) == (left == 2)
        assert ("(id train-math-one_1, train-math-two_1)" in caplog.text) == (left == 2)
    system = long_system(max_length=short)
    with pytest.raises(DatasetError, match=f"is {short - 1} .*, but the shortest of 4 prompts has {short} tokens"):
        RolloutDataModule(system, [files[0]], prompts_per_iteration=2).setup("fit")


def prompts_of(model_dir, file):
    protocol = SearchR1Protocol(str(model_dir), template="dataset")
    return [protocol.prompt_ids(task) for task in loaded(QuestionLoading(protocol), file)]


def test_skills_and_whole_turns_count_where_prompts_have_them(long_system, model_dir, files):
    short = min(len(p) for p in prompts_of(model_dir, files[0]))
    skills = Skills("search", Full(), max_tokens=100_000)
    advised = long_system(skills=skills).first_prompts()
    plain = long_system(skills=skills).first_prompts(inject_skills=False)
    task = loaded(QuestionLoading(None), files[0], 1)[0]
    grown = len(advised.prompt_ids(task))
    assert len(plain.prompt_ids(task)) == short < grown
    for max_length, fits in ((grown, False), (grown + 1, True)):
        system = long_system(skills=skills, max_length=max_length)
        data = RolloutDataModule(system, [files[0]], prompts_per_iteration=1, max_train=1)
        if fits:
            loaded(data.questions, files[0], None, system.first_prompts())
        else:
            with pytest.raises(DatasetError, match=f"the shortest of 4 prompts has {grown} tokens"):
                loaded(data.questions, files[0], None, system.first_prompts())
    windowed = FirstPrompts(EpisodeProtocol(str(model_dir), "short"), Budgets(max_length=300, max_turn_tokens=100))
    assert windowed.longest == 200 and FirstPrompts(plain.protocol, windowed.budgets).longest == 299


def test_an_evaluation_keeps_what_it_cannot_ask_and_says_so(long_system, model_dir, files, caplog):
    lengths = sorted(len(p) for p in prompts_of(model_dir, files[0]))
    system = long_system(max_length=lengths[-1])
    data = EvaluationData(system, val_files=[files[0]], test_files=[files[0]])
    data.setup("validate")
    assert len(data.val_dataloader()[0].tasks) == 4
    assert "2 of 4 questions count as unanswered" in caplog.text and "(id train-math-one_1, train-" in caplog.text
    system = long_system(max_length=lengths[0])
    with pytest.raises(DatasetError, match=f"leaves {lengths[0] - 1} tokens for a prompt, but the shortest of 4"):
        EvaluationData(system, val_files=[files[0]]).setup("validate")


def test_short_questions_are_not_tokenised(shows_prompts, monkeypatch):
    tasks = [make_task(number) for number in range(50)]
    long = dataclasses.replace(tasks[7], question="word " * 500)
    tasks[7] = long
    written = []
    writer = FirstPrompts(SearchR1Protocol(shows_prompts.tokenizer.name_or_path), Budgets(max_length=1000))
    monkeypatch.setattr(
        type(writer.protocol), "prompt_ids",
        lambda self, task, mode=None, own=SearchR1Protocol.prompt_ids: written.append(task) or own(self, task),
    )  # fmt: skip
    assert [t.id for t in short_enough(tasks, writer, None, writer.longest, "here")] == [
        task.id for task in tasks if task is not long
    ]
    assert len(written) == 2 and written[1] is long


def test_no_question_left_is_an_error_that_names_the_option(system, files):
    data = RolloutDataModule(system, [files[0]], prompts_per_iteration=1, seed=1, max_prompt_tokens=3)
    with pytest.raises(DatasetError, match="rl.parquet: max_prompt_tokens is 3, but the shortest of 4 prompts"):
        data.setup("fit")
    data = EvaluationData(system, val_files=[files[1]], prompts="tool_reasoning", max_eval_prompt_tokens=3)
    with pytest.raises(DatasetError, match="aime.jsonl: max_eval_prompt_tokens is 3, but the shortest of 2"):
        data.setup("validate")


def test_a_saved_position_knows_which_questions_were_left_out_and_how_they_were_put(system, files, caplog):
    caplog.set_level(logging.ERROR)

    def state(**options):
        data = RolloutDataModule(system, [files[0]], prompts_per_iteration=1, seed=1, **options)
        data.setup("fit")
        return data.state_dict()["train"]["data"]

    plain = state()
    assert plain == state(max_prompt_tokens=10**6) == state(lcb_examples=1)
    assert len({plain, state(max_prompt_tokens=1000), state(prompts="tool_reasoning")}) == 3


@pytest.fixture
def mixed(tmp_path):
    """Six rows: a sum, one without an answer, a choice, a choice without a letter, a program, one without tests."""
    truths = ["4", " ", "B", "the second", '{"inputs": ["1"], "outputs": ["1"]}', "4"]
    abilities = ["math", "math", "choice", "choice", "code", "code"]
    rows = [
        {
            "data_source": ability,
            "prompt": [{"role": "user", "content": f"What is {i}?"}],
            "ability": ability,
            "reward_model": {"ground_truth": truth, "style": "rule"},
            "extra_info": {"index": i},
        }
        for i, (ability, truth) in enumerate(zip(abilities, truths, strict=True))
    ]
    pl.DataFrame(rows).write_parquet(tmp_path / "mixed.parquet")
    return str(tmp_path / "mixed.parquet")


def test_faulty_rows_stop_the_run_or_are_left_out(system, mixed, caplog):
    def questions(**options):
        data = RolloutDataModule(system, [mixed], prompts_per_iteration=1, seed=1, **options)
        data.setup("fit")
        return sorted(t.id for iteration in range(data.iterations_per_pass) for t in data.prompts(iteration))

    with pytest.raises(DatasetError, match="3 of 6 rows are invalid.*with on_invalid_row: drop"):
        questions()
    assert questions(on_invalid_row="drop") == ["choice_2", "code_4", "math_0"]
    assert "3 of 6 rows are left out" in caplog.text and "1 with no gold answer: row 1" in caplog.text
    caplog.clear()
    assert questions(on_invalid_row="drop", abilities=["math", "choice"]) == ["choice_2", "math_0"]
    assert "1 of 3 questions are left out (in all: choice 1, code 1, math 1)" in caplog.text
    message = r"abilities is \[qa\], but no question has one of them; those .* are: choice 1, code 1, math 1"
    with pytest.raises(DatasetError, match=message):
        questions(on_invalid_row="drop", abilities=["qa"])
    data = EvaluationData(system, val_files=[mixed], on_invalid_row="drop")
    data.setup("validate")
    assert len(data.val_dataloader()[0].tasks) == 3


@pytest.mark.parametrize("wrong", [{"abilities": []}])
def test_choices_of_rows_that_cannot_be(system, files, wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is .*; expected "):
        RolloutDataModule(system, [files[0]], prompts_per_iteration=1, **wrong)
