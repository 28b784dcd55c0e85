from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

import pytest
from transformers import AutoTokenizer

from callbacks.tracking.trajectory_log import TrajectoryLog, best_and_worst
from callbacks.tracking.trajectory_page import PageItem, render_page, token_texts
from rollout.trajectory import ActionKind, StopReason
from tests.callbacks.helpers import EvaluationData, make_call, make_learner, make_trajectory


class Page(HTMLParser):
    """What a reader sees: token spans with role and note, headings, definitions, texts of prompts and of the world that
    are no token spans, lists of ids, and anything that would be fetched."""

    VOID = {"meta", "br", "link", "img", "input"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tokens, self.headings, self.details, self.fetched, self.open = [], [], {}, [], []
        self.cells, self.turns, self.folded, self.ids, self.seen = [], [], [], [], []
        self._term, self._token, self.folded_tokens = "", False, 0
        self.feed(text)
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        self._token = "data-n" in values
        if self._token:
            self.tokens.append([values["class"], values["data-n"], ""])
        if tag in ("script", "link", "img", "iframe") or "src" in values:
            self.fetched.append(tag)
        if not values.get("href", "#").startswith("#"):
            self.fetched.append(values["href"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "details":
            self.folded_tokens = len(self.tokens)

    def handle_data(self, data):
        if not self.open:
            return
        here = self.open[-1]
        if here == "span" and "pre" in self.open and self._token:
            self.tokens[-1][2] += data
        elif here == "span" and "pre" in self.open:
            (self.folded if "details" in self.open else self.seen).append(data)
        elif here == "p" and data.startswith("ids: "):
            self.ids.append([int(number) for number in data.removeprefix("ids: ").split()])
        elif here == "b":
            self.turns.append((data, len(self.tokens)))
        elif here == "h2":
            self.headings.append(data)
        elif here == "dt":
            self._term = data
        elif here == "dd":
            self.details[self._term] = data
        elif here == "td":
            self.cells.append(data)


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return AutoTokenizer.from_pretrained(model_dir)


def written(tokenizer, text: str, **changes):
    """A trajectory whose response is real text: one turn, an observation, one turn."""
    parts = [tokenizer(p, add_special_tokens=False).input_ids for p in text.split("|")]
    first, observation, last = parts
    base = make_trajectory(
        kinds=(ActionKind.CALL, ActionKind.ANSWER), calls=(make_call(0, 'who "is" <Mira>', ("text",)),), **changes
    )
    ids = first + observation + last
    mask = [1] * len(first) + [0] * len(observation) + [1] * len(last)
    after = len(first) + len(observation)
    turns = (
        type(base.turns[0])(0, len(first), base.turns[0].action, "stop", 7, after),
        type(base.turns[0])(after, len(ids), base.turns[1].action, "stop", 7, len(ids)),
    )
    return base.replace(
        prompt_ids=tuple(tokenizer("<|im_start|>user\nWhere?").input_ids),
        response_ids=tuple(ids),
        loss_mask=tuple(mask),
        logprobs=tuple(-0.5 * m for m in mask),
        turns=turns,
    )


TEXT = "<search> Mira & Voss </search>|\n\n<information>Doc 1</information>\n|<answer> Grey <b> Harbor </answer>"


def test_page_shows_every_token_with_role_text_and_figures(tokenizer):
    trajectory = written(tokenizer, TEXT)
    length = len(trajectory.response_ids)
    signals = {"advantage": [0.5 - 0.1 * i for i in range(length)], "kl": [0.01] * length}
    html = render_page("a <title>", [PageItem(trajectory, "best: EM 1", signals)], tokenizer)
    assert "underline: advantage," in html
    page = Page(html)
    assert page.fetched == [] and page.headings == ["best: EM 1"]
    text = {role: "".join(t for r, _, t in page.tokens if r == role) for role in "pmo"}
    assert text["p"] == "<|im_start|>user\nWhere?"
    first, observation, last = TEXT.split("|")
    assert text["m"] == first + last and text["o"] == observation
    notes = [note for role, note, _ in page.tokens if role != "p"]
    assert len(notes) == length
    assert notes[0].startswith(f"id {trajectory.response_ids[0]} ")
    assert "mask 1   log-prob -0.5000   advantage +0.5   kl +0.01" in notes[0]
    silent = notes[list(trajectory.loss_mask).index(0)]
    assert "mask 0" in silent and "log-prob" not in silent
    assert page.details["gold"] == "Grey Harbor" and page.details["answer"] == "grey harbor"
    assert page.details["stop reason"] == "answer" and page.details["question"] == "Where was q1 born?"
    assert page.cells == ["1", "search", 'who "is" <Mira>', "ok", "12.5 ms", "Title 0"]


def test_tokens_name_the_weights_that_sampled_them_where_several_have(tokenizer):
    plain = make_trajectory()
    first, last = plain.turns  # four tokens each, of weights 7
    mixed = plain.replace(turns=(dataclasses.replace(first, version_runs=((6, 1), (7, 3))), last))
    pages = [render_page("t", [PageItem(t, "best")], tokenizer) for t in (plain, mixed)]
    assert ", weights 7</dd>" in pages[0] and "   weights " not in pages[0]
    assert ", weights 6 to 7</dd>" in pages[1]
    assert (pages[1].count("   weights 6"), pages[1].count("   weights 7")) == (1, 7)


def test_turns_have_the_figures_of_their_tokens_above_them(tokenizer):
    trajectory = written(tokenizer, TEXT)
    (one, two), length = trajectory.turns, len(trajectory.response_ids)
    place = range(length)
    signals = {
        "advantages": [0.1 * i for i in place],
        "opd_weights": [1.0 if i < one.end else 0.363 if i >= two.start else 0.0 for i in place],
        "kl": [(-1) ** i * (0.5 if i < one.end else 1.5) if trajectory.loss_mask[i] else 0.0 for i in place],
    }
    lines = [f"turn 1 of 2 · {one.end} tokens", f"turn 2 of 2 · {two.end - two.start} tokens"]
    starts = [len(trajectory.prompt_ids) + turn.start for turn in (one, two)]
    page = Page(render_page("t", [PageItem(trajectory, "no figures")], tokenizer))
    assert page.turns == list(zip(lines, starts, strict=True))
    page = Page(render_page("t", [PageItem(trajectory, "best", signals)], tokenizer))
    figures = ["divergence 0.5 · opd_weights 1", "divergence 1.5 · opd_weights 0.363"]
    assert page.turns == [(f"{line} · {f}", start) for line, f, start in zip(lines, figures, starts, strict=True)]


@pytest.mark.parametrize(
    ("prompt", "header"),
    [
        ("<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n"),
        ("<|endoftext|>Question: Where?", ""),
    ],
)
def test_what_the_prompt_opens_of_a_turn_stands_before_its_tokens(tokenizer, prompt, header):
    """A turn of Qwen3.5's closes the thinking that its prompt has opened."""
    trajectory = written(tokenizer, TEXT).replace(prompt_ids=tuple(tokenizer(prompt).input_ids))
    page = Page(render_page("t", [PageItem(trajectory, "best")], tokenizer))
    folded = [text for role, _, text in page.tokens[: page.folded_tokens] if role == "p"]
    assert "".join(folded) + header == prompt
    shown = page.tokens[page.folded_tokens :]
    assert "".join(text for role, _, text in shown if role == "p") == header
    assert "".join(text for _, _, text in shown) == header + TEXT.replace("|", "")


def turn_by_turn(tokenizer, reward=0.5):
    """Two turns with prompts of their own; the first is not well-formed, and is paid for."""
    one, two = (tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in ("<go> on", "<stop>"))
    base = make_trajectory(kinds=(ActionKind.CALL, ActionKind.CALL), calls=(make_call(0, "on", ()),))
    prompts = [tuple(tokenizer(f"<|im_start|>user\nroom {n} & door").input_ids) for n in (1, 2)]
    odd = dataclasses.replace(base.turns[0].action, well_formed=False, error="no <action> with its </action>")
    turns = (
        dataclasses.replace(base.turns[0], end=len(one), observation_end=len(one), prompt_ids=prompts[0], action=odd),
        dataclasses.replace(
            base.turns[1], start=len(one), end=len(one + two), observation_end=len(one + two), prompt_ids=prompts[1]
        ),
    )
    turns = (dataclasses.replace(turns[0], reward=reward), turns[1])
    changes = {"prompt_ids": prompts[0], "response_ids": one + two, "turns": turns}
    length = len(one + two)
    return base.replace(**changes, loss_mask=(1,) * length, logprobs=(-0.5,) * length), prompts


def test_turns_with_prompts_of_their_own_are_shown_one_by_one(tokenizer):
    trajectory, prompts = turn_by_turn(tokenizer)
    end, length = trajectory.turns[0].end, len(trajectory.response_ids)
    page = Page(render_page("t", [PageItem(trajectory, "best")], tokenizer))
    assert page.folded == ["<|im_start|>user\nroom 1 & door", "<|im_start|>user\nroom 2 & door"]
    assert page.ids == [list(ids) for ids in prompts]
    assert page.seen == ["shown"], "what the call of the first turn returned; the last one made none"
    assert [text for _, _, text in page.tokens] == [tokenizer.decode([i]) for i in trajectory.response_ids]
    assert {role for role, _, _ in page.tokens} == {"m"}
    odd = "invalid: no <action> with its </action>"
    assert page.turns == [
        (f"turn 1 of 2 · {end} tokens · reward 0.5 · {odd}", 0),
        (f"turn 2 of 2 · {length - end} tokens · reward 0", end),
    ]
    signals = {"advantages": [0.25] * end + [-1.0] * (length - end)}
    unpaid = PageItem(turn_by_turn(tokenizer, reward=0.0)[0], "best", signals)
    page = Page(render_page("t", [unpaid], tokenizer))
    assert [line for line, _ in page.turns] == [
        f"turn 1 of 2 · {end} tokens · advantages 0.25 · {odd}", f"turn 2 of 2 · {length - end} tokens · advantages -1",
    ]  # fmt: skip
    notes = [note for _, note, _ in page.tokens]
    assert "advantages +0.25" in notes[end - 1] and "advantages -1" in notes[end]


def test_conversations_of_a_program_are_shown_with_the_messages_between_their_turns(tokenizer):
    words = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in ("<go>", "seen & done", "<stop>")]
    ends = [len(words[0]), len(words[0] + words[1]), len(words[0] + words[1] + words[2])]
    base = make_trajectory(kinds=(ActionKind.CALL, ActionKind.CALL), calls=(make_call(0, "on", ()),))
    prompt = tuple(tokenizer("<|im_start|>user\nroom").input_ids)
    turns = (
        dataclasses.replace(base.turns[0], end=ends[0], observation_end=ends[1], prompt_ids=prompt),
        dataclasses.replace(base.turns[1], start=ends[1], end=ends[2], observation_end=ends[2], prompt_ids=None),
    )
    mask = tuple(int(not ends[0] <= i < ends[1]) for i in range(ends[2]))
    changes = {"prompt_ids": prompt, "response_ids": words[0] + words[1] + words[2], "turns": turns, "loss_mask": mask}
    trajectory = base.replace(**changes, logprobs=tuple(-0.5 * m for m in mask))
    html = render_page("t", [PageItem(trajectory, "best")], tokenizer)
    assert html.count("<details>") == 1 and "continues turn 1" in html and f"{len(prompt)} tokens" in html
    roles = [(role, text) for role, _, text in Page(html).tokens if role in "mo"]
    assert "".join(text for role, text in roles if role == "o") == "seen & done"
    assert "".join(text for role, text in roles if role == "m") == "<go><stop>"


def test_characters_split_over_tokens_appear_once_and_whole(tokenizer):
    ids = tokenizer("naïve 東京 🏠!", add_special_tokens=False).input_ids
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == "naïve 東京 🏠!"
    broken = token_texts(tokenizer, ids[:-2])  # ends inside the emoji
    assert "".join(broken).startswith("naïve 東京 ") and len(broken) == len(ids) - 2


def test_best_and_worst_do_not_overlap_and_leave_failures_out():
    rewards = [0.0, 1.0, 0.5]
    pool = [(make_trajectory(f"q{i}", reward=r), {}) for i, r in enumerate(rewards)]
    pool.append((make_trajectory("failed", stop=StopReason.INFRASTRUCTURE), {}))
    chosen = [(kind, t.group) for kind, (t, _) in best_and_worst(pool, 5)]
    assert chosen == [("best", "q1"), ("best", "q2"), ("worst", "q0")]
    assert [(k, t.group) for k, (t, _) in best_and_worst(pool, 1)] == [("best", "q1"), ("worst", "q0")]
    assert best_and_worst(pool[:1], 5)[0][0] == "best"
    assert best_and_worst([], 3) == []


def test_pages_of_evaluation_and_training(trainer_for, tmp_path, model_dir):
    module, _ = make_learner(model_dir)
    answers = ["grey harbor", "x", "grey bay", "grey harbor"]
    batches = [[make_trajectory(f"q{i}", answer=a)] for i, a in enumerate(answers)]
    probe = [[make_trajectory("probe", answer="never shown")]]
    log = TrajectoryLog(count=1, train_every=2)
    data = EvaluationData({"agent": batches, "closed_book": probe})
    trainer_for([log]).test(module, datamodule=data, verbose=False)
    (path,) = (tmp_path / "stage" / "trajectories").iterdir()
    assert path.name == "test-000000.html"
    page = Page(path.read_text())
    assert page.headings == ["best: EM 1, answer", "worst: EM 0, answer"]
    assert "never shown" not in path.read_text()

    module, data = make_learner(model_dir)
    module.last_token_values = [(t, {"advantage": [0.1] * len(t.response_ids)}) for (t,) in batches]
    trainer_for([log], max_epochs=1).fit(module, datamodule=data)
    pages = sorted(p.name for p in path.parent.iterdir())
    assert pages == ["test-000000.html", "train-000002.html", "train-000004.html"]
    assert "advantage +0.1" in (path.parent / "train-000002.html").read_text()
