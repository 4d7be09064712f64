"""The strategies of bagua.lightning before any process is started."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make setup")

import torch

import bagua

if TYPE_CHECKING:
    import bagua.lightning

pytestmark = pytest.mark.skipif(
    not (find_spec("lightning") and find_spec("pytorch_lightning")), reason="Lightning is not installed: make setup"
)

NAMESPACES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
START = {"bagua": "popen", "bagua_spawn": "spawn", "bagua_fork": "fork", "bagua_notebook": "fork"}


@pytest.fixture(autouse=True, scope="module")
def _lightning() -> None:
    """Imports it. Not at the top: it takes 3 s, and every process of pytest imports this module."""
    importlib.import_module("bagua.lightning")


@pytest.fixture
def namespace() -> str:
    return "lightning"


def misconfigured(namespace: str) -> type[Exception]:
    found: type[Exception] = importlib.import_module(
        f"{NAMESPACES[namespace][0]}.utilities.exceptions"
    ).MisconfigurationException
    return found


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_names_are_registered_once_in_both_namespaces(namespace: str) -> None:
    training, fabric = (importlib.import_module(f"{name}.strategies") for name in NAMESPACES[namespace])
    ours, fabrics = bagua.lightning.strategies(namespace)
    for registry, made in ((training.StrategyRegistry, ours), (fabric.STRATEGY_REGISTRY, fabrics)):
        for name, start_method in START.items():
            strategy = registry.get(name)
            assert type(strategy) is made
            assert strategy._start_method == start_method
        made.register_strategies(registry)
    assert issubclass(ours, training.DDPStrategy)
    assert issubclass(ours, training.ParallelStrategy)
    assert issubclass(fabrics, fabric.DDPStrategy)
    importlib.reload(importlib.import_module(f"bagua.lightning.{namespace}_classes"))


def test_the_classes_of_the_package_are_those_of_lightning() -> None:
    assert bagua.lightning.strategies()[0].__mro__[-1] is object
    assert bagua.lightning.BaguaStrategy.__module__ == "bagua.lightning.lightning_classes"
    theirs = bagua.lightning.strategies("pytorch_lightning")
    assert not {kind.__module__ for kind in theirs} & {"bagua.lightning.lightning_classes"}
    with pytest.raises(ValueError, match="'lightning' and 'pytorch_lightning', not 'fastai'"):
        bagua.lightning.strategies("fastai")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"algorithm": "gossip"}, "no algorithm 'gossip'; known: .*gradient_allreduce"),
        ({"algorithm": 3}, "algorithm must be an Algorithm or the name of one; got 3"),
        ({"find_unused": True}, "'gradient_allreduce' has no option 'find_unused'; it has hierarchical, average"),
        ({"algorithm": "bytegrad", "compression": "zip"}, "zip"),
        ({"algorithm": "decentralized", "peer_selection_mode": "unknown"}, "unknown"),
        ({"algorithm": "async", "sync_interval_ms": "often"}, "async"),
        ({"algorithm": "qadam", "q_adam_optimizer": None}, "'qadam' has no option 'q_adam_optimizer'"),
        ({"algorithm": "qadam", "compression": "zip"}, "zip"),
    ],
)
def test_what_an_algorithm_does_not_take_is_refused_by_name(
    namespace: str, arguments: dict[str, Any], text: str
) -> None:
    for strategy in bagua.lightning.strategies(namespace):
        with pytest.raises(misconfigured(namespace), match=f"(?s)BaguaStrategy: .*{text}"):
            strategy(**arguments)


def test_an_algorithm_can_be_given_itself_but_not_with_options(namespace: str) -> None:
    from bagua.torch_api.algorithms import Algorithm

    strategy = bagua.lightning.strategies(namespace)[0]
    strategy(Algorithm.init("bytegrad"))
    with pytest.raises(misconfigured(namespace), match="average"):
        strategy(Algorithm.init("bytegrad"), average=False)


def test_qadam_takes_one_of_its_optimizers_and_one_scheduler() -> None:
    from bagua.lightning import algorithm_options
    from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

    def optimizer() -> QAdamOptimizer:
        return QAdamOptimizer([torch.nn.Parameter(torch.zeros(2))])

    assert algorithm_options.make_algorithm("qadam", {}, [optimizer()], 1) is not None
    for optimizers, schedulers in (([], 0), ([optimizer(), optimizer()], 0), ([optimizer()], 2)):
        with pytest.raises(
            algorithm_options.Refused, match="Bagua QAdam can only accept one QAdamOptimizer and one LR Scheduler"
        ):
            algorithm_options.make_algorithm("qadam", {}, optimizers, schedulers)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_strategy_can_be_pickled(namespace: str) -> None:
    for strategy in bagua.lightning.strategies(namespace):
        made = pickle.loads(pickle.dumps(strategy("bytegrad", hierarchical=False, bucket_size=100)))
        assert type(made) is strategy
        assert made._bagua_kwargs == {"hierarchical": False}
        assert made._wrapping["bucket_size"] == 100


def test_the_start_method_chooses_the_launcher(namespace: str) -> None:
    trainer = importlib.import_module(NAMESPACES[namespace][0]).Trainer
    for name, launcher in (("bagua", "_SubprocessScriptLauncher"), ("bagua_fork", "_MultiProcessingLauncher")):
        made = trainer(strategy=name, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
        assert type(made.strategy.launcher).__name__ == launcher


def test_another_device_is_refused(namespace: str) -> None:
    for strategy, setup in zip(
        bagua.lightning.strategies(namespace), ("setup_distributed", "_setup_distributed"), strict=True
    ):
        made = strategy(parallel_devices=[torch.device("meta")])
        with pytest.raises(misconfigured(namespace), match="the device is meta, and only the CPU is supported"):
            getattr(made, setup)()


def test_an_environment_of_our_launchers_is_taken(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = bagua.lightning.strategies(namespace)[0]
    assert strategy().cluster_environment is None
    job = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1", "BAGUA_SERVICE_PORT": "29501"}
    for name, value in {**job, "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    found = strategy().cluster_environment
    assert found.creates_processes_externally
    assert (found.main_address, found.main_port, found.service_port) == ("host0", 29500, 29501)
    assert (found.global_rank(), found.world_size(), found.local_rank(), found.node_rank()) == (3, 4, 1, 1)


def test_without_lightning_the_package_imports_and_says_what_to_install() -> None:
    code = """
import sys
for name in ("lightning", "pytorch_lightning"):
    sys.modules[name] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if "lightning" in name and "bagua" not in name else find(name, *a)
import bagua.lightning
try:
    bagua.lightning.BaguaStrategy
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.strip() == 'lightning is not installed: pip install "lightning>=2.6.4"', done.stderr


@pytest.mark.slow
def test_importing_bagua_imports_no_lightning() -> None:
    code = "import sys, bagua.torch_api; print([m for m in sys.modules if m.startswith(('lightning', 'pytorch_l'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.strip() == "[]", done.stderr
