"""Prints digests of the results of all verbs and of all algorithms' weights after 20 steps, to compare two builds.

    PYTHONPATH=BEFORE/python python tools/digests.py > before
    PYTHONPATH=AFTER/python python tools/digests.py > after && diff before after

A line is `case digest`; a digest is of the bytes of all ranks. The worlds are 2, 3 and 4 ranks on one host, two
pretended hosts with 2 + 2 and 2 + 1 ranks, and 2 + 2 ranks without shared memory, whose group is flat unless an
algorithm is hierarchical. Inputs are random numbers of fixed seeds. The verbs of benchmarks/collectives.py run on
ordinary tensors and in arenas, the others on ordinary tensors.

Left out are `async` (asynchronous averaging) and `bytegrad` with compression="auto": what they compute depends on time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Ranks of each host, and the transport where it is not chosen automatically.
WORLDS = ("2", "3", "4", "2+2", "2+1", "2+2/tcp")
#: Below, and several times above, the sizes at which collectives change their algorithm or work chunk by chunk.
SIZES = (1 << 10, 48 << 10, 3 << 20)
STEPS = 20
#: Several buckets of the model below, the last of them not full.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "BAGUA_DEFAULT_BUCKET_SIZE": str(96 << 10)}
CODECS = ("minmax_u8", "f16", "bf16", "block_i8", "onebit", "top_k", "random_k", "int4")
LIMIT = 900.0


def digest(parts: Iterator[bytes]) -> str:
    """The first 16 digits of a SHA-256."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:16]


def numbers(case: str, rank: int, dtype: str, count: int) -> Any:
    """Random numbers for a case as an array that has the bytes of elements of `dtype`."""
    import numpy as np

    seed = hashlib.sha256(f"{case} {rank}".encode()).digest()
    values = np.random.default_rng(list(seed)).standard_normal(count, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(dtype)


def verbs(rank: int, ranks: int, folder: str) -> Iterator[tuple[str, bytes]]:
    """The verbs of benchmarks/collectives.py."""
    from contenders import CONTENDERS, DTYPES, OURS, VERBS, Buffers, Case

    for name in OURS:
        contender = CONTENDERS[name](rank, ranks, folder)
        for case in (Case(verb, dtype, size) for verb in VERBS for dtype in DTYPES for size in SIZES):
            contender.begin(case, 1)
            buffers = Buffers(case, rank, ranks, contender.empty)
            buffers.rewrite()
            buffers.src[:] = numbers(str(case), rank, case.dtype, len(buffers.src))
            call = contender.call(buffers)
            assert call is not None
            call()
            yield f"{case}, {name}", buffers.dst.tobytes()


def other_verbs(rank: int, ranks: int) -> Iterator[tuple[str, bytes]]:
    """The verbs and operations that the benchmark does not measure."""
    import torch

    import bagua.torch_api as api

    for size in SIZES:
        each = size // 4 // ranks
        own = torch.from_numpy(numbers(f"others {size}", rank, "float32", each * ranks))
        root = ranks - 1
        for op in (api.ReduceOp.AVG, api.ReduceOp.MAX, api.ReduceOp.PRODUCT):
            out = torch.zeros_like(own)
            api.allreduce(own, out, op)
            yield f"all_reduce {op.name} of {size}", out.numpy().tobytes()
            api.reduce(own, out, root, op)
            yield f"reduce {op.name} of {size}", out.numpy().tobytes()
        whole, shard = torch.zeros(each * ranks), torch.zeros(each)
        api.gather(own[:each].clone(), whole, root)
        yield f"gather of {size}", whole.numpy().tobytes()
        api.scatter(own, shard, root)
        yield f"scatter of {size}", shard.numpy().tobytes()
        # Rank r sends r + s + 1 elements to rank s.
        sent, got = [rank + s + 1 for s in range(ranks)], [s + rank + 1 for s in range(ranks)]
        starts = [sum(sent[:s]) for s in range(ranks)]
        api.alltoall_v(own, sent, starts, whole, got, [sum(got[:s]) for s in range(ranks)])
        yield f"all_to_all_v of {size}", whole.numpy().tobytes()


def algorithms() -> Iterator[tuple[str, Callable[[Any], tuple[Any, Any]]]]:
    """A name, and a function from a model's parameters to its algorithm and optimizer."""
    import torch

    from bagua.torch_api.algorithms import bytegrad, decentralized, gradient_allreduce, local_sgd, powersgd, q_adam

    def row(name: str, make: Callable[..., Any], **options: Any) -> tuple[str, Callable[[Any], tuple[Any, Any]]]:
        shown = ", ".join(f"{key}={value}" for key, value in options.items())

        def both(parameters: Any) -> tuple[Any, Any]:
            return make(**options), torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

        return f"{name}({shown})", both

    for hierarchical in (False, True):
        for average in (False, True):
            yield row(
                "gradient_allreduce",
                gradient_allreduce.GradientAllReduceAlgorithm,
                hierarchical=hierarchical,
                average=average,
            )
        for compression in (None, *CODECS):
            for feedback in (False, True)[: 1 if compression is None else 2]:
                yield row(
                    "bytegrad",
                    bytegrad.ByteGradAlgorithm,
                    hierarchical=hierarchical,
                    compression=compression,
                    error_feedback=feedback,
                )
        for mode in ("all", "shift_one", "ring", "exponential", "one_peer_exponential"):
            for interval in (1, 3):
                yield row(
                    "decentralized",
                    decentralized.DecentralizedAlgorithm,
                    hierarchical=hierarchical,
                    peer_selection_mode=mode,
                    communication_interval=interval,
                )
        for compression in CODECS:
            yield row(
                "low_precision_decentralized",
                decentralized.LowPrecisionDecentralizedAlgorithm,
                hierarchical=hierarchical,
                compression=compression,
            )
        for compression, feedback in ((None, False), ("minmax_u8", True)):
            options = {"hierarchical": hierarchical, "compression": compression, "error_feedback": feedback}
            for name, make in (("local_sgd", local_sgd.LocalSGDAlgorithm), ("diloco", local_sgd.DiLoCoAlgorithm)):
                yield row(name, make, communication_interval=4, **options)

        def qadam(parameters: Any, hierarchical: bool = hierarchical) -> tuple[Any, Any]:
            optimizer = q_adam.QAdamOptimizer(parameters, lr=0.01, warmup_steps=6)
            return q_adam.QAdamAlgorithm(optimizer, hierarchical), optimizer

        yield f"qadam(hierarchical={hierarchical})", qadam
    yield row("powersgd", powersgd.PowerSGDAlgorithm)


def training(rank: int) -> Iterator[tuple[str, bytes]]:
    """Weights after some steps; the text of the error where an algorithm refuses the world."""
    import torch

    import bagua.torch_api  # with_bagua

    assert bagua.torch_api.is_initialized()
    for name, make in algorithms():
        torch.manual_seed(rank)
        model = torch.nn.Sequential(
            torch.nn.Linear(31, 257),
            torch.nn.Tanh(),
            torch.nn.Linear(257, 127),
            torch.nn.Tanh(),
            torch.nn.Linear(127, 5),
        )
        algorithm, optimizer = make(model.parameters())
        inputs = torch.randn(STEPS, 8, 31, generator=torch.Generator().manual_seed(100 + rank))
        try:
            wrapped = model.with_bagua([optimizer], algorithm)
            for batch in inputs:
                optimizer.zero_grad()
                wrapped(batch).square().mean().backward()
                optimizer.step()
        except ValueError as error:
            yield name, f"{error}".encode()
            continue
        yield name, b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def run_rank(folder: str) -> None:
    """The process of a rank: writes the digest of each case."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torch

    import bagua.torch_api as api

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    api.init_process_group()
    with open(Path(folder, str(rank)), "w", encoding="utf-8") as file:
        for cases in (verbs(rank, ranks, folder), other_verbs(rank, ranks), training(rank)):
            for case, data in cases:
                json.dump([case, digest(iter([data]))], file)
                file.write("\n")
    api.destroy_process_group()


def run_world(world: str) -> dict[str, str]:
    """The digest of each case in a world. RuntimeError when a rank failed."""
    sizes, _, transport = world.partition("/")
    hosts = [(host, local, int(size)) for host, size in enumerate(sizes.split("+")) for local in range(int(size))]
    with tempfile.TemporaryDirectory(prefix="bagua-digests-") as folder, socket.socket() as reserved:
        # Bound and not listening: no other process gets the port before rank 0 listens there.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        command = [sys.executable, __file__, "--rank", folder]
        started = []
        for rank, (host, local, size) in enumerate(hosts):
            place = {
                "RANK": rank,
                "WORLD_SIZE": len(hosts),
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": size,
                "GROUP_RANK": host,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "BAGUA_HOST_ID": f"pretended-host-{host}",
                "BAGUA_TRANSPORT": transport or "auto",
            }
            environment = {**os.environ, **ENVIRONMENT, **{key: str(value) for key, value in place.items()}}
            started.append(subprocess.Popen(command, env=environment))
        try:
            codes = [process.wait(LIMIT) for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            raise RuntimeError(f"the ranks of {world} ended with {codes}; their output is above")
        lines = [Path(folder, str(rank)).read_text(encoding="utf-8").splitlines() for rank in range(len(hosts))]
        by_rank = [dict(json.loads(line) for line in ranks) for ranks in lines]
    return {case: digest(ranks[case].encode() for ranks in by_rank) for case in by_rank[0]}


def main() -> None:
    """Parses the command line, runs the worlds, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--rank", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.rank)
        return
    for world in args.worlds:
        for case, found in run_world(world).items():
            print(f"{world} ranks: {case} {found}", flush=True)


if __name__ == "__main__":
    main()
