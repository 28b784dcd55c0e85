"""Options that follow the machine: its device, its cores, and whether its processor computes in bfloat16."""

import importlib.metadata
import json
import os
import tempfile

import pytest

from experiments.registry import machine
from experiments.registry.compose import resolve

GPU = "experiments.registry.machine._has_gpu"


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    machine._trial_passes.cache_clear()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    machine._trial_passes.cache_clear()


def cpuinfo(tmp_path, flags):
    path = tmp_path / "cpuinfo"
    path.write_text(f"model name\t: a processor\nflags\t\t: fpu {flags}\n")
    return path


def test_bfloat16_needs_a_flag_and_a_trial_that_ends_well(tmp_path, monkeypatch):
    assert not machine.cpu_has_bfloat16(cpuinfo(tmp_path, "avx2")) and not machine.cpu_has_bfloat16(tmp_path / "none")
    found = cpuinfo(tmp_path, "avx2 avx512_bf16")
    assert machine.cpu_has_bfloat16(found)  # every processor computes it, if slowly
    monkeypatch.setattr(machine, "PROBE", "import os; os.abort()")
    assert machine.cpu_has_bfloat16(found)  # kept
    (kept,) = tmp_path.glob("compact-agents-bfloat16-*.json")
    assert json.loads(kept.read_text())["works"] is True
    machine._trial_passes.cache_clear()
    kept.write_text("{")
    assert not machine.cpu_has_bfloat16(found)  # the trial crashed


def test_amx_is_used_where_a_trial_shows_that_it_runs(tmp_path, monkeypatch):
    monkeypatch.delenv(machine.ISA_VARIABLE, raising=False)
    runs = f"import os\nif os.environ['{machine.ISA_VARIABLE}'] == '{machine.WITH_AMX}': os.abort()"
    both, without = "avx512_bf16 amx_bf16", "avx512_bf16"
    for flags, probe, isa, bfloat16 in (
        (both, "", machine.WITH_AMX, True),
        (both, runs, machine.WITHOUT_AMX, True),
        (both, "import os; os.abort()", machine.WITHOUT_AMX, False),
        (without, "", machine.WITHOUT_AMX, True),
    ):
        machine._trial_passes.cache_clear()
        for kept in tmp_path.glob("*.json"):
            kept.unlink()
        monkeypatch.setattr(machine, "PROBE", probe)
        found = cpuinfo(tmp_path, flags)
        assert (machine.onednn_isa(found), machine.cpu_has_bfloat16(found)) == (isa, bfloat16), (flags, probe)


def test_auto_takes_a_gpu_where_torch_can_use_it(monkeypatch):
    assert [machine.device_of(name) for name in ("cuda", "gpu", "cpu")] == ["gpu", "gpu", "cpu"]
    monkeypatch.setattr(GPU, lambda: True)
    assert machine.device_of("auto") == machine.device_of(None) == "gpu"
    monkeypatch.undo()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert machine.device_of("auto") == "cpu"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.device_of("auto") == "cpu"


def test_a_value_follows_the_accelerator_and_is_told(monkeypatch):
    monkeypatch.setattr("experiments.registry.compose.cpu_has_bfloat16", lambda: False)
    config = {
        "trainer": {"accelerator": "cpu", "precision": "${per_device:bf16-mixed,32-true,bf16-mixed}"},
        "model": {"tokens": "${per_device:8192,2048}", "bytes": "${per_device:null,16}", "cores": "${cpu_cores:}"},
    }
    chosen = {}
    found = resolve(config, str, chosen=chosen)
    assert found["trainer"]["precision"] == "32-true"
    assert found["model"] == {"tokens": 2048, "bytes": 16, "cores": len(os.sched_getaffinity(0))}
    assert chosen == {"device": "cpu", "precision": "32-true", "tokens": 2048, "bytes": 16}
    monkeypatch.setattr("experiments.registry.compose.cpu_has_bfloat16", lambda: True)
    assert resolve(config, str)["trainer"]["precision"] == "bf16-mixed"
    config |= {"values": {"accelerator": "auto"}}
    config["trainer"]["accelerator"] = "${values.accelerator}"
    monkeypatch.setattr(GPU, lambda: False)
    assert resolve(config, str)["model"]["tokens"] == 2048
    with machine.assume_gpu():  # `make size`, on any machine
        assert resolve(config, str)["model"]["tokens"] == 8192
    config["values"]["accelerator"] = "cuda"
    assert resolve(config, str)["model"] == {"tokens": 8192, "bytes": None, "cores": len(os.sched_getaffinity(0))}
    task = {"values": {"accelerator": "cuda"}, "task": {"tokens": "${per_device:8192,2048}"}}
    assert resolve(task, str)["task"]["tokens"] == 8192
