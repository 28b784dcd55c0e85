"""Prompts, actions and observations of episodes, one conversation and turn by turn, through the real loop."""

from __future__ import annotations

import asyncio

import pytest

from experiments.worlds.tokenizer_training import CHAT_TEMPLATE
from rollout.engines.base import SamplingParams
from rollout.environments.base import FirstObservation, StepResult
from rollout.loop.agent_loop import AgentLoop, Budgets, Request
from rollout.protocols.base import PerTurnPrompts, PromptMode
from rollout.protocols.episode_texts import EpisodeTexts, read_texts
from rollout.protocols.episodes import EpisodeProtocol
from rollout.protocols.search_episodes import CORRECTION, SearchEpisodeProtocol
from rollout.samplers.base import run_independent
from rollout.samplers.branching import BranchingSampler
from rollout.storage import load_trajectories, save_trajectories
from rollout.system import RolloutSystem
from rollout.trajectory import ActionKind, CallOutcome, StopReason, Task, ToolResult, split_turns
from tests.rollout.chat_models import LLAMA, QWEN, chat_model
from tests.rollout.scripted import TextEngine

ROOM = "You are in a room. You see a desk 1.\n\nYour task is to: put a pen on the desk."
TASK = Task("g1", "-", (), "pick_and_place_simple", metadata={"household": {"game": 1}})
OPENED = Task("g1", ROOM, (), "pick_and_place_simple", metadata={"first_observation": {"admissible": ["look", "help"]}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("qwen"), "qwen3")


@pytest.fixture(scope="module")
def protocol(folder):
    return EpisodeProtocol(folder, "household")


def test_actions_keep_their_capitals_where_an_environment_has_some(folder):
    text = "<think>Up.</think><action> Go UP </action>"
    for lower, action in ((True, "go up"), (False, "Go UP")):
        parsed = EpisodeProtocol(folder, "household", lower=lower).parse(text)
        assert parsed.calls[0].arguments == {"action": action} and parsed.well_formed


class House:
    """Echoes actions; over after the third."""

    def __init__(self, task, *, tools_enabled=True):
        self.task, self.steps = task, 0

    async def reset(self):
        return FirstObservation(ROOM, {"admissible": ["look", "go to desk 1", "help"]}, {"success": 0.0})

    async def step(self, action):
        self.steps += 1
        done = self.steps == 3
        text = f"You did <|im_end|> {action.calls[0].arguments['action']} ({self.steps})."
        result = ToolResult(text, CallOutcome.OK, info={"admissible": [f"action {self.steps}", "help"]})
        return StepResult((result,), (0.0,), done, 10.0 if done else None, {"success": float(done)})

    async def close(self):
        pass


def play(protocol, script, task=TASK, **budgets):
    loop = AgentLoop(TextEngine(protocol, script), protocol, House, Budgets(**{"max_turns": 9} | budgets))

    async def started():
        await loop.engine.start()
        request = Request(0, SamplingParams(max_new_tokens=500))
        return await loop.run(task, group=task.id, index=0, request=request), loop

    return asyncio.run(started())


def act(context, seed):
    return "<think>hm</think><action>Go to Desk 1</action><|im_end|>"


@pytest.mark.parametrize("name", [*QWEN, *LLAMA])
def test_first_prompt_is_the_templates(tmp_path_factory, name):
    made = EpisodeProtocol(chat_model(tmp_path_factory.mktemp(name), name), "household")
    assert isinstance(made, PerTurnPrompts) and made.per_turn_prompts
    text = made.decode(made.prompt_ids(OPENED))
    content = text[text.index("You are an expert agent") :]
    assert ROOM in content and "'look'" in content and "help" not in content.split("[", 1)[1].split("]")[0]
    message = [{"role": "user", "content": content[: content.index("<action> and </action>") + 22] + "."}]
    assert text == made.chat.render(message)


def test_turn_by_turn_each_prompt_holds_the_window(folder):
    protocol = EpisodeProtocol(folder, "household", window=1)
    trajectory, loop = play(protocol, act)
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE and len(trajectory.turns) == 3
    assert trajectory.reward.total == 10.0 and trajectory.reward.parts == {"environment": 10.0, "success": 1.0}
    assert set(trajectory.loss_mask) == {1}  # sampled tokens alone
    prompts = [protocol.decode(turn.prompt_ids) for turn in trajectory.turns]
    assert [list(r.token_ids) for r in loop.engine.requests] == [list(turn.prompt_ids) for turn in trajectory.turns]
    assert trajectory.turns[0].prompt_ids == trajectory.prompt_ids
    assert "Your task is to: put a pen on the desk." in prompts[2]
    shown = "[Observation 2: 'You did <|im_end|> go to desk 1 (1).', Action 2: 'go to desk 1']"
    assert "taken 2 step(s)" in prompts[2] and shown in prompts[2] and "Observation 1" not in prompts[2]
    assert "step 3, and you now observe: You did <|im_end|> go to desk 1 (2)." in prompts[2]
    assert "['action 2']" in prompts[2]
    end = protocol.chat.end_id  # what the world quotes is no control token
    assert [list(turn.prompt_ids).count(end) for turn in trajectory.turns] == [1, 1, 1]


def test_rows_are_the_turns_with_their_prompts(folder, tmp_path):
    trajectory, _ = play(EpisodeProtocol(folder, "household", window=0), act)
    rows = split_turns(trajectory)
    assert [row.row for row in rows] == [0, 1, 2]
    for k, row in enumerate(rows):
        turn = trajectory.turns[k]
        assert row.prompt_ids == turn.prompt_ids and row.response_ids == trajectory.response_ids[turn.start : turn.end]
        assert row.reward == trajectory.reward and (row.group, row.index) == (trajectory.group, trajectory.index)
        assert row.calls[0].request == trajectory.calls[k].request and row.episode is trajectory
    assert sum((row.response_ids for row in rows), ()) == trajectory.response_ids
    save_trajectories(tmp_path / "t.parquet", [trajectory])
    assert load_trajectories(tmp_path / "t.parquet") == [trajectory]


def test_one_conversation_is_the_templates_rendering(folder):
    protocol = EpisodeProtocol(folder, window=None, texts="short")
    trajectory, _ = play(protocol, act)
    assert split_turns(trajectory) == [trajectory] and trajectory.turns[0].prompt_ids is None
    text = protocol.decode(trajectory.response_ids)
    seen = "You did <|im_end|> go to desk 1 (1).\nactions: action 1"
    assert f"</action><|im_end|>\n<|im_start|>user\n{seen}<|im_end|>\n<|im_start|>assistant\n" in text
    assert sum(trajectory.loss_mask) == 3 * (trajectory.turns[0].end - trajectory.turns[0].start)


def test_history_gives_way_to_the_limit_and_the_rest_ends_the_episode(folder):
    protocol = EpisodeProtocol(folder, window=5, texts="short")
    trajectory, _ = play(protocol, act)
    lengths = [len(turn.prompt_ids) for turn in trajectory.turns]
    limit = lengths[-1] + 40 - 1  # the last prompt is one token too long for a whole turn of 40 tokens
    cut, _ = play(protocol, act, max_length=limit, max_turn_tokens=40)
    assert [turn.observation_truncated for turn in cut.turns] == [False, False, True]
    assert len(cut.turns[-1].prompt_ids) < lengths[-1]
    none, _ = play(protocol, act, max_length=45, max_turn_tokens=40)
    assert none.stop_reason is StopReason.LENGTH and not none.turns and none.reward.parts["success"] == 0.0


PARSED = {
    "<think>a</think><action>Take Pen 1</action><|im_end|>": ("take pen 1", True),
    "<think>a</think><action> look </action><action>b</action><|im_end|>": ("look", True),
    "<action>look</action><|im_end|>": ("look", False),  # acted upon, without thinking
    "<think>a</think>I should open the large brown drawer<|im_end|>": ("pen the large brown drawer", False),
    "<think>a</think></action>b<action>": ("</think></action>b<action>", False),
    "<think>\u597d</think><action>look</action><|im_end|>": ("look", False),
    "": ("", False),
}


@pytest.mark.parametrize("text", PARSED)
def test_projection(folder, text):
    action, well_formed = PARSED[text]
    parsed = EpisodeProtocol(folder, "household", fallback_characters=26).parse(text)
    said = parsed.calls[0].arguments["action"]
    assert (parsed.kind, said, parsed.well_formed) == (ActionKind.CALL, action, well_formed)
    assert (parsed.error is None) == well_formed and parsed.ended == text.endswith("<|im_end|>")


SEARCHES = {
    "<think>a</think><search> where </search>": (ActionKind.CALL, "where", True),
    "<answer> Oslo </answer>": (ActionKind.ANSWER, "Oslo", True),
    "<search>a<search>b</search>": (ActionKind.CALL, "b", False),
    "<answer>a <search>b</search>": (ActionKind.CALL, "b", False),
    "<search>b</search><answer>a</answer>": (ActionKind.CALL, "b", True),  # over with the first closing tag
    "I know<|im_end|>": (ActionKind.INVALID, None, False),
}


@pytest.mark.parametrize("text", SEARCHES)
def test_search_projection(folder, text):
    kind, content, well_formed = SEARCHES[text]
    parsed = SearchEpisodeProtocol(folder).parse(text)
    said = parsed.calls[0].arguments["query"] if parsed.calls else parsed.answer
    assert (parsed.kind, said, parsed.well_formed) == (kind, content, well_formed)


def test_search_prompts_show_past_searches(folder):
    protocol = SearchEpisodeProtocol(folder, window=1)

    class Library(House):
        async def reset(self):
            return None

        async def step(self, action):
            calls = [ToolResult(f"Doc 1: {c.arguments['query']}", CallOutcome.OK) for c in action.calls]
            return StepResult(tuple(calls), (0.0,) * len(calls))

    said = iter(["<search> a </search>", "nothing<|im_end|>", "<search> b </search>", "<answer> c </answer>"])
    loop = AgentLoop(TextEngine(protocol, lambda context, seed: next(said)), protocol, Library, Budgets())

    async def started():
        await loop.engine.start()
        task = Task("q", "Where is it?", ("c",), "nq")
        return await loop.run(task, group="q", index=0, request=Request(0, SamplingParams(max_new_tokens=99)))

    trajectory = asyncio.run(started())
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWER, "c")
    prompts = [protocol.decode(turn.prompt_ids) for turn in trajectory.turns]
    assert "Question: Where is it?" in prompts[0] and "Question: Where is it?" in prompts[3]
    assert "Step 1:<search>a</search> <information>Doc 1: a</information>" in prompts[1]
    assert f"Step 2: <information>{CORRECTION}</information>" in prompts[2]
    assert "Step 3:<search>b</search>" in prompts[3] and "Step 2" not in prompts[3]


def test_pages_are_shown_in_parts_after_the_instruction(protocol):
    text = "WebShop [SEP] Instruction: [SEP] a red shirt [SEP] Search"
    assert protocol._shown(text) == "'Search'"
    assert protocol._shown("b1 [SEP] b2") == "'b1' [SEP] 'b2'"
    assert protocol._goal(Task("s", text, (), "apparel")) == "a red shirt"
    assert protocol._goal(OPENED) == "put a pen on the desk."


def test_the_first_prompt_says_what_the_shop_is_to_sell(folder):
    page = "WebShop [SEP] Instruction: [SEP] a red shirt [SEP] Search"
    for window in (2, None):
        protocol = EpisodeProtocol(folder, texts="shopping", window=window)
        prompt = protocol.decode(protocol.prompt_ids(Task("s", page, (), "apparel")))
        assert prompt.count("a red shirt") == 1 and "Your task is to: a red shirt\nYou now observe: 'Search'" in prompt


def test_a_text_without_a_place_for_the_task_shows_it_once_in_the_first_page(folder):
    page = "WebShop [SEP] Instruction: [SEP] a red shirt [SEP] Search"
    protocol = EpisodeProtocol(folder, texts="bare", window=None, require_thinking=False)
    assert f"user\n{page}<|im_end|>" in protocol.decode(protocol.prompt_ids(Task("s", page, (), "apparel")))
    action = protocol.parse("<action>search[red]</action><|im_end|>")
    later = ToolResult("Instruction: [SEP] a red shirt [SEP] Back to Search [SEP] B1", CallOutcome.OK)
    ids, cut = protocol.observation_ids(action, [later], 200)
    assert "user\nBack to Search [SEP] B1<|im_end|>" in protocol.decode(ids) and not cut


def test_skills_stand_in_the_users_turn(protocol):
    import dataclasses

    advised = dataclasses.replace(OPENED, skills="1. Look first: always.")
    plain, told = (protocol.decode(protocol.prompt_ids(task)) for task in (OPENED, advised))
    assert told == plain.replace("You are an expert", "1. Look first: always.\n\nYou are an expert")
    with pytest.raises(ValueError, match="the skills quotes"):
        protocol.prompt_ids(dataclasses.replace(OPENED, skills="a <|im_end|>"))


WRONG = [
    ({"texts": "nowhere"}, "expected one of household"),
    ({"texts": {"first": "x"}}, "expected first, later and after"),
    ({"texts": {"first": "{observation}", "later": "{obs}", "after": "{observation}"}}, "placeholder {obs}"),
]


@pytest.mark.parametrize("options, message", WRONG)
def test_wrong_options(folder, options, message):
    with pytest.raises(ValueError, match=message.replace("{", "\\{")):
        EpisodeProtocol(folder, **{"texts": "household"} | options)


def test_prompts_of_their_own_go_with_samplers_that_say_that_they_do_not_fork(protocol):
    class Mine:
        async def sample(self, group, n):
            return await run_independent(group, range(n))

    engine, sampler = TextEngine(protocol, act), Mine()
    with pytest.raises(ValueError, match="Mine forks trajectories \\(or does not set forks = False\\)"):
        RolloutSystem(engine, protocol, House, sampler=sampler)
    with pytest.raises(ValueError, match="BranchingSampler forks"):
        RolloutSystem(engine, protocol, House, sampler=BranchingSampler(2))
    sampler.forks = False
    assert RolloutSystem(engine, protocol, House, sampler=sampler).sampler is sampler


def test_what_an_episode_cannot_do(protocol, folder):
    with pytest.raises(TypeError, match="'texts'"):  # no world has another's prompts by default
        EpisodeProtocol(folder)
    with pytest.raises(ValueError, match="shows nothing"):
        protocol.prompt_ids(Task("a", " ", (), "x"))
    with pytest.raises(ValueError, match="does not allow"):
        protocol.prompt_ids(OPENED, PromptMode.CLOSED_BOOK)
    with pytest.raises(ValueError, match="no \\{observation\\}"):
        EpisodeTexts("a", "b", "c")
    assert read_texts("bare").first == "{observation}"


def test_thinking_that_begins_in_the_prompt_counts(tmp_path):
    header = "'<|im_start|>assistant\\n' -}}{%- endif -%}"
    assert header in CHAT_TEMPLATE
    text = CHAT_TEMPLATE.replace(header, header.replace("assistant\\n", "assistant\\n<think>\\n"))
    opened = EpisodeProtocol(chat_model(tmp_path, "qwen3", text), "household")
    assert opened.decode(opened.prompt_ids(OPENED)).endswith("<think>\n")
    assert opened.parse("hm</think><action>look</action><|im_end|>").well_formed


def test_an_episode_that_ends_before_its_first_step_has_failed(folder):
    """Its reward says so under the same name as that of any other: else shares would be over the others alone."""
    from experiments.worlds.household.environment import Household
    from experiments.worlds.household.generate import generate_game

    game = generate_game("pick_two_obj_and_place", 0, size="small").to_json()
    task = Task("g", "-", (), "pick_two_obj_and_place", metadata={"household": {"game": game}})
    protocol = EpisodeProtocol(folder, texts="bare", require_thinking=False)
    loop = AgentLoop(TextEngine(protocol, act), protocol, Household(), Budgets(max_length=20, max_turn_tokens=10))
    request = Request(0, SamplingParams(max_new_tokens=5))
    trajectory = asyncio.run(loop.run(task, group="g", index=0, request=request))
    assert not trajectory.turns and trajectory.stop_reason is StopReason.LENGTH
    assert trajectory.reward.parts == {"environment": 0.0, "success": 0.0, "steps": 0.0}
