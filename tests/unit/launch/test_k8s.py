# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/k8s/jobset.yaml``: every field is one of the APIs', and the numbers fit one another.

The shapes below are the part of the APIs that the manifest uses, by JobSet's v1alpha2 types and
Kubernetes' batch/v1, core/v1 and networking.k8s.io/v1: an unknown field or another type fails.
"""

import copy
import re

import pytest
import yaml

from tests.commands import ROOT

_FOR_EVER = "AndIgnoreMaxRestarts"
NAME = re.compile("[a-z0-9]([-a-z0-9]*[a-z0-9])?")
META = {"name": NAME, "labels?": {str: str}}
TERMS = [{"name": str, "value?": str, "valueFrom?": {"fieldRef": {"fieldPath": str}}}]
CONTAINER = {
    "name": NAME,
    "image": str,
    "workingDir?": str,
    "command?": [str],
    "args?": [str],
    "env?": TERMS,
    "resources?": {"limits?": {str: str}, "requests?": {str: str}},
    "volumeMounts?": [{"name": str, "mountPath": str, "readOnly?": bool}],
}
VOLUME = {
    "name": str,
    "persistentVolumeClaim?": {"claimName": str},
    "emptyDir?": {"medium?": {"", "Memory"}, "sizeLimit?": str},
}
POD = {
    "restartPolicy": {"Never"},  # the only one with a podFailurePolicy
    "terminationGracePeriodSeconds?": int,
    "containers": [CONTAINER],
    "volumes?": [VOLUME],
}
POD_RULE = {
    "action": {"FailJob", "Ignore", "Count", "FailIndex"},
    "onExitCodes?": {"operator": {"In", "NotIn"}, "values": [int], "containerName?": str},
    "onPodConditions?": [{"type": str, "status": {"True", "False", "Unknown"}}],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": {"Indexed", "NonIndexed"},
    "backoffLimit?": int,
    "podFailurePolicy?": {"rules": [POD_RULE]},
    "template": {"metadata?": {"labels?": {str: str}}, "spec": POD},
}
RESTARTS = {f"Restart{what}{how}" for what in ("JobSet", "Job") for how in ("", _FOR_EVER)}
SET_RULE = {
    "name": re.compile("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"),
    "action": {"FailJobSet"} | RESTARTS,
    "onJobFailureReasons?": [
        {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded"}
        | {"PodFailurePolicy"}
    ],
    "targetReplicatedJobs?": [str],
}
JOB_SET = {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2"},
    "kind": {"JobSet"},
    "metadata": META,
    "spec": {
        "network?": {
            "enableDNSHostnames?": bool,
            "subdomain?": str,
            "publishNotReadyAddresses?": bool,
        },
        "failurePolicy?": {"maxRestarts?": int, "rules?": [SET_RULE]},
        "replicatedJobs": [{"name": NAME, "replicas?": int, "template": {"spec": JOB}}],
    },
}
SELECTOR = {"matchLabels": {str: str}}
POLICY = {
    "apiVersion": {"networking.k8s.io/v1"},
    "kind": {"NetworkPolicy"},
    "metadata": META,
    "spec": {
        "podSelector": SELECTOR,
        "policyTypes": [{"Ingress", "Egress"}],
        "ingress": [{"from": [{"podSelector": SELECTOR}]}],
    },
}


def faults(value, shape, where=""):
    """What a value has that its shape has not, and the other way round."""
    if isinstance(shape, set):
        return [] if value in shape else [f"{where}: {value!r} is none of {sorted(shape)}"]
    if isinstance(shape, re.Pattern):
        fits = isinstance(value, str) and shape.fullmatch(value)
        return [] if fits else [f"{where}: {value!r} does not match {shape.pattern}"]
    if isinstance(shape, type):
        return [] if type(value) is shape else [f"{where}: {value!r} is no {shape.__name__}"]
    if isinstance(shape, list):
        if not isinstance(value, list) or not value:
            return [f"{where}: no list"]
        return [f for i, item in enumerate(value) for f in faults(item, shape[0], f"{where}[{i}]")]
    if not isinstance(value, dict):
        return [f"{where}: no mapping"]
    if str in shape:
        return [
            f for key, item in value.items() for f in faults(item, shape[str], f"{where}.{key}")
        ]
    known = {key.rstrip("?"): (item, key) for key, item in shape.items()}
    found = [f"{where}.{key}: unknown" for key in value.keys() - known.keys()]
    for key, (item, name) in known.items():
        if key in value:
            found += faults(value[key], item, f"{where}.{key}")
        elif not name.endswith("?"):
            found.append(f"{where}.{key}: missing")
    return found


@pytest.fixture
def manifest():
    return list(yaml.safe_load_all((ROOT / "scripts/k8s/jobset.yaml").read_text()))


def test_every_field_is_one_of_the_apis(manifest):
    job_set, policy = manifest
    assert faults(job_set, JOB_SET) == []
    assert faults(policy, POLICY) == []


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


JOB_PATH = ("spec", "replicatedJobs", 0, "template", "spec")


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        (("spec",), "replicatedJob", []),
        (("spec", "failurePolicy", "rules", 0), "name", "invalid-configuration"),
        (JOB_PATH, "parallelism", "4"),
        (JOB_PATH, "completionMode", "indexed"),
        ((*JOB_PATH, "template", "spec"), "restartPolicy", "OnFailure"),
        ((*JOB_PATH, "template", "spec", "containers", 0, "env", 0), "value", 8),
        ((*JOB_PATH, "podFailurePolicy", "rules", 0, "onExitCodes"), "values", []),
    ],
)
def test_a_wrong_field_is_noticed(manifest, path, key, value):
    wrong = copy.deepcopy(manifest[0])
    at(wrong, path)[key] = value
    (fault,) = faults(wrong, JOB_SET)
    assert f".{key}: " in fault


def test_the_numbers_fit_one_another(manifest):
    job_set, policy = manifest
    name = job_set["metadata"]["name"]
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert job["parallelism"] == job["completions"] == int(env["NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == env["NGPU"]
    # The address that JobSet gives the first pod of the first job.
    assert re.fullmatch(rf"{name}-{replicated['name']}-0-0\.{name}:\d+", env["RDZV_ENDPOINT"])
    assert (ROOT / env["CONFIG_FILE"]).is_file()
    assert {v["name"] for v in pod["volumes"]} == {v["name"] for v in container["volumeMounts"]}
    # An indexed job retries no pod: with a rule for each fault, the rest is JobSet's.
    assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0
    labels = job["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == labels
    assert pod["terminationGracePeriodSeconds"] >= 120
