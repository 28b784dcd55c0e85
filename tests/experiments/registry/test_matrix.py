"""Tables of experiments: cells, what they share, published numbers, and what is said when a table is wrong."""

import pytest

from experiments.registry.errors import ExperimentError
from experiments.registry.listing import load, names

TABLE = """
experiment: {kind: task, summary: "<method.what> of <model.title>", label: <method>}
task: {class_path: a.B, init_args: {policy: "${stage:<method>_<model>}/model"}}
matrix:
  name: <method>_<model>
  axes:
    method:
      ppo: {vars: {what: rewards}}
      dgpo:
        vars: {what: a teacher, row: DGPO, steps: 12}
        inherits: [bases/kl]
        task: {init_args: {steps: <method.steps>}}
      dgpo_ablation: {only: {model: large}, vars: {what: half}}
    model:
      small: {vars: {title: S}}
      large: {vars: {title: L}}
  cells:
    - {where: {method: dgpo}, experiment: {compare: [ppo_<model>], ablations: [ppo_<model>]}}
    - {where: {method: dgpo, model: [large]}, experiment: {ablations+: [dgpo_ablation_<model>]}}
  published:
    - format: <method.row> row, {:.2f}
      columns: {model: [small, large]}
      rows: {dgpo: [24.2, null]}
    - {where: {model: large}, format: {1: "alone {}", 2: "from {} to {}"}, rows: {ppo: [1, 2], dgpo_ablation: 3}}
"""


@pytest.fixture
def table(workshop):
    workshop.write("bases/kl", "task: {class_path: a.B, init_args: {kl: 0.1}}")
    workshop.write("table", TABLE)
    return workshop.project


def test_every_cell_is_an_experiment(table):
    assert names(table) == ["dgpo_ablation_large", "dgpo_large", "dgpo_small", "ppo_large", "ppo_small"]
    config = load("dgpo_large", table)
    assert config["task"]["init_args"] == {"kl": 0.1, "policy": "${stage:dgpo_large}/model", "steps": 12}
    assert config["experiment"]["summary"] == "a teacher of L"
    assert config["experiment"]["compare"] == ["ppo_large"]
    assert config["experiment"]["ablations"] == ["ppo_large", "dgpo_ablation_large"]


def test_a_key_with_a_plus_appends_to_what_is_inherited(workshop):
    workshop.write("plain", "experiment: {kind: task, label: A, ablations: [x]}\ntask: {class_path: a.B}")
    workshop.write(
        "table",
        "inherits: [<method>]\nexperiment: {label+: ', again'}\n"
        "matrix:\n  name: <method>_again\n  axes: {method: {plain: {experiment: {ablations+: [y]}}}}",
    )
    about = load("plain_again", workshop.project)["experiment"]
    assert (about["label"], about["ablations"]) == ("A, again", ["x", "y"])
    assert load("plain", workshop.project)["experiment"]["ablations"] == ["x"]
    workshop.write("alone", "inherits: [plain]\nexperiment: {summary+: more}")
    with pytest.raises(ExperimentError, match=r"experiment.summary\+ has nothing to append to"):
        load("alone", workshop.project)


def test_published_numbers_say_what_a_cell_reproduces(table):
    said = {name: load(name, table)["experiment"].get("reproduces") for name in names(table)}
    assert said == {
        "dgpo_small": "DGPO row, 24.20",
        "dgpo_large": None,
        "ppo_small": None,
        "ppo_large": "from 1 to 2",
        "dgpo_ablation_large": "alone 3",
    }


def test_a_var_may_name_another_axis(workshop):
    workshop.write("bases/kl", "{}")
    workshop.write("table", TABLE.replace("row: DGPO", "row: '<model.title> of <method>'"))
    assert load("dgpo_small", workshop.project)["experiment"]["reproduces"] == "S of dgpo row, 24.20"


def test_values_of_an_axis_can_be_numbers(workshop):
    axes = "{beta: {10: {vars: {title: ten}}, 0.5: {only: {seed: 2}}}, seed: {1: {}, 2: {}}}"
    published = "[{format: 'row {}', columns: {seed: [1, 2]}, rows: {10: [3, 4]}}]"
    cells = "[{where: {beta: 10}, experiment: {label: <beta.title>}}]"
    text = f"matrix: {{name: b<beta>_<seed>, axes: {axes}, published: {published}, cells: {cells}}}"
    workshop.write("table", f"experiment: {{kind: task}}\ntask: {{class_path: a.B}}\n{text}")
    assert names(workshop.project) == ["b0.5_2", "b10_1", "b10_2"]
    about = load("b10_2", workshop.project)["experiment"]
    assert about["label"] == "ten" and about["reproduces"] == "row 4"


def test_a_cell_can_be_inherited_by_its_name(table, workshop):
    workshop.write("mine", "inherits: [dgpo_small]\nexperiment: {summary: mine}")
    config = load("mine", table)
    assert config["experiment"]["summary"] == "mine" and config["task"]["init_args"]["kl"] == 0.1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("axes:", "axis:", "matrix: unknown key 'axis'; did you mean 'axes'"),
        ("<method.what> of", "<method.wat> of", "method ppo has no 'wat' among its vars.*did you mean 'what'"),
        ("only: {model: large}", "only: {model: lrge}", "unknown model 'lrge'; did you mean 'large'"),
        (
            "where: {method: dgpo, model: [large]}",
            "where: {method: dgpo_ablation, model: small}",
            "no cell fits where",
        ),
        ("vars: {what: rewards}", "vars: {what: <method.what>}", "<method.what> is defined by itself"),
        ("name: <method>_<model>", "name: <method>", "gives two cells the name 'ppo'"),
        ("rows: {dgpo: [24.2, null]}", "rows: {dgpo: [24.2]}", "row 'dgpo' has .24.2., expected 2 numbers"),
        ("rows: {dgpo: [24.2, null]}", "rows: {dgpo: [many, 2]}", "'many' does not fit into format"),
        ("task: {class_path", "taks: {class_path", "unknown key 'taks'; did you mean 'task'"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_line(workshop, old, new, message):
    assert old in TABLE
    workshop.write("bases/kl", "{}")
    workshop.write("table", TABLE.replace(old, new, 1))
    with pytest.raises(ExperimentError, match=message) as caught:
        load("dgpo_small", workshop.project)
    assert "\n" not in str(caught.value) and "table.yaml" in str(caught.value)


def test_one_name_is_one_experiment(workshop):
    workshop.task("x")
    (workshop.files / "more").mkdir()
    workshop.write("more/x", "{}")
    with pytest.raises(ExperimentError, match="/x.yaml: experiment 'x' is defined in .*/x.yaml already"):
        names(workshop.project)


def test_outputs_and_hidden_folders_beside_experiments_are_no_experiments(workshop):
    workshop.task("x")
    for folder in ("outputs/x/0a1b", ".github/workflows"):
        (workshop.files / folder).mkdir(parents=True)
        workshop.write(f"{folder}/config", "{}")
    (workshop.files / "outputs/x/0a1b/stage.json").write_text("{}")
    assert "x" in names(workshop.project) and "config" not in names(workshop.project)
