"""Prefixes of saved trajectories, continued by a model that knows no way back."""

import json

import pytest

from callbacks.evaluation.continuations import Continuations
from callbacks.evaluation.evaluation import Evaluation
from data_modules.datasets.questions import write_tasks
from data_modules.evaluation_data import EvaluationData
from rollout.engines.base import SamplingParams
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.storage import save_trajectories
from rollout.system import RolloutSystem
from rollout.tools.limits import ToolLimits
from rollout.tools.search import SearchTool
from rollout.trajectory import InfrastructureError, Task
from tests.callbacks.helpers import Hands
from tests.rollout.scripted import ToyRetriever
from tests.rollout.scripted_engine import ScriptedEngine


def test_right_ends_by_kind_and_turn(trainer_for, tmp_path, model_dir):
    """Students search twice; those of odd questions err in the first turn, after which the teacher is wrong."""
    protocol = SearchR1Protocol(str(model_dir), template="short")

    def student(ids, sampling):
        text = protocol.decode(ids)
        if "</information>" not in text and int(text.split("number ")[1].split()[0]) % 2:
            return "lost<|im_end|>" if "lost" not in text else "<search> mira </search>"
        return "<search> mira </search>" if text.count("</information>") < 2 else "<answer> x </answer>"

    def teacher(ids, sampling):
        text = protocol.decode(ids)
        if "number 7 " in text:
            raise InfrastructureError("gone")
        return f"<answer> {'Oldfield' if 'lost' in text else 'Grey Harbor'} </answer>"

    def system(script):
        environment = QuestionAnswering({"search": SearchTool(ToyRetriever())}, ToolLimits(retries=0))
        return RolloutSystem(ScriptedEngine(script, protocol.tokenizer), protocol, environment, None)

    asked = [Task(f"q{i}", f"Where was Mira Voss number {i} born?", ("Grey Harbor",), "toy") for i in range(8)]
    rollouts = system(student)
    save_trajectories(tmp_path / "saved.parquet", rollouts.rollout(asked, sampling=SamplingParams(200), seed=0))
    rollouts.close()
    write_tasks(tmp_path / "test.parquet", asked[:1])
    data = EvaluationData(system(teacher), test_files=[str(tmp_path / "test.parquet")], max_infrastructure_failures=0.5)
    with pytest.raises(FileNotFoundError, match="no trajectories at .*; expected a parquet file, or a folder"):
        trainer_for([Continuations(str(tmp_path / "saved"))]).test(Hands(), datamodule=data, verbose=False)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved.parquet").rename(tmp_path / "saved" / "0.parquet")
    callbacks = [Evaluation(200), Continuations(str(tmp_path / "saved"))]
    trainer_for(callbacks).test(Hands(), datamodule=data, verbose=False)
    found = json.loads((tmp_path / "stage" / "evaluation.json").read_text())["test"]
    ends = {name: (m["mean"], m["n"]) for name, m in found.items() if name.startswith("continues/")}
    assert (ends["continues/clean"], ends["continues/drifted"]) == ((1.0, 8), (0.0, 9))
    assert ends["continues/clean/2"] == (1.0, 4) and ends["continues/drifted/2"] == (0.0, 3), "7's service is gone"
