"""The files of deploy/kubernetes: valid, and they say what Bagua reads. No cluster has them applied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagua.distributed import run

yaml: Any = pytest.importorskip("yaml", reason="pyyaml is not installed: make setup")
jsonschema: Any = pytest.importorskip("jsonschema", reason="jsonschema is not installed: make setup")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))

#: The version of Kubernetes whose schemas are used. JobSet and Trainer need none of the later ones' fields.
KUBERNETES = "1.31"

METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
        "generateName": {"type": "string", "pattern": "^[a-z0-9][-a-z0-9]*$"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "additionalProperties": False,
    "anyOf": [{"required": ["name"]}, {"required": ["generateName"]}],
}
COUNT = {"type": "integer", "minimum": 0}
QUANTITIES = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """An object with these fields and no other."""
    return {"type": "object", "properties": properties, "required": required or [], "additionalProperties": False}


def kind(api_version: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return closed(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": api_version},
        kind={"const": name},
        metadata=METADATA,
        spec=spec,
    )


# The fields of JobSet that are used here or near, from its public reference of v1alpha2. Its templates are checked as
# Jobs.
JOBSET_SPEC = closed(
    ["replicatedJobs"],
    network=closed(
        enableDNSHostnames={"type": "boolean"},
        subdomain={"type": "string"},
        publishNotReadyAddresses={"type": "boolean"},
    ),
    failurePolicy=closed(maxRestarts=COUNT, restartStrategy={"enum": ["Recreate", "BlockingRecreate"]}),
    successPolicy=closed(["operator"], operator={"enum": ["All", "Any"]}, targetReplicatedJobs={"type": "array"}),
    replicatedJobs={
        "type": "array",
        "minItems": 1,
        "items": closed(["name", "template"], name={"type": "string"}, replicas=COUNT, template={"type": "object"}),
    },
    suspend={"type": "boolean"},
    ttlSecondsAfterFinished=COUNT,
)
PROC_PER_NODE = {"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["auto", "cpu", "gpu"]}]}

# Those of Trainer, from its public reference of trainer.kubeflow.org/v1alpha1.
SCHEMAS = {
    "JobSet": kind("jobset.x-k8s.io/v1alpha2", "JobSet", JOBSET_SPEC),
    "ClusterTrainingRuntime": kind(
        "trainer.kubeflow.org/v1alpha1",
        "ClusterTrainingRuntime",
        closed(
            ["template"],
            mlPolicy=closed(numNodes={"type": "integer", "minimum": 1}, torch=closed(numProcPerNode=PROC_PER_NODE)),
            template=closed(metadata={"type": "object"}, spec=JOBSET_SPEC),
        ),
    ),
    "TrainJob": kind(
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        closed(
            ["runtimeRef"],
            runtimeRef=closed(
                ["name"],
                name={"type": "string"},
                apiGroup={"const": "trainer.kubeflow.org"},
                kind={"enum": ["ClusterTrainingRuntime", "TrainingRuntime"]},
            ),
            trainer=closed(
                image={"type": "string"},
                command={"type": "array", "items": {"type": "string"}},
                args={"type": "array", "items": {"type": "string"}},
                env={"type": "array", "items": {"type": "object"}},
                numNodes={"type": "integer", "minimum": 1},
                numProcPerNode=PROC_PER_NODE,
                resourcesPerNode=closed(requests=QUANTITIES, limits=QUANTITIES),
            ),
            suspend={"type": "boolean"},
        ),
    ),
}


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


def test_there_is_a_manifest_for_each_engine() -> None:
    kinds = {document["kind"] for document in DOCUMENTS.values()}
    assert kinds == {"Service", "Job", "JobSet", "ClusterTrainingRuntime", "TrainJob"}
    assert len(JOBS) == 3


CORE = {name: document for name, document in DOCUMENTS.items() if document["kind"] not in SCHEMAS} | JOBS


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


CUSTOM = {name: document for name, document in DOCUMENTS.items() if document["kind"] in SCHEMAS}


@pytest.mark.parametrize("name", CUSTOM)
def test_what_others_have_added_has_their_fields_only(name: str) -> None:
    schema = SCHEMAS[CUSTOM[name]["kind"]]
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(CUSTOM[name], schema)
    wrong = {**CUSTOM[name], "spec": {**CUSTOM[name]["spec"], "numnodes": 1}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


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
    # /healthz looks for up to 3 s.
    assert rank["livenessProbe"]["timeoutSeconds"] > 3


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


@pytest.mark.parametrize("path", [*MANIFESTS, FOLDER / "Dockerfile"], ids=lambda path: path.name)
def test_every_file_says_that_no_cluster_was_at_hand(path: Path) -> None:
    comment = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    assert re.search(r"no cluster was at hand|nor a cluster was at hand", comment)


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, each with its arguments on one line."""
    text = "\n".join(line for line in (FOLDER / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def test_the_image_has_the_wheel_only_and_is_not_roots() -> None:
    found = instructions()
    stages = [index for index, (word, _) in enumerate(found) if word == "FROM"]
    assert len(stages) == 2
    assert found[stages[0]][1].endswith(" AS wheel")
    # The base is an argument, before the first stage; without it there is no CUDA.
    assert found[stages[1]] == ("FROM", "${BASE}")
    (base,) = [rest for word, rest in found[: stages[0]] if word == "ARG"]
    assert base.startswith("BASE=python:")
    last = found[stages[1] :]
    assert [rest for word, rest in last if word in ("COPY", "ADD")] == ["--from=wheel /wheel/ /wheel/"]
    (user,) = [rest for word, rest in last if word == "USER"]
    assert user.isdecimal()
    assert int(user) > 0
    # Nothing is installed as that user, nor by root afterwards.
    after = last[last.index(("USER", user)) :]
    assert {word for word, _ in after} == {"USER", "WORKDIR", "CMD"}


def test_the_context_of_the_image_has_what_the_wheel_is_built_from() -> None:
    lines = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert "*" in lines
    assert sorted(name for name in kept if not (ROOT / name).exists()) == []
    assert {"Cargo.toml", "Cargo.lock", "pyproject.toml", "python", "rust"} <= set(kept)
