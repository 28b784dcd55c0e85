"""The counts of files come from real runs, here with the shortest inputs."""

from benchmarks.files_touched import Call, calculates, reached, returns, value_is_used
from experiments.registry.project import ROOT

SHORT = [
    "--stages.smoke_world.task.articles=16",
    "--stages.smoke_world.task.demonstrations=48",
    "--stages.smoke_sft.trainer.max_epochs=1",
]


def call(file, name, caller_file="", caller="", line=0):
    return Call(0, file, name, caller_file, caller, line)


def test_a_return_is_a_change_to_a_folder_that_was_left():
    assert returns(["a/x.py", "a/y.py", "b/z.py", "a/w.py", "a/x.py", "c/v.py"]) == 1


def test_functions_called_while_a_module_is_imported_are_not_reached():
    calls = [call("a.py", "main"), call("b.py", "f", "a.py", "main"), call("c.py", "g", "c.py", "<module>")]
    assert [c.file for c in reached(calls, [("a.py", "main")])] == ["a.py", "b.py"]


def test_logging_and_bookkeeping_are_no_part_of_a_loss():
    file = "lightning_modules/algorithms/grpo.py"
    lines = (ROOT / file).read_text().splitlines()
    logged = next(i for i, text in enumerate(lines, 1) if text.strip().startswith("self.metrics.mean("))
    used = next(i for i, text in enumerate(lines, 1) if "= losses.group_advantages(" in text)
    assert not value_is_used(file, logged)
    assert value_is_used(file, used)
    assert calculates(file, "GRPO.loss")
    assert not calculates(file, "GRPO.check_data")
