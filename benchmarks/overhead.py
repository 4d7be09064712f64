"""Measures what a blocking verb costs in Python, in a world of one rank.

    python benchmarks/overhead.py

A world of one has no peers to wait for, so the time is that of Python, the extension and the core's bookkeeping; a
barrier is a collective without data. The rows "busy thread" time the same calls one by one while another Python thread
computes: a call that releases the GIL gets it back after 5 ms.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from common import add_output_options, save_if_asked


def beside_a_busy_thread(layers: dict[str, Callable[[], Any]]) -> list[dict[str, Any]]:
    """The same calls one by one while another Python thread computes: whoever gives the GIL away waits 5 ms for it."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(100))

    thread = threading.Thread(target=compute)
    thread.start()
    rows = []
    for name, call in layers.items():
        times = []
        for _ in range(400):
            begun = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - begun)
        name = f"{name}, busy thread"
        rows.append(
            {"call": name, "ns": statistics.median(times), "ns_min": min(times), "ns_mean": statistics.fmean(times)}
        )
    over.set()
    thread.join()
    return rows


def overhead(batches: int) -> list[dict[str, Any]]:
    """Nanoseconds of a blocking all_reduce of 1 KiB in a world of one, at each layer of the Python side."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    import bagua.c10d  # noqa: F401 -- before 2.6, torch does not find the backend by itself
    import bagua.torch_api as api
    from bagua import extension, group

    uint8, float32 = extension.DTYPES["uint8"], extension.DTYPES["float32"]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
        api.init_process_group(FileStore(f"{folder}/ours", 1), 0, 1, 1)
        world = group.default(required=True)
        x = torch.ones(256)
        parts = [torch.ones(64) for _ in range(4)]
        backend: Any = dist.new_group([0], backend="bagua")
        array, address, raw, total = x.numpy(), x.data_ptr(), world.communicator, api.ReduceOp.SUM

        def begun_and_done() -> None:
            handle = api.allreduce_inplace(x, total, async_op=True)
            assert handle is not None
            handle.wait()

        layers: dict[str, Callable[[], Any]] = {
            "nothing (the loop of this measurement)": lambda: None,
            "extension, barrier (a no-op collective)": lambda: raw.run(extension.BARRIER, None, None, 0, uint8),
            "extension, by address": lambda: raw.run(
                extension.ALL_REDUCE, None, address, 256, float32, extension.OPS["sum"]
            ),
            "bagua, NumPy array": lambda: world.all_reduce(array),
            "torch_api, tensor": lambda: api.allreduce_inplace(x, total),
            "torch_api, async_op and wait": begun_and_done,
            "torch_api, four tensors coalesced": lambda: api.allreduce_coalesced_inplace(parts, total),
            "torch.distributed, backend bagua": lambda: dist.all_reduce(x, group=backend),
            "the same, async_op and wait": lambda: dist.all_reduce(x, group=backend, async_op=True).wait(),
            "torch.distributed, backend gloo": lambda: dist.all_reduce(x),
            "the same on gloo, async_op and wait": lambda: dist.all_reduce(x, async_op=True).wait(),
        }
        rows = []
        for name, call in layers.items():
            times = []
            for _ in range(batches):
                begun = time.perf_counter_ns()
                for _ in range(200):
                    call()
                times.append((time.perf_counter_ns() - begun) / 200)
            rows.append({"call": name, "ns": statistics.median(times), "ns_min": min(times)})
        rows += beside_a_busy_thread({name: layers[name] for name in list(layers)[1:]})
        if not bool((x == 1).all()):
            raise AssertionError("a sum over one rank changed the tensor")
        api.destroy_process_group()
    return rows


def main() -> None:
    """Prints nanoseconds per call at each layer, and saves them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    args = parser.parse_args()
    rows = overhead(10 if args.quick else 100)
    for row in rows:
        mean = f", mean {row['ns_mean']:.0f}" if "ns_mean" in row else ""
        print(f"{row['call']:<42}{row['ns']:>9.0f} ns (fastest {row['ns_min']:.0f}{mean})")
    save_if_asked(args, "overhead", rows)


if __name__ == "__main__":
    main()
