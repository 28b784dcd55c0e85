"""How ``make ask`` puts a question where the data module words the prompts."""

import json

from experiments.commands.ask import asked_task, example_task


def test_an_asked_question_is_put_as_the_experiment_puts_its_own(tmp_path):
    path = tmp_path / "aime.jsonl"
    path.write_text(json.dumps({"Problem": "How many walks?", "Answer": 204}) + "\n")
    arguments = {"test_files": [f"aime24:{path}"], "prompts": "tool_reasoning", "lcb_examples": 0}
    example = example_task({"data": {"init_args": arguments}})
    ((role, content),) = asked_task("What is 2 + 2", example).prompt
    assert role == "user" and "What is 2 + 2?" in content and "walks" not in content and "\\boxed{}" in content
    assert example_task({"data": {"init_args": {"test_files": [f"aime24:{path}"]}}}).prompt == ()
