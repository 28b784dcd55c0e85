"""Composition of files: inheritance, merging, interpolation, and what is said when they are wrong."""

import pytest

from experiments.registry.compose import check_experiment, check_keys, compose, merge, resolve
from experiments.registry.errors import ExperimentError
from experiments.registry.listing import load, summaries


def composed(workshop, name):
    return resolve(compose(name, workshop.project.experiment_dirs), lambda stage: f"<{stage}>")


def test_inherits_left_to_right_then_the_file_itself(workshop):
    workshop.write("bases/a", "trainer: {max_steps: 1, devices: 1, precision: 32-true}")
    workshop.write("bases/b", "trainer: {max_steps: 2, devices: 2}")
    workshop.write("x", "inherits: [bases/a, bases/b]\ntrainer: {max_steps: 3}")
    assert composed(workshop, "x") == {"trainer": {"max_steps": 3, "devices": 2, "precision": "32-true"}}


def test_an_experiment_can_inherit_another_and_refer_to_values(workshop):
    workshop.write("x", "values: {turns: 4}\nmodel: {class_path: m.A, init_args: {a: '${values.turns}', b: 1}}")
    workshop.write("y", "inherits: [x]\nvalues: {turns: 2}\nmodel: {init_args: {b: '${stage:x}/model'}}")
    assert composed(workshop, "y") == {"model": {"class_path": "m.A", "init_args": {"a": 2, "b": "<x>/model"}}}


def test_another_class_drops_the_inherited_arguments():
    base = {"model": {"class_path": "m.DGPO", "init_args": {"teacher": "t", "lr": 1}}}
    assert merge(base, {"model": {"class_path": "m.PPO", "init_args": {"lr": 2}}}) == {
        "model": {"class_path": "m.PPO", "init_args": {"lr": 2}}
    }
    same = merge(base, {"model": {"class_path": "m.DGPO", "init_args": {"lr": 2}}})
    assert same["model"]["init_args"] == {"teacher": "t", "lr": 2}


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ({"paths": {"steps": "teacher"}}, "'x': unknown key 'paths.steps'; now turn_scores"),
        ({"trainer": {"callbacks": {"steps": None}}}, "unknown key 'trainer.callbacks.steps'; now turn_divergence"),
        ({"experiment": {"columns": ["steps/weight/2"]}}, "unknown column 'steps/weight/2'; now 'turns/weight/2'"),
    ],
)
def test_old_names_for_turns_are_refused_with_the_new_ones(old, message):
    with pytest.raises(ExperimentError, match=message):
        check_keys(old, "x")
        check_experiment({"experiment": {"kind": "task"}} | old, "x")


def test_callbacks_are_named_in_files_and_a_list_afterwards(workshop):
    workshop.write("bases/c", "trainer: {callbacks: {a: {class_path: c.A}, b: {class_path: c.B, init_args: {n: 1}}}}")
    workshop.write(
        "x", "inherits: [bases/c]\ntrainer: {callbacks: {a: null, b: {init_args: {n: 2}}, d: {class_path: c.D}}}"
    )
    assert composed(workshop, "x")["trainer"]["callbacks"] == [
        {"class_path": "c.B", "init_args": {"n": 2}},
        {"class_path": "c.D"},
    ]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"x": "inherits: [y]", "y": "inherits: [x]"}, "circle: x -> y -> x"),
        ({"x": "inherits: [bases/tyni]", "bases/tiny": "{}"}, "no file 'bases/tyni.yaml'.*mean 'bases/tiny'.*by 'x'"),
        ({"x": "trainr: {}"}, "unknown key 'trainr'; did you mean 'trainer'"),
        (
            {"x": "experiment: {columns: [em, calls]}"},
            "experiment.columns: unknown column 'calls'; expected some of em, ",
        ),
        ({"x": "experiment: {columns: [em, em]}"}, "must be a list of different names"),
        ({"x": "trainer: {a: [1, 2}"}, "x.yaml is not valid YAML.*line 1"),
        ({"x": "trainer: " + "1" * 5000}, "x.yaml is not valid YAML: ValueError: Exceeds the limit"),
        ({"x": "trainer: {a: '${values.nothing}'}"}, "cannot resolve.*values.nothing.*at 'trainer.a'"),
        (
            {"x": "trainer: {a: '${model.init_args.b}'}"},
            "'model.init_args.b' not found .another class_path starts with empty init_args. ",
        ),
        ({"x": "trainer: {a: '${oc.env:SURELY_UNSET_VARIABLE}'}"}, "SURELY_UNSET_VARIABLE"),
        ({"x": "trainer: {a: '${nonsense:1}'}"}, "Unsupported interpolation type nonsense"),
    ],
)
def test_what_is_wrong_is_said(workshop, files, message):
    for name, text in files.items():
        workshop.write(name, text)
    with pytest.raises(ExperimentError, match=message):
        composed(workshop, "x")


def test_an_interpolation_to_nowhere_is_shown_in_the_file_in_which_it_is_written(workshop):
    workshop.write("bases/a", "values: {b: '${no.c}'}")
    workshop.write("x", "inherits: [bases/a]\ntrainer: {d: '${values.b}'}")
    directories = workshop.project.experiment_dirs
    config = compose("x", directories) | {"experiment": {"name": "x"}}
    with pytest.raises(ExperimentError, match=r"'no.c' not found \(at 'values.b': '\${no.c}', in .*bases/a.yaml\)"):
        resolve(config, str, directories)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experiment: {kind: fti}", "kind is 'fti', expected one of fit, test, task"),
        ("experiment: {kind: fit}\nmodel: {class_path: a.B}", "'data.class_path' is missing"),
    ],
)
def test_sections_must_fit_the_kind(workshop, text, message):
    workshop.write("x", text)
    with pytest.raises(ExperimentError, match=message):
        load("x", workshop.project)


def test_unknown_experiment_names_the_nearest(workshop):
    workshop.task("dgpo_tiny")
    with pytest.raises(ExperimentError, match="no experiment 'dgpo_tniy'.*did you mean 'dgpo_tiny'"):
        load("dgpo_tniy", workshop.project)


def test_what_is_appended_twice_before_there_is_a_list_is_all_appended():
    base, one, other = {"a": {"b": ["z"]}}, {"a": {"b+": ["x"]}}, {"a": {"b+": ["y"]}}
    assert merge(base, merge(one, other)) == merge(merge(base, one), other) == {"a": {"b": ["z", "x", "y"]}}


def test_a_task_with_options_of_a_trainer_is_refused(workshop):
    workshop.task("x")
    with pytest.raises(ExperimentError, match="'x': a task has no trainer and runs in one process; remove devices"):
        check_experiment({**load("x", workshop.project), "trainer": {"devices": 8}}, "x")


def test_an_editors_lock_and_a_link_to_nothing_stop_nothing(workshop):
    workshop.task("x")
    (workshop.files / ".#x.yaml").symlink_to("somebody@host.123")
    (workshop.files / "gone.yaml").symlink_to("nowhere")
    assert load("x", workshop.project)


def test_a_broken_file_stops_only_what_needs_it(workshop):
    workshop.task("a")
    workshop.write("broken", "trainer: {a: [1, 2}")
    workshop.write("wrong", "trainr: {}")
    found, wrong = summaries(workshop.project)
    assert [about.name for about in found] == ["a"] and len(wrong) == 2
    assert "broken.yaml is not valid YAML" in wrong[0] and "unknown key 'trainr'" in wrong[1]
    with pytest.raises(ExperimentError, match="no experiment 'broken'.*not read: .*broken.yaml is not valid YAML"):
        load("broken", workshop.project)
