# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The files for Slurm and Kubernetes, as far as one machine without them can run them."""

import os
import shutil
import signal
import subprocess
import time

import pytest
import yaml

from tests.integration.runs import ROOT, environment
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.launch.run_folder import DIVERGED, EXIT_STATUS, REFUSED

SBATCH = ROOT / "scripts/slurm/train.sbatch"

# What the script calls: each command writes down its arguments, and what the ranks would see.
COMMANDS = {
    "srun": """
printf '%s ' srun "$@" "NNODES=$NNODES" "NGPU=$NGPU" "GPUS=$TORCHTITAN_LR_GPUS" >>$CALLS
echo "$RDZV_ENDPOINT $RDZV_ID " >>$CALLS
$ENDING
""",
    "scontrol": """
case "$1" in
requeue | update) echo "$*" >>$CALLS ;;
show) [ "$2" = job ] && echo "JobId=$4 ExcNodeList=$EXCLUDED Partition=a" || printf "n1\\nn2\\n" ;;
esac
""",
    "scancel": 'echo "scancel $*" >>$CALLS; kill -USR2 $(cat $CALLS.srun)',
    "squeue": "echo ${STATE:-RUNNING}",
}

# srun on two nodes, of which the second has lost a GPU; the first is killed with it, or goes on to
# the run's end.
LOSES = """
printf '#!/bin/sh\\n[ $SLURMD_NODENAME = n2 ] || exit ${OTHER:-137}; exit 4' >run_llama_train.sh
chmod +x run_llama_train.sh
while [ "$1" != bash ]; do shift; done
for node in n1 n2; do SLURMD_NODENAME=$node "$@"; done
exit 4
"""
SAVES = "echo $$ >$CALLS.srun; trap 'exit 0' USR2; kill -USR1 $PPID; while :; do sleep 0.1; done"
NOTICED = f"""echo $$ >$CALLS.srun; trap noticed=1 USR2; kill -USR1 $PPID
until [ -n "$noticed" ]; do sleep 0.1; done
{LOSES}"""


def write_command(path, body):
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def submit(tmp_path):
    def run(ending, **variables):
        for name, body in COMMANDS.items():
            write_command(tmp_path / name, body.replace("$ENDING", ending))
        calls = tmp_path / "calls"
        calls.write_text("")
        granted = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "70042"}
        granted |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "64"}
        told = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls)}
        told["EXCLUDED"] = "(null)"
        done = subprocess.run(
            ["bash", SBATCH, "--training.steps=5"],
            env=environment() | granted | told | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
        (tmp_path / "log").write_text(done.stdout)
        return done.returncode, calls.read_text().splitlines()

    return run


def test_slurm_finds_the_options_of_its_script():
    """Slurm reads its options up to the first command."""
    lines = SBATCH.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line.split()[1] for line in lines if line.startswith("#SBATCH ")]
    assert options == [line.split()[1] for line in lines[:first] if line.startswith("#SBATCH ")]
    assert {"--exclusive", "--mem=0", "--requeue", "--signal=B:USR1@300"} <= set(options)


@pytest.mark.parametrize(
    ("ending", "variables", "status", "requeued"),
    [
        ("exit 0", {}, 0, False),
        ("exit 2", {}, 2, False),  # refused
        (SAVES, {}, 0, True),  # the notice before the end of its time
        ("exit 137", {}, 137, True),  # a launcher was killed
        ("exit 137", {"SLURM_RESTART_COUNT": "19"}, 137, False),
        ("exit 143", {"STATE": "COMPLETING"}, 143, False),  # cancelled
        (LOSES, {}, 4, True),
        (LOSES, {"NGPU": "8", "EXCLUDED": "n7,n9", "NNODES": "1:2"}, 4, True),
        (LOSES, {"NNODES": "1:2", "OTHER": "0"}, 0, False),  # finished without that node
        (NOTICED, {"NNODES": "1:2", "OTHER": "0"}, 4, True),  # saved without it
        (LOSES, {"NGPU": "16"}, 4, False),  # more than each node has
        ("exit 0", {"NGPU": "4", "SLURM_GPUS_ON_NODE": ""}, 0, False),  # on CPUs
    ],
)
def test_a_slurm_job_returns_when_it_should(submit, tmp_path, ending, variables, status, requeued):
    found, calls = submit(ending, **variables)
    assert found == status, calls
    assert ("requeue 70042" in calls) == requeued
    restart, nodes = variables.get("SLURM_RESTART_COUNT", "0"), variables.get("NNODES", "2")
    ranks, gpus = (variables.get(name, "8") for name in ("NGPU", "SLURM_GPUS_ON_NODE"))
    ends = f"NNODES={nodes} NGPU={ranks} GPUS={gpus} n1:20042 70042-{restart} "
    assert calls[0].endswith(ends)
    assert f" --kill-on-bad-exit={int(nodes == '2')} " in calls[0]
    assert "./run_llama_train.sh --training.steps=5" in calls[0]
    assert ("scancel --signal=USR1 70042.0" in calls) == ("-USR1" in ending)
    without = "n7,n9,n2" if "EXCLUDED" in variables else "n2"
    told = f"update JobId=70042 ExcNodeList={without}"
    assert (calls[-1] == told) == (LOSES in ending and requeued)
    undo = f"\nstarts without {without}; to return them: scontrol update JobId=70042 ExcNodeList=\n"
    assert (undo in (tmp_path / "log").read_text()) == (calls[-1] == told)


def test_slurm_runs_the_ranks_in_a_container_with_its_interpreter(submit, tmp_path):
    prints, mount = 'echo "interpreter: $PYTHON" >>$CALLS', {"CONTAINER_MOUNTS": "/data:/data"}
    mounts = f"--container-mounts={tmp_path}:{tmp_path},/data:/data"
    for given, used in ({}, "/workspace/.venv/bin/python"), ({"PYTHON": "python3"}, "python3"):
        _, calls = submit(prints, CONTAINER="image.sqsh", **mount, **given)
        assert f"--container-image=image.sqsh {mounts} --container-workdir={tmp_path}" in calls[0]
        assert calls[-1] == f"interpreter: {used}"


LAUNCHERS = {
    "finished": ("", 0),
    "stopped": ("", 75),
    "refused": ("exit 2", 2),
    "killed": ("kill -KILL $$", 137),
}
WRITES = 'echo "$@" >$RUN_FOLDER/arguments; '
WRITES += """printf '{"state": "%s"}' "$STATE" >$RUN_FOLDER/run_state.json"""


@pytest.fixture
def pod(tmp_path):
    """Starts what a pod runs, with a launcher of another body."""
    script = tmp_path / "scripts/k8s/train.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "scripts/k8s/train.sh", script)

    def start(body, state):
        write_command(tmp_path / "run_llama_train.sh", body)
        env = environment() | {"RUN_FOLDER": str(tmp_path), "STATE": state}
        return subprocess.Popen([script, "--training.steps=5"], env=env)

    return start


@pytest.mark.parametrize("state", LAUNCHERS)
def test_a_pod_is_complete_if_the_run_is_finished(pod, tmp_path, state):
    ending, status = LAUNCHERS[state]
    assert pod(f"{WRITES}\n{ending}", state).wait(60) == status
    said = (tmp_path / "arguments").read_text()
    assert said == f"--job.dump_folder={tmp_path} --training.steps=5\n"


def test_a_pod_passes_the_notice_on_and_is_not_complete(pod, tmp_path):
    started = tmp_path / "started"
    waits = f"finish() {{ {WRITES}; exit 0; }}; trap finish TERM; touch {started}"
    process = pod(f"{waits}; while :; do sleep 0.1; done", "stopped")
    while not started.exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert "stopped" in (tmp_path / "run_state.json").read_text()


def test_the_numbers_of_the_kubernetes_job_agree():
    job, policy = yaml.safe_load_all((ROOT / "scripts/k8s/jobset.yaml").read_text())
    (replicated,) = job["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    given = {each["name"]: each.get("value") for each in container["env"]}
    assert spec["parallelism"] == spec["completions"] == int(given["NNODES"])
    granted = container["resources"]["limits"]["nvidia.com/gpu"]
    assert given["NGPU"] == given["TORCHTITAN_LR_GPUS"] == granted
    # Each action but the last one counts: to Ignore a status would create its pod for ever.
    ends, ignored = spec["podFailurePolicy"]["rules"]
    assert ends["action"] == "FailJob" and "onExitCodes" not in ignored
    assert ends["onExitCodes"]["values"] == [EXIT_STATUS[REFUSED], EXIT_STATUS[DIVERGED]]
    name = job["metadata"]["name"]
    assert given["RDZV_ENDPOINT"] == f"{name}-{replicated['name']}-0-0.{name}:29500"
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}
    assert policy["spec"]["podSelector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert os.access(ROOT / container["command"][0], os.X_OK)
    build_job_config([f"--job.config_file={ROOT / given['CONFIG_FILE']}", *container["args"]])
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "outputs")
    assert given["RUN_FOLDER"].startswith(mount["mountPath"])
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert {"nvidia.com/gpu", "rdma/ib"} <= limits.keys() and requests.keys() == {"cpu", "memory"}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
