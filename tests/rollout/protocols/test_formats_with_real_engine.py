"""Three chat formats through a real engine: tiny models that were trained to search once and then to answer."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout.engines.base import SamplingParams
from rollout.engines.vllm_engine import VLLMEngine
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.hermes import HermesProtocol
from rollout.rewards.qa import ExactMatchReward
from rollout.system import RolloutSystem
from rollout.tokenizer import encode
from rollout.tools.schemas import SCHEMAS
from rollout.tools.search import SearchTool
from rollout.trajectory import ActionKind, StopReason, ToolRequest, Trajectory
from tests.rollout.protocols.test_published_templates import CASES, PUBLISHED, chat_folder, template
from tests.rollout.scripted import TASK, ToyRetriever

pytestmark = pytest.mark.slow

VOCABULARY = 448  # of all models, so that one engine takes the weights of each
CALL = ToolRequest("search", {"query": "Mira Voss"})
THOUGHTS = ("I look it up.", "The first passage says it.")
ANSWER = "\\boxed{Grey Harbor}"
# A turn of each format around a call or an answer, and the field of a message in which the template takes thinking.
FORMATS = {
    "llama/Qwen3.5-4B": ("{thought}\n</think>{call}", "{thought}\n</think>\n\n{answer}<|im_end|>", "reasoning_content"),
    "trl/gptoss": (
        "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{call}",
        "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{answer}<|return|>",
        "thinking",
    ),
    "form/smollm2": ("{call}", "{answer}<|im_end|>", None),
}


class RecordedEngine(VLLMEngine):
    """Keeps what it was given and what it sampled; stays open when a system that uses it is closed."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, max_length=1280, kv_cache_bytes=32 << 20)
        self.record: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def generate(self, token_ids, sampling):
        generation = await super().generate(token_ids, sampling)
        self.record.append((tuple(token_ids), generation.token_ids))
        return generation

    async def close(self):
        pass


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One engine for all formats. Every model is pushed into it, as a trainer's weights are."""
    folder = chat_folder(tmp_path_factory.mktemp("engine"), template("form/smollm2"), CASES["form/smollm2"])
    tiny_model(HermesProtocol(folder, tools=["search"])).save_pretrained(folder)
    engine = RecordedEngine(folder)
    yield engine
    asyncio.run(VLLMEngine.close(engine))


def tiny_model(protocol: HermesProtocol) -> Qwen3ForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
                eos_token_id=protocol.tokenizer.eos_token_id,
            )
        )  # fmt: skip


def turns_of(protocol: HermesProtocol, name: str) -> tuple[str, str]:
    """The turn that searches and the turn that answers, as this model writes them."""
    calling, answering, _ = FORMATS[name]
    call = protocol.chat.written_call([CALL], [SCHEMAS["search"]]).rpartition("</think>")[2] + protocol.chat.call_end
    first, second = THOUGHTS
    return calling.format(thought=first, call=call), answering.format(thought=second, answer=ANSWER)


def trained(protocol: HermesProtocol, name: str) -> Qwen3ForCausalLM:
    """A model that writes ``turns_of`` by heart, after the prompt and after the tool's result."""
    calling, answering = (encode(protocol.tokenizer, text) for text in turns_of(protocol, name))
    result = asyncio.run(SearchTool(ToyRetriever()).call(CALL.arguments))
    observation, _ = protocol.observation_ids(protocol.parse(protocol.decode(calling)), [result], 500)
    prompt = protocol.prompt_ids(TASK)
    ids = torch.tensor([prompt + calling + observation + answering])
    labels = torch.tensor([[-100] * len(prompt) + calling + [-100] * len(observation) + answering])
    model, learnt = tiny_model(protocol), labels[0, 1:] >= 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(1000):
        optimizer.zero_grad()
        output = model(input_ids=ids, labels=labels)
        output.loss.backward()
        optimizer.step()
        best = output.logits[0, :-1].softmax(-1).gather(1, ids[0, 1:, None])[learnt].min()
        if best > 0.9:
            return model.eval()
    pytest.fail("the model has not learnt its turns")


def rolled_out(engine: VLLMEngine, protocol: HermesProtocol, model: Qwen3ForCausalLM) -> Trajectory:
    environment = QuestionAnswering({"search": SearchTool(ToyRetriever())})
    system = RolloutSystem(engine, protocol, environment, ExactMatchReward(), max_turn_tokens=100)
    try:
        system.load_weights(model.state_dict().items(), version=1, checksum=True)
        [trajectory] = system.rollout([TASK], sampling=SamplingParams(100, temperature=0.0), seed=0)
    finally:
        system.close()
    return trajectory


def as_template_writes(protocol: HermesProtocol, name: str, result: str) -> list[int]:
    """The ids of the conversation up to the second turn, rendered at once."""
    field = FORMATS[name][2]
    called = {"type": "function", "function": {"name": CALL.name, "arguments": CALL.arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [called]} | ({field: THOUGHTS[0]} if field else {})
    messages = [{"role": "user", "content": TASK.question}, said, {"role": "tool", "content": result}]
    text = protocol.tokenizer.apply_chat_template(
        messages, tools=[SCHEMAS["search"]], add_generation_prompt=True, tokenize=False
    )
    return encode(protocol.tokenizer, text)


@pytest.mark.parametrize("name", FORMATS)
def test_a_trained_model_calls_a_tool_and_answers(engine, name, tmp_path):
    if not name.startswith("form/") and not PUBLISHED.is_dir():
        pytest.skip("no .templates here (make templates)")
    protocol = HermesProtocol(chat_folder(tmp_path, template(name), CASES[name]), tools=["search"])
    engine.record.clear()
    trajectory = rolled_out(engine, protocol, trained(protocol, name))

    first, last = trajectory.turns
    assert (first.action.kind, first.action.calls) == (ActionKind.CALL, (CALL,))
    assert (last.action.kind, last.action.answer) == (ActionKind.ANSWER, "Grey Harbor")
    assert trajectory.stop_reason is StopReason.ANSWER and trajectory.reward is not None
    assert trajectory.reward.total == 1.0
    [call] = trajectory.calls
    assert call.executed and [document.title for document in call.result.documents] == ["Mira Voss", "Mira Vass"]

    prompt, response = trajectory.prompt_ids, trajectory.response_ids
    until_second_turn = [*prompt, *response[: first.observation_end]]
    assert until_second_turn == as_template_writes(protocol, name, call.result.text.strip())
    sampled = [0] * len(response)
    for turn, text, (given, generated) in zip(trajectory.turns, turns_of(protocol, name), engine.record, strict=True):
        assert given == prompt + response[: turn.start]
        assert generated == response[turn.start : turn.end]
        assert protocol.decode(generated) == text
        sampled[turn.start : turn.end] = [1] * len(generated)
    assert list(trajectory.loss_mask) == sampled
