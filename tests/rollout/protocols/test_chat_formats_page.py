"""docs/chat_formats.md says what the protocol does with each family of templates."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from rollout.protocols.call_formats import SYSTEM
from rollout.protocols.call_readers import HARMONY, NATIVE
from rollout.protocols.hermes import HermesProtocol
from tests.rollout.protocols.test_published_templates import (
    EXPECTED,
    FAMILIES,
    PUBLISHED,
    TOOL,
    chat_folder,
    template,
)

PAGE = (Path(__file__).parents[3] / "docs/chat_formats.md").read_text(encoding="utf-8")
COLUMNS = 7
# The families that people train most, by the names of the page's rows.
LISTED = {
    "Qwen2.5": ("Qwen2.5",),
    "Qwen3": ("Qwen3", "Qwen3-2507"),
    "Qwen3.5 and 3.6": ("Qwen3.5", "Qwen3.6"),
    "Qwen3-Coder": ("Qwen3-Coder",),
    "Llama 3": ("Llama 3.1", "Llama 3.2", "Llama 3.3"),
    "Llama 4": ("Llama 4",),
    "SmolLM2": ("SmolLM2",),
    "SmolLM3": ("SmolLM3",),
    "Gemma 3": ("Gemma 3",),
    "Phi-4": ("Phi-4", "Phi-4-mini"),
    "Mistral": ("Mistral Nemo", "Mistral Small 3.2", "Ministral 3", "Devstral"),
    "Granite": ("Granite 3.3", "Granite 4.0", "Granite 4.1"),
    "GLM-4.5": ("GLM-4.5",),
    "gpt-oss": ("gpt-oss",),
}
REASONS = (
    r"\w+ loses [\w, ]+",
    "shows no end of the assistant's turn that is a stop token",
    "calls that are not read back",
)


@cache
def rows() -> dict[str, list[str]]:
    """The cells of each family, without its name."""
    lines = [re.split(r"\s*\|\s*", line.strip("| ")) for line in PAGE.splitlines() if line.startswith("|")]
    tables = [cells for cells in lines if len(cells) == COLUMNS and cells[0] != "family" and cells[0].strip("-")]
    families = [(family, cells[1:]) for cells in tables for family in cells[0].split(", ")]
    assert len(dict(families)) == len(families), "a family has two rows"
    return dict(families)


def form_only(family: str) -> bool:
    return all(name.startswith("form/") for name in FAMILIES[family].templates)


def refusal(family: str, folder: Path, **options) -> str | None:
    model = chat_folder(folder, template(FAMILIES[family].templates[0]), FAMILIES[family])
    try:
        HermesProtocol(model, tools=[TOOL], **options)
    except ValueError as refused:
        return str(refused).replace(model, "google/gemma-4-31B-it")
    return None


def row_of(name: str, family: str, folder: Path) -> list[str]:
    """What the protocol does with one template."""
    form = "; form only" if form_only(family) else ""
    try:
        model = chat_folder(folder, template(name), FAMILIES[family])
        protocol = HermesProtocol(model, tools=[TOOL], max_parallel_calls=None)
    except ValueError as refused:
        reason = next(found[0] for pattern in REASONS if (found := re.search(pattern, str(refused))))
        assert refusal(family, folder, tools_in="system") is None
        return ["-"] * 5 + [f"refused: {reason}; runs with `tools_in: system`{form}"]
    opening = protocol.chat.thinking_tags[0]
    thinking = f"`{opening}`" if opening in protocol.tokenizer.chat_template else "-"
    outcome = "accepted"
    if protocol.tools_in == "system":
        shows = "does not show the tools" not in str(refusal(family, folder, tools_in="template"))
        outcome += f" in our format: the template {'writes no calls' if shows else 'shows no tools'}"
    return [
        f"`{protocol.call_format}`",
        "ours" if protocol.call_format in NATIVE else "vLLM's",
        "`analysis` channel" if protocol.call_format == HARMONY else thinking,
        protocol.tools_in,
        "yes" if protocol.max_parallel_calls > 1 else "no",
        outcome + form,
    ]


def test_the_page_has_every_family_and_says_what_the_tests_expect():
    assert set(rows()) == set(FAMILIES)
    for family, (call_format, _, _, tools_in, _, outcome) in rows().items():
        expected = {EXPECTED.get(name, "- -") for name in FAMILIES[family].templates}
        assert expected == {f"{tools_in} {call_format.strip('`')}"}, family
        assert outcome.startswith("refused" if call_format == "-" else "accepted"), family
        assert ("form only" in outcome) == form_only(family), family


def test_the_page_counts_the_listed_families():
    outcomes = {family: [rows()[name][-1] for name in names] for family, names in LISTED.items()}
    accepted = {family for family, found in outcomes.items() if all(text.startswith("accepted") for text in found)}
    form = {family for family in accepted if any("form only" in text for text in outcomes[family])}
    ours = {family for family in accepted if all("in our format" in text for text in outcomes[family])}
    published = accepted - form
    assert (
        f"Of {len(LISTED)} families that people train most, {len(accepted)} are accepted: {len(published)} on their "
        f"published template and {len(form)} on a template of our own making in their form"
    ) in " ".join(PAGE.split())
    assert (
        f"{len(published - ours)} of the {len(published)} call tools in their own format; "
        f"{' and '.join(sorted(published & ours, key=list(LISTED).index))} do so in ours"
    ) in " ".join(PAGE.split())


def test_the_page_shows_the_system_text():
    assert all(text.strip() in PAGE for text in SYSTEM)


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no .templates here (make templates)")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_protocol_does_what_the_row_says(family, tmp_path):
    for name in FAMILIES[family].templates:
        assert row_of(name, family, tmp_path) == rows()[family], name


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no .templates here (make templates)")
def test_the_page_quotes_a_real_refusal(tmp_path):
    assert str(refusal("Gemma 4", tmp_path)) in PAGE
