"""The files of deploy/ are well formed, copy what is there, and call commands that exist. They are not built here."""

import re
import shlex
import subprocess

import yaml

from common.secret import SECRET_VARIABLE
from experiments.registry.project import ROOT
from rollout.engines.vllm_servers.secret_middleware import OPEN_PATHS

DEPLOY = ROOT / "deploy"
INSTRUCTIONS = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "ENTRYPOINT", "CMD"}


def instructions():
    """The Dockerfile's instructions, continued lines joined."""
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [line.split(None, 1) for line in re.sub(r" \\\n\s*", " ", "\n".join(lines)).splitlines() if line]


def make(words):
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_image_has_two_stages_a_user_and_the_lock_file():
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS
    stages = [i for i, (name, _) in enumerate(found) if name == "FROM"]
    build, last = found[stages[0] : stages[1]], found[stages[1] :]
    assert found[: stages[0]] == [["ARG", "BASE=ubuntu:24.04"]] and found[stages[0]][1].endswith(" AS build")
    assert ["COPY", ". ."] in build and ["RUN", "./scripts/setup.sh"] in build  # which installs by requirements/*.txt
    assert (ROOT / "scripts" / "setup.sh").stat().st_mode & 0o111
    assert ["COPY", "--from=build --chown=1000:1000 /app /app"] in last and ["USER", "1000"] in last
    assert [name for name, _ in found].count("ENV") == 2 and all("FORCE_CUDA" in s for n, s in found if n == "ENV")
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert ".venv" in ignored and "outputs" in ignored and ".git" not in ignored  # runs name their commit


def test_the_commands_of_the_image_exist():
    text = (DEPLOY / "Dockerfile").read_text()
    for arguments in re.findall(r"docker run .*? compact-agents(?::cuda)? (.*)", text):
        make(shlex.split(arguments))


def test_the_job_of_a_cluster_has_what_kubernetes_requires():
    claim, job = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert (claim["apiVersion"], claim["kind"], job["apiVersion"], job["kind"]) == (
        "v1", "PersistentVolumeClaim", "batch/v1", "Job",
    )  # fmt: skip
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] in ("OnFailure", "Never") and pod["securityContext"]["runAsUser"] == 1000
    [container] = pod["containers"]
    make(container["args"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert volumes["outputs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_the_servers_of_a_cluster_run_make_engine_with_a_secret():
    service, servers = yaml.safe_load_all((DEPLOY / "kubernetes_servers.yaml").read_text())
    assert (service["kind"], servers["apiVersion"], servers["kind"]) == ("Service", "apps/v1", "StatefulSet")
    spec, template = servers["spec"], servers["spec"]["template"]
    assert spec["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == spec["selector"]["matchLabels"] == template["metadata"]["labels"]
    [container] = template["spec"]["containers"]
    make(container["args"])
    assert container["readinessProbe"]["httpGet"]["path"] in OPEN_PATHS  # a probe has no secret
    [variable] = container["env"]
    assert variable["name"] == SECRET_VARIABLE
    task = yaml.safe_load((DEPLOY / "skypilot_servers.yaml").read_text())
    assert SECRET_VARIABLE in task["envs"]
    words = shlex.split(task["run"].replace("$EXP", task["envs"]["EXP"]).replace("$MODEL", task["envs"]["MODEL"]))
    make(words[1:])
    assert words[-1] == container["args"][-1] == "ARGS=--host 0.0.0.0 --transport nccl"


def test_the_cloud_task_runs_make_with_its_nodes():
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert task.keys() <= {"name", "resources", "num_nodes", "workdir", "file_mounts", "envs", "setup", "run"}
    given = {**task["envs"], "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_RANK": "1"}
    given["SKYPILOT_NODE_IPS"] = "10.0.0.1\n10.0.0.2"
    done = subprocess.run(
        ["bash", "-ec", 'make() { printf "%s\\0" "$@"; }\n' + task["run"]],
        env=given,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split("\0")[:-1]
    assert "MASTER_ADDR=10.0.0.1" in words and "NODE_RANK=1" in words and "NNODES=2" in words
    make(words)
