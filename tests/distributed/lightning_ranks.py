"""The cases of test_lightning.py. Two ranks run many of them in one world, as importing Lightning takes seconds."""

from __future__ import annotations

import os
import re
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.front_ends import REFERENCE, Fabric
from tests.distributed.lightning_kit import SAMPLES, Kit, loader, weights
from tests.distributed.training_rows import ROWS, train_rows

#: Trained by strategy="ddp" on gloo and by ours: options of the model, and of the Trainer.
PARITY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "momentum with a schedule": ({"optimizer": "scheduled"}, {"max_epochs": 2}),
    "accumulated and clipped": ({"optimizer": "adam"}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    "manual with a local pass": ({"manual": True, "local_first": True}, {}),
    "64-true": ({}, {"precision": "64-true"}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
    "bf16-true": ({}, {"precision": "bf16-true"}),
    "unused": ({"unused": True}, {}),
    "validated": ({}, {"validated": True, "num_sanity_val_steps": 1, "max_epochs": 2}),
    "validated within the epoch": ({}, {"validated": True, "val_check_interval": 2, "max_steps": 5}),
    "validated where gradients accumulate": (
        {"optimizer": "momentum"},
        {"validated": True, "val_check_interval": 3, "accumulate_grad_batches": 2, "max_steps": 2},
    ),
}
#: Of these `make test` trains those that pass something on of each kind: a schedule, clipping, a loop of the user, a
#: precision, unused parameters, a validation.
QUICK = (
    "momentum with a schedule",
    "accumulated and clipped",
    "manual with a local pass",
    "bf16-mixed",
    "unused",
    "validated",
)

#: Rows of the table that Fabric trains.
FABRIC = [name for name, row in ROWS.items() if 2 in row.sizes and row.of(Fabric()) and not (row.slow or row.left_out)]

Case = Callable[[int, Kit, Path], Any]


def run(rank: int, namespace: str, trainings: list[str], rows: list[str], cases: list[str]) -> dict[str, Any]:
    """The weights after each of these trainings of PARITY with both strategies, what Fabric trained, and what became of
    the cases.
    """
    # It imports Lightning, which the process that collects the tests need not.
    from bagua.lightning.join_and_leave import fail, leave

    torch.set_num_threads(1)
    kit = Kit(namespace)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for name in trainings:
            found[f"ddp: {name}"] = parity(kit, folder, name, "ddp_find_unused_parameters_true", sends_buffers=True)
        found[REFERENCE.name] = train_rows(REFERENCE, rank, rows)
        dist.destroy_process_group()
        for name in trainings:
            found[name] = parity(kit, folder, name, kit.strategy(find_unused_parameters=name == "unused"))
        found[Fabric.name] = train_rows(Fabric(kit), rank, rows)
        for name in cases:
            torch.manual_seed(rank)
            try:
                CASES[name](rank, kit, folder)
                if dist.is_initialized():
                    dist.barrier()
                found[name] = ""
            except Exception as error:
                found[name] = traceback.format_exc()
                # The next case has a world of its own.
                fail(error)
                leave()
    return found


def parity(kit: Kit, folder: Path, name: str, strategy: Any, *, sends_buffers: bool = False) -> tuple[bytes, bool]:
    """The weights and buffers, and whether the logged extremes of the gradients over the ranks were equal.

    ``sends_buffers``: rank 0's are sent at the end, as torch's DDP does before an evaluation.
    """
    model, options = PARITY[name]
    trained, trainer = kit.fit(strategy, folder, kit.model(**model), **options)
    logged = trainer.callback_metrics
    for buffer in trained.buffers() if sends_buffers else ():
        dist.broadcast(buffer, 0)
    return weights(trained).numpy().tobytes(), bool(logged.get("gmin", 0) == logged.get("gmax", 0))


def calls() -> int:
    """Operations that carried data since the process began."""
    import bagua

    groups = bagua.stats()["groups"].values()
    return sum(int(op["calls"]) for group in groups for op in group["ops"].values())


def is_equal(tensor: torch.Tensor, tolerance: float = 0.0) -> bool:
    """Returns True if the ranks have the same values."""
    both = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(both, tensor)
    return float((both[0] - both[1]).abs().max()) <= tolerance


def parameters(model: Any) -> torch.Tensor:
    """Without buffers, which are each rank's own after its last forward."""
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])


# --- cases: each runs on both ranks, and fails by an exception --------------------------------------------------------


def reductions(rank: int, kit: Kit, folder: Path) -> None:
    """B11."""
    strategy = kit.strategy()
    for word, wanted in {"mean": 1.5, "avg": 1.5, None: 1.5, "sum": 3, "MAX": 2, "min": 1, "product": 2}.items():
        tensor = torch.tensor([rank + 1.0])
        assert strategy.reduce(tensor, reduce_op=word) is tensor
        assert tensor.item() == wanted, word
    ops = {dist.ReduceOp.SUM: 3, dist.ReduceOp.MAX: 2, dist.ReduceOp.BOR: 3, dist.ReduceOp.BAND: 0}
    for op, wanted in ops.items():
        assert strategy.reduce(torch.tensor(rank + 1), reduce_op=op).item() == wanted, op
    # -1 and -2: cut towards zero.
    assert strategy.reduce(torch.tensor(-1 - rank), reduce_op="mean").item() == -1
    assert strategy.reduce("text") == "text"
    before = calls()
    for arguments in ({"reduce_op": "median"}, {"reduce_op": 3}, {"group": dist.group.WORLD}):
        raises(ValueError, "BaguaStrategy", lambda given=arguments: strategy.reduce(torch.ones(1), **given))
    assert calls() == before
    assert kit.fabric_strategy().all_reduce(torch.tensor(rank + 1.0)).item() == 1.5


def moves(rank: int, kit: Kit, folder: Path) -> None:
    """B12."""
    _, trainer = kit.fit("bagua", folder, max_steps=1)
    strategy = trainer.strategy
    for source in (0, 1):
        assert strategy.broadcast({"from": rank, "x": [rank]}, source) == {"from": source, "x": [source]}
    gathered = strategy.all_gather(torch.full((3,), float(rank)))
    assert gathered.tolist() == [[0.0] * 3, [1.0] * 3]
    assert strategy.reduce_boolean_decision(rank == 0, all=False)
    assert not strategy.reduce_boolean_decision(rank == 0, all=True)


def steps_are_counted_in_training_alone(rank: int, kit: Kit, folder: Path) -> None:
    """B13: the engine's steps are the training batches, with sanity checks, validation and self(batch) beside them."""
    model = kit.model()
    recorder = kit.recorder(lambda trainer, module: trainer.strategy.model.bagua_ddp.step)
    options = {"num_sanity_val_steps": 1, "limit_train_batches": 4, "val_check_interval": 2}
    trainer = kit.trainer("bagua", folder, callbacks=[recorder], **options)
    trainer.fit(model, loader(), loader())
    assert recorder.found == [0, 1, 2, 3]


@pytest.mark.slow
def checkpoints_fit_everywhere(rank: int, kit: Kit, folder: Path) -> None:
    """B14."""
    shared = Path(kit.strategy().broadcast(str(folder)))
    saver = kit.pl.callbacks.ModelCheckpoint(dirpath=shared / "saved", filename="last", save_last=False)
    options = {"enable_checkpointing": True, "max_epochs": 1}
    model, trainer = kit.fit("bagua", folder, kit.model("adam"), callbacks=[saver], **options)
    path = shared / "saved" / "last.ckpt"
    state = torch.load(path, weights_only=False)
    assert set(state["state_dict"]) == set(kit.model().state_dict())
    loaded = kit.model.load_from_checkpoint(path, optimizer="adam")
    # Buffers are those of rank 0, which wrote.
    assert torch.equal(parameters(loaded), parameters(model))
    results = []
    for strategy in ("bagua", kit.strategy("gradient_allreduce", flatten=False)):
        again = kit.trainer(strategy, folder, max_epochs=2)
        other = kit.model("adam", seed=8)
        again.fit(other, loader(), ckpt_path=str(path))
        assert again.global_step == 2 * trainer.global_step
        results.append(parameters(other))
    whole, _ = kit.fit("bagua", folder, kit.model("adam"), max_epochs=2)
    assert torch.equal(*results)
    assert torch.equal(results[0], parameters(whole))


def teardown_leaves_nothing(rank: int, kit: Kit, folder: Path) -> None:
    """B15."""
    kit.strategy().teardown()
    model, trainer = kit.fit("bagua", folder, max_steps=2)
    assert trainer.strategy.model is model
    left = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    assert not any(left)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    before = calls()
    model.loss(next(iter(loader()))).backward()
    assert calls() == before
    # The same Trainer again, with one reduction per bucket and step.
    look = kit.recorder(lambda trainer, module: trainer.strategy.model.bagua_buckets[0].backend_bucket.step)
    trainer = kit.trainer("bagua", folder, max_steps=2, callbacks=[look])
    trainer.fit(model, loader())
    assert look.found == [1, 2]


def evaluation_changes_nothing(rank: int, kit: Kit, folder: Path) -> None:
    """B17, B22."""
    model, trainer = kit.fit("bagua", folder, max_steps=2)
    before = weights(model)
    trainer.validate(model, loader(), verbose=False)
    (tested,) = trainer.test(model, loader(), verbose=False)
    assert torch.isfinite(torch.tensor(tested["test"]))
    assert is_equal(torch.tensor([tested["test"]]))
    predicted = trainer.predict(model, loader())
    assert sum(len(batch) for batch in predicted) == SAMPLES // 2
    # Rank 0's states where nothing was fitted.
    after = weights(model)
    assert torch.equal(after, before) if rank == 0 else torch.equal(parameters(model), parameters(model))
    assert is_equal(after)
    other = kit.model(seed=rank)
    kit.trainer("bagua", folder).validate(other, loader(), verbose=False)
    assert is_equal(weights(other))
    assert torch.equal(weights(other), weights(kit.model(seed=0)))


def ranks_and_samplers(rank: int, kit: Kit, folder: Path) -> None:
    """B18."""
    _, trainer = kit.fit("bagua", folder, max_steps=1)
    strategy = trainer.strategy
    assert (strategy.global_rank, strategy.local_rank, strategy.world_size) == (rank, rank, 2)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": rank}
    sampler = trainer.train_dataloader.sampler
    assert (sampler.num_replicas, sampler.rank) == (2, rank)
    os.environ["BAGUA_SERVICE_PORT"] = "1234"
    # Lightning's own environment takes the world size away at the end of a fit.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    try:
        _, trainer = kit.fit("bagua", folder, max_steps=1)
        environment = trainer.strategy.cluster_environment
        assert type(environment).__name__ == "BaguaEnvironment"
        assert environment.service_port == 1234
        assert (environment.global_rank(), environment.world_size()) == (rank, 2)
        assert trainer.strategy.launcher.cluster_environment.creates_processes_externally
    finally:
        del os.environ["BAGUA_SERVICE_PORT"]


def each_algorithm_trains(rank: int, kit: Kit, folder: Path) -> None:
    """B5, B10: what is near gradient_allreduce, and equal on all ranks where the algorithm says so."""
    reference, _ = kit.fit("bagua", folder)
    choices: list[tuple[str, dict[str, Any], float | None, bool]] = [
        ("gradient_allreduce", {"average": True, "hierarchical": True}, 0.0, True),
        ("bytegrad", {"hierarchical": False}, 1e-2, True),
        ("powersgd", {"rank": 2}, None, True),
        ("decentralized", {"hierarchical": False, "peer_selection_mode": "shift_one"}, None, False),
        ("low_precision_decentralized", {"hierarchical": False}, None, False),
        ("local_sgd", {"communication_interval": 2}, None, False),
        ("diloco", {"communication_interval": 2}, None, False),
        ("async", {"sync_interval_ms": 5}, None, False),
    ]
    for name, options, near, equal in choices:
        model, _ = kit.fit(kit.strategy(name, **options), folder)
        found = parameters(model)
        assert torch.isfinite(found).all(), name
        assert not equal or is_equal(found), name
        if near is not None:
            distance = (found - parameters(reference)).norm() / parameters(reference).norm()
            assert distance <= near, (name, distance)


def qadam_has_its_optimizer(rank: int, kit: Kit, folder: Path) -> None:
    """B6."""
    text = "Bagua QAdam can only accept one QAdamOptimizer and one LR Scheduler."
    for wrong in ("sgd", "adam"):
        trainer = kit.trainer(kit.strategy("qadam"), folder, max_steps=1)
        # Without a report to the others, which have the same error.
        trainer.strategy.on_exception = lambda exception: None
        raises(kit.misconfigured, text, lambda trainer=trainer, wrong=wrong: trainer.fit(kit.model(wrong), loader()))
    strategy = kit.strategy("qadam", hierarchical=False)
    model, _ = kit.fit(strategy, folder, kit.model("qadam"), max_steps=3)
    reference, _ = kit.fit("bagua", folder, kit.model("adam"), max_steps=3)
    assert torch.allclose(parameters(model), parameters(reference), atol=1e-6)
    model, _ = kit.fit(kit.strategy("qadam", hierarchical=False), folder, kit.model("qadam"), max_steps=6)
    assert is_equal(parameters(model))


def async_pauses_in_validation_and_ends(rank: int, kit: Kit, folder: Path) -> None:
    """B8."""
    import threading

    def hold(trainer: Any, module: Any) -> Any:
        return trainer.strategy.model.bagua_algorithm.stats()["state"]

    class Watch(kit.pl.Callback):  # type: ignore[misc, name-defined]
        """Records the state of the averaging during validation."""

        def __init__(self) -> None:
            self.ranks: list[Any] = []

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            """Looks."""
            self.ranks.append(trainer.strategy.model.bagua_algorithm._aborted)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            """Loads, as the search for a learning rate does."""
            if batch_idx == 1:
                trainer.strategy.load_model_state_dict({"state_dict": trainer.strategy.lightning_module_state_dict()})

    recorder, watch = kit.recorder(hold), Watch()
    trainer = kit.trainer(
        kit.strategy("async", sync_interval_ms=2), folder, callbacks=[recorder, watch], val_check_interval=6
    )
    model = kit.model()
    trainer.fit(model, loader(), loader())
    assert "running" in recorder.found
    assert watch.ranks
    assert all(watch.ranks)
    assert torch.isfinite(weights(model)).all()
    trainer.test(model, loader(), verbose=False)
    dist.barrier()
    names = [thread.name for thread in threading.enumerate()]
    assert not any("averag" in name for name in names), names
    model, _ = kit.fit(kit.strategy("async", sync_interval_ms=1e9), folder, max_steps=3)  # no round before the end
    assert is_equal(parameters(model))


def one_that_raises_ends_both(rank: int, kit: Kit, folder: Path) -> None:
    """B16, B27: and afterwards the same processes can train again."""
    import time

    from bagua.errors import PeerRaisedError

    model = kit.model()
    model.fail_at = 2 if rank == 1 else None
    begun = time.monotonic()
    wanted: tuple[type[Exception], str] = (FloatingPointError, "batch 2") if rank == 1 else (PeerRaisedError, "rank 1")
    raises(*wanted, lambda: kit.fit("bagua", folder, model))
    # Far below the time of an operation, 300 s.
    assert time.monotonic() - begun < 100
    assert not dist.is_initialized()
    again(rank, kit, folder)
    model.fail_at = 0
    raises(FloatingPointError, "batch 0", lambda: kit.fit("bagua", folder, model))
    again(rank, kit, folder)
    # A parameter that gets no gradient is an error in the first step, and not a hang.
    raises(Exception, "alone", lambda: kit.fit("bagua", folder, kit.model(unused=True)))
    again(rank, kit, folder)

    class Nothing(kit.model):  # type: ignore[misc, name-defined]
        """A step without a loss."""

        def training_step(self, batch: Any, index: int) -> None:
            """Nothing."""

    raises(RuntimeError, "", lambda: kit.fit("bagua", folder, Nothing()))
    again(rank, kit, folder)


def again(rank: int, kit: Kit, folder: Path) -> None:
    """A fit after one that failed, in another world."""
    model, _ = kit.fit("bagua", folder, max_steps=2)
    assert is_equal(parameters(model))


def all_raise_in_a_world_of_gloo(rank: int, namespace: str, folder: str) -> bool:
    """B16: the next fit has another group beside torch's world. Not a case, because that world stays."""
    kit = Kit(namespace)
    model, _ = kit.fit(kit.strategy(process_group_backend="gloo"), Path(folder))
    for _ in range(2):
        model.fail_at = 2
        raises(FloatingPointError, "batch 2", lambda: kit.fit(kit.strategy(), Path(folder), model))
        model.fail_at = None
        kit.fit(kit.strategy(), Path(folder), model)
    return dist.get_backend() == "gloo" and is_equal(parameters(model))


def fabric_trains(rank: int, kit: Kit, folder: Path) -> None:
    """F1."""
    reference, _ = _fabric_fit(kit, kit.fabric_strategy())
    assert is_equal(parameters(reference))
    accumulated, sent = _fabric_fit(kit, kit.fabric_strategy(), accumulate=2)
    _, sent_always = _fabric_fit(kit, kit.fabric_strategy(), accumulate=1)
    assert sent < sent_always
    assert is_equal(parameters(accumulated))
    fabric = kit.fabric.Fabric(accelerator="cpu", devices=2, strategy="bagua")
    fabric.launch()
    assert fabric.all_reduce(torch.tensor(rank + 1.0), reduce_op="sum").item() == 3
    assert fabric.broadcast(rank, src=1) == 1
    fabric.barrier()
    module, optimizer = _network(), None
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    alone = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(optimizer)
    fabric.backward(alone(torch.ones(2, 12) * (rank + 1)).sum())
    fabric.clip_gradients(alone, optimizer, max_norm=0.5)
    optimizer.step()
    assert is_equal(parameters(module))
    shared = Path(fabric.broadcast(str(folder)))
    fabric.save(shared / "fabric.pt", {"model": alone, "optimizer": optimizer})
    saved = torch.load(shared / "fabric.pt", weights_only=False)
    assert set(saved["model"]) == set(_network().state_dict())
    other = fabric.setup_module(_network(seed=9))
    fabric.load(shared / "fabric.pt", {"model": other})
    assert torch.equal(parameters(other), parameters(alone))
    for name in ("qadam", "low_precision_decentralized"):
        fabric = kit.fabric.Fabric(accelerator="cpu", devices=2, strategy=kit.fabric_strategy(name))
        fabric.launch()
        raises(RuntimeError, "jointly", lambda fabric=fabric: fabric.setup_module(_network()))
    raises(TypeError, "set up", lambda: fabric.strategy._backward_sync_control.no_backward_sync(module, True))
    _fabric_async(kit)


def _fabric_async(kit: Kit) -> None:
    fabric = kit.fabric.Fabric(accelerator="cpu", devices=2, strategy=kit.fabric_strategy("async", sync_interval_ms=2))
    fabric.launch()
    module = _network()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 12)).sum())
    optimizer.step()
    with fabric.strategy.paused(model):
        before = parameters(module).clone()
        fabric.barrier()
        assert torch.equal(before, parameters(module))
    assert len(fabric.strategy.setup_module_and_optimizers(_network(), [], None)) == 3


def _network(seed: int = 4) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def _fabric_fit(kit: Kit, strategy: Any, accumulate: int = 1) -> tuple[torch.nn.Module, int]:
    fabric = kit.fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = _network()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    before = calls()
    for index, (x, y) in enumerate(fabric.setup_dataloaders(loader())):
        waits = (index + 1) % accumulate != 0
        with fabric.no_backward_sync(model, enabled=waits):
            fabric.backward(torch.nn.functional.cross_entropy(model(x), y))
        if not waits:
            optimizer.step()
            optimizer.zero_grad()
    return module, calls() - before


def raises(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """AssertionError unless the call raises such an exception with this text."""
    with pytest.raises(kind, match=re.escape(text)):
        call()


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        reductions,
        moves,
        steps_are_counted_in_training_alone,
        checkpoints_fit_everywhere,
        teardown_leaves_nothing,
        evaluation_changes_nothing,
        ranks_and_samplers,
        each_algorithm_trains,
        qadam_has_its_optimizer,
        async_pauses_in_validation_and_ends,
        fabric_trains,
        one_that_raises_ends_both,
    )
}
