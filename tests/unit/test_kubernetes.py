"""The files of deploy/kubernetes: valid, and they say what Bagua reads. No cluster has them applied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagua.distributed import run

yaml: Any = pytest.importorskip("yaml", reason="pyyaml is not installed: make setup")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))

#: The version of Kubernetes whose schemas are used. JobSet and Trainer need none of the later ones' fields.
KUBERNETES = "1.31"


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            yield f"{path.name}:{document['kind']}", document


DOCUMENTS = dict(documents())


def jobs() -> dict[str, dict[str, Any]]:
    """Everything that becomes a Job, as one."""
    found = {name: document for name, document in DOCUMENTS.items() if document["kind"] == "Job"}
    for name, document in DOCUMENTS.items():
        spec = (
            document["spec"]["template"]["spec"] if document["kind"] == "ClusterTrainingRuntime" else document["spec"]
        )
        for job in spec.get("replicatedJobs", ()):
            metadata = {"name": job["name"], **job["template"].get("metadata", {})}
            job_spec = job["template"]["spec"]
            found[name] = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job_spec}
    return found


JOBS = jobs()


def container(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["spec"]["template"]["spec"]["containers"]
    return dict(only)


def variables(of: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in of["env"]}


CORE = {name: document for name, document in DOCUMENTS.items() if document["kind"] in ("Service", "Job")} | JOBS


@pytest.mark.parametrize("name", CORE)
def test_what_kubernetes_knows_is_valid(name: str) -> None:
    validate: Any = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: make setup"
    )
    validate.validate(CORE[name], KUBERNETES, strict=True)
    # It notices.
    wrong = {**CORE[name], "spec": {**CORE[name]["spec"], "completion": 1}}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", JOBS)
def test_a_pod_is_not_root_and_has_its_probes(name: str) -> None:
    pod = JOBS[name]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["restartPolicy"] == "Never"
    # The launcher's ranks end before the pod does.
    assert pod["terminationGracePeriodSeconds"] > run._GRACE_S
    rank = container(JOBS[name])
    assert rank["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    paths = {probe: rank[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/healthz"}
    (port,) = rank["ports"]
    assert str(port["containerPort"]) == variables(rank)["BAGUA_METRICS_PORT"]
    assert variables(rank)["BAGUA_METRICS_ADDR"] == "0.0.0.0"
    assert {rank[f"{probe}Probe"]["httpGet"]["port"] for probe in paths} == {port["name"]}
    startup = rank["startupProbe"]
    # Joining may take BAGUA_TIMEOUT, and importing torch some time more.
    assert startup["periodSeconds"] * startup["failureThreshold"] > 300


@pytest.mark.parametrize(
    ("name", "rank_0"), [("job.yaml:Job", "train-0.train"), ("jobset.yaml:JobSet", "train-node-0-0.train")]
)
def test_the_pods_of_a_job_find_each_other(name: str, rank_0: str) -> None:
    job = JOBS[name]["spec"]
    found = variables(container(JOBS[name]))
    assert job["completionMode"] == "Indexed"
    assert str(job["completions"]) == str(job["parallelism"]) == found["PET_NNODES"]
    index = found["PET_NODE_RANK"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert found["PET_MASTER_ADDR"] == rank_0
    # torchrun reads each of them.
    torchrun = pytest.importorskip("torch.distributed.run", reason="torch is not installed: make setup")
    options = {option.removeprefix("PET_").lower() for option in found if option.startswith("PET_")}
    assert options <= {action.dest for action in torchrun.get_args_parser()._actions}
    assert container(JOBS[name])["command"][:3] == ["python", "-m", "bagua.distributed.run"]
    assert found["BAGUA_JOB_SECRET"]["secretKeyRef"] == {"name": "train", "key": "secret"}


def test_the_services_are_headless_and_publish_pods_that_are_not_ready() -> None:
    service, job = DOCUMENTS["job.yaml:Service"], DOCUMENTS["job.yaml:Job"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    # The label that Kubernetes gives the pods of a Job.
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    network = DOCUMENTS["jobset.yaml:JobSet"]["spec"]["network"]
    assert network == {"enableDNSHostnames": True, "subdomain": "train", "publishNotReadyAddresses": True}


def test_trainer_finds_the_runtime_and_the_container_in_it() -> None:
    runtime = DOCUMENTS["clustertrainingruntime.yaml:ClusterTrainingRuntime"]
    job = DOCUMENTS["trainjob.yaml:TrainJob"]["spec"]
    assert runtime["metadata"]["name"] == job["runtimeRef"]["name"] == "bagua-distributed"
    name = "clustertrainingruntime.yaml:ClusterTrainingRuntime"
    assert container(JOBS[name])["name"] == JOBS[name]["metadata"]["name"] == "node"
    assert JOBS[name]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [*job["trainer"]["command"], *job["trainer"]["args"]] == [
        "python",
        "-m",
        "bagua.distributed.run",
        "train.py",
    ]
    # Trainer sets these.
    assert not [each for each in variables(container(JOBS[name])) if each.startswith("PET_")]
