"""Everything that asks the outside is built from YAML, and no key comes into the configuration."""

from jsonargparse import ArgumentParser

from rollout.environments.question_answering import QuestionAnswering
from rollout.rewards.judge import Judge
from rollout.tools.web.browse import BrowsingSearch
from rollout.tools.web.web_search import BrightDataSearch

THINKING_OFF = "{chat_template_kwargs: {enable_thinking: false}}"
SUMMARISER = f"{{urls: ['http://127.0.0.1:8004/v1'], model: Qwen3-8B, extra: {THINKING_OFF}}}"
CONFIG = f"""
environment:
  max_calls: 6
  tools:
    search:
      class_path: rollout.tools.web.browse.BrowsingSearch
      init_args:
        search:
          class_path: rollout.tools.web.web_search.BrightDataSearch
          init_args: {{max_results: 5, cache: CACHE, needs_links: true}}
        summariser: {SUMMARISER}
        fetcher: {{timeout: 10}}
judge:
  client: {{urls: ['http://127.0.0.1:8001/v1'], model: Qwen2.5-72B-Instruct, api_key_variable: JUDGE_KEY}}
  max_tokens: 16
"""


def parser():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(QuestionAnswering, "environment")
    parser.add_class_arguments(Judge, "judge")
    return parser


def test_from_yaml(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret-of-the-judge")
    monkeypatch.setenv("BRIGHT_DATA_API_KEY", "s3cret-of-the-search")
    p = parser()
    config = p.parse_string(CONFIG.replace("CACHE", str(tmp_path / "cache.sqlite")))
    made = p.instantiate(config)
    environment, judge = made["environment"], made["judge"]
    browsing = environment.tools["search"].tool
    assert isinstance(browsing, BrowsingSearch) and isinstance(browsing.search, BrightDataSearch)
    assert (environment.max_calls, browsing.fetcher.timeout, browsing.search.needs_links) == (6, 10, True)
    assert browsing.summariser.extra == {"chat_template_kwargs": {"enable_thinking": False}}
    assert (judge.client.model, judge.max_tokens) == ("Qwen2.5-72B-Instruct", 16)
    assert "s3cret" not in p.dump(config)
