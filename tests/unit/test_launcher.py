"""Which rank a process is: what each launcher sets, what wins, what is refused."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

import bagua
from bagua import launcher
from bagua.errors import BaguaError
from bagua.launcher import RankInfo

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
PYTORCHJOB = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "4",
    "OMPI_COMM_WORLD_SIZE": "7",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "9"}
MASTER = {"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ("GROUP_RANK", "NODE_RANK", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    read = ("KUBERNETES_SERVICE_HOST", "TORCHELASTIC_USE_AGENT_STORE")
    for name in (*TORCHRUN, *PYTORCHJOB, *SLURM, *OPENMPI, *MPICH, *others, *read):
        monkeypatch.delenv(name, raising=False)


def put(monkeypatch: pytest.MonkeyPatch, *variables: dict[str, str]) -> None:
    for some in variables:
        for name, value in some.items():
            monkeypatch.setenv(name, value)


def test_without_anything_a_process_is_alone() -> None:
    assert launcher.place() == RankInfo(0, 1, None, None)
    assert launcher.found().name == "none"


@pytest.mark.parametrize(
    ("variables", "name", "place"),
    [
        (TORCHRUN, "environment", RankInfo(3, 8, 1, 2)),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, "torchrun", RankInfo(3, 8, 1, 2)),
        (PYTORCHJOB, "environment", RankInfo(1, 4, None, None)),
        (PYTORCHJOB | {"LOCAL_WORLD_SIZE": "1"}, "environment", RankInfo(1, 4, 0, 1)),
        (SLURM, "slurm", RankInfo(5, 6, 2, None)),
        (OPENMPI, "openmpi", RankInfo(4, 7, 0, 3)),
        (MPICH, "mpich", RankInfo(1, 9, None, None)),
        (MPICH | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "mpich", RankInfo(1, 9, 0, 2)),
    ],
    ids=["rank", "torchrun", "pytorchjob", "one rank on the host", "slurm", "openmpi", "mpich", "mpich with local"],
)
def test_each_launcher_is_recognised(
    variables: dict[str, str], name: str, place: RankInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, variables)
    assert launcher.found().name == name
    assert launcher.place() == place


def test_arguments_win_over_every_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, TORCHRUN, SLURM)
    assert launcher.place(1, 2) == RankInfo(1, 2, None, None)
    assert launcher.place(local_rank=0, local_world_size=8) == RankInfo(3, 8, 0, 8)
    assert launcher.place(rank=0) == RankInfo(0, 8, None, None)


def test_a_batch_script_outside_a_step_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, SLURM)
    monkeypatch.delenv("SLURM_STEP_ID")
    assert launcher.place() == RankInfo(0, 1, None, None)


def test_half_a_place_is_an_error_that_names_the_other_half(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BaguaError, match=r"world_size \(WORLD_SIZE\)"):
        launcher.place(rank=1)
    with pytest.raises(BaguaError, match=r"rank \(RANK\)"):
        launcher.place(world_size=2)
    put(monkeypatch, SLURM)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    with pytest.raises(BaguaError, match=r"world_size \(SLURM_STEP_NUM_TASKS\)"):
        launcher.place()
    # A RANK without WORLD_SIZE is not completed from another launcher.
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(BaguaError, match=r"world_size \(WORLD_SIZE\)"):
        launcher.place()


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="world"):
        launcher.place(rank, size)


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        (MPICH | {"PMI_SIZE": "many"}, "PMI_SIZE='many'"),
        (MASTER | {"MASTER_PORT": "70000"}, "MASTER_PORT.*70000"),
        (MASTER | {"MASTER_PORT": "http"}, "MASTER_PORT.*http"),
        (SLURM | {"SLURM_JOB_ID": "12_3"}, "SLURM_JOB_ID='12_3'"),
    ],
)
def test_a_variable_that_is_no_number_is_named_with_its_value(
    variables: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, variables)
    with pytest.raises(ValueError, match=complaint):
        launcher.master()


def test_the_address_of_rank_0_is_derived_in_a_slurm_step(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, SLURM)
    assert launcher.master() == ("gpu07", 19567)
    # Each given one wins for itself.
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert launcher.master() == ("gpu07", 29500)
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    assert launcher.master() == ("10.1.2.3", 29500)


@pytest.mark.parametrize(("job", "port"), [("7", 15007), ("90000", 15000), ("129999", 24999)])
def test_the_port_of_a_slurm_job_is_lightnings(job: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, SLURM | {"SLURM_JOB_ID": job})
    assert launcher.master()[1] == port


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is not set: start the ranks with a launcher such as torchrun"),
        (OPENMPI, "MASTER_ADDR is not set: .*mpirun -x MASTER_ADDR=host0 -x MASTER_PORT=29500"),
        (OPENMPI | {"MASTER_ADDR": "host0"}, "MASTER_PORT is not set: .*mpirun -x"),
        (MPICH, "MASTER_ADDR is not set: .*mpiexec -genv MASTER_ADDR host0 -genv MASTER_PORT 29500"),
        ({"SLURM_STEP_ID": "0"}, "MASTER_ADDR is not set: .*MASTER_ADDR=host0 MASTER_PORT=29500 srun"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "BAGUA_ELASTIC": "tcp://127.0.0.1:29500"},
            "MASTER_PORT is not set, because this is an elastic job .*: join it by bagua.torch_api.init_process_group",
        ),
    ],
    ids=["rank", "openmpi", "openmpi port", "mpich", "slurm", "elastic"],
)
def test_a_missing_address_of_rank_0_says_how_to_pass_it(
    variables: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, variables)
    with pytest.raises(BaguaError, match=complaint):
        launcher.master()


@pytest.mark.parametrize("name", ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"])
def test_one_hosts_ranks_of_openmpi_need_no_port_and_two_jobs_have_two(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = set()
    for job in ("prterun-vm-17@1", "2037645313"):
        put(monkeypatch, OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "7", name: job})
        host, port = launcher.master()
        assert host == "127.0.0.1"
        assert 15000 <= port < 25000
        # init_process_group sets RANK, and may be called again.
        monkeypatch.setenv("RANK", "4")
        monkeypatch.setenv("WORLD_SIZE", "7")
        assert launcher.master() == (host, port)
        monkeypatch.delenv("RANK")
        monkeypatch.delenv("WORLD_SIZE")
        ports.add(port)
    assert len(ports) == 2
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert launcher.master() == ("127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1"),
        ("n[3]", "n3"),
        ("n[08-11]", "n08"),
        ("n[007,1,3-4]", "n007"),
        ("gpu-[2,5]-ib0", "gpu-2-ib0"),
        ("r[1-2]n[09-10],login", "r1n09"),
    ],
)
def test_the_first_node_of_a_list_is_rank_0s(nodes: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert launcher.master()[0] == first


@pytest.mark.parametrize("nodes", ["n[1", "n1]", "n[[1]]", "n[x]", "n[]", ",n1", "n 1"])
def test_a_list_of_nodes_that_is_none_is_refused(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, SLURM | {"SLURM_STEP_NODELIST": nodes})
    with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST: .* is not a list of host names"):
        launcher.master()


def init(init_method: str = "env://") -> None:
    bagua.init(init_method=init_method)


def init_process_group() -> None:
    import bagua.torch_api

    bagua.torch_api.init_process_group()


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("join", "agent_store", "given_by"),
    [
        (init, None, "MASTER_ADDR"),
        (init, "True", "MASTER_ADDR"),
        (lambda: init("tcp://no-such-host.invalid:29500"), None, "init_method"),
        (init_process_group, None, "MASTER_ADDR"),
        (init_process_group, "True", "MASTER_ADDR"),
    ],
)
def test_a_misspelt_host_of_rank_0_ends_the_join_at_once(
    monkeypatch: pytest.MonkeyPatch, rank: str, join: Callable[[], None], agent_store: str | None, given_by: str
) -> None:
    put(monkeypatch, MASTER, {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid"})
    if agent_store is not None:
        put(monkeypatch, {"TORCHELASTIC_USE_AGENT_STORE": agent_store})
    asked = []

    def getaddrinfo(host: str, *_: Any, **__: Any) -> NoReturn:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(BaguaError) as caught:
        join()
    why = "cannot resolve 'no-such-host.invalid', the host of rank 0: Name or service not known"
    what = "init_process_group" if join is init_process_group else "init"
    fix = f"give {given_by} a name or an address that this host can look up"
    assert str(caught.value) == f"{what}: {why}; {fix}"
    assert asked == ["no-such-host.invalid"]


def test_in_a_pod_the_name_of_another_pod_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    monkeypatch.setattr(launcher, "_PAUSE", 0.0)
    missing = ["Name or service not known"] * 2

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[str]:
        if missing:
            raise socket.gaierror(socket.EAI_NONAME, missing.pop())
        return [host]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    launcher.require_name("train-0.train", "init", 300.0)
    assert not missing
    missing.append("Name or service not known")
    with pytest.raises(BaguaError, match=r"cannot resolve 'train-0\.train', the host of rank 0: Name or service"):
        launcher.require_name("train-0.train", "init", 0.0)
