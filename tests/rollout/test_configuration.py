"""The rollout half is built from YAML: jsonargparse accepts every part behind its seam, and names what it does not."""

import pytest
from jsonargparse import ArgumentParser

from rollout.environments.question_answering import QuestionAnswering
from rollout.rewards.qa import ExactMatchReward
from rollout.system import RolloutSystem
from rollout.tools.limits import ToolLimits

CONFIG = """
system:
  engine:
    class_path: rollout.engines.vllm_engine.VLLMEngine
    init_args: {{model: {model}, max_length: 321}}
  protocol:
    class_path: rollout.protocols.search_r1.SearchR1Protocol
    init_args: {{tokenizer: {model}, template: short}}
  environment:
    class_path: rollout.environments.question_answering.QuestionAnswering
    init_args:
      tools:
        search:
          class_path: rollout.tools.search.SearchTool
          init_args: {{retriever: {retriever}, topk: 2}}
      limits: {{timeout_s: 5.0, cache_size: 10}}
  reward: {{class_path: rollout.rewards.qa.ExactMatchReward, init_args: {{format_score: 0.1}}}}
  sampler: rollout.samplers.base.IndependentSampler
  max_turns: 3
"""
CLIENT = "{class_path: retrieval.client.RetrieverClient, init_args: {urls: ['http://127.0.0.1:1']}}"
PROCESS = "{class_path: retrieval.process.RetrieverProcess, init_args: {index: some/folder}}"


def parser():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RolloutSystem, "system")
    return parser


@pytest.mark.parametrize("retriever", [CLIENT, PROCESS])
def test_a_system_from_yaml(model_dir, retriever):
    p = parser()
    system = p.instantiate(p.parse_string(CONFIG.format(model=model_dir, retriever=retriever)))["system"]
    assert isinstance(system, RolloutSystem) and isinstance(system.environment, QuestionAnswering)
    assert isinstance(system.reward, ExactMatchReward) and system.budgets.max_turns == 3
    assert system.budgets.max_length == 321  # the engine's
    assert system.environment.tools["search"].limits == ToolLimits(timeout_s=5.0, cache_size=10)


ARPO = "{class_path: rollout.samplers.branching.BranchingSampler, init_args: {initial_rollouts: 8, variant: lock_step}}"
AEPO = (
    "{class_path: rollout.samplers.branching.AEPOSampler, init_args: {initial_rollouts: 8, consecutive_penalty: 0.1}}"
)
