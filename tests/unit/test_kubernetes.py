"""The files of deploy/kubernetes: valid, and they say what Bagua reads. No cluster has them applied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
