"""Bagua on one GPU, as `make gpu-bench` runs it: the codec minmax_u8 against the copy bandwidth of the device and
against torch, all_reduce of two ranks that share the device against gloo's, and the step of a model against plain
torch's and DDP's.

    python benchmarks/gpu.py        # everything, in less than 8 minutes; "skipped: …" where there is no GPU

Bandwidths are bytes read and written per second, each counted once, whatever a kernel reads again. The copy bandwidth
is that of cuMemcpyDtoD in the same process. Times of the codec are the device's, by events: calls are enqueued while
the device sleeps, so that the host's part does not count. Every round times every contender once, in another order;
figures are medians. Step times alternate in blocks, and ratios are those of the blocks of one round.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Barrier, add_rank_options, machine, run_ranks, save_if_asked, show_size, this_rank, write_row

import bagua.cuda

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
DTYPES = ("float32", "bfloat16")
#: Bytes of the elements of a chunk.
CHUNKS = (4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
#: Those that torch is timed with, too.
AGAINST_TORCH = (16 * MIB, 256 * MIB)
#: Width and number of the layers of the model: 100,663,296 parameters.
WIDTH, LAYERS, BATCH = 4096, 6, 1024
#: Name, ranks, options and variables, seconds on a device.
PARTS: tuple[tuple[str, int, dict[str, Any], dict[str, str], float], ...] = (
    ("codec", 1, {}, {}, 210.0),
    ("all_reduce", 2, {"collective": "staged"}, {"BAGUA_CUDA_COLLECTIVE": "staged"}, 60.0),
    ("late", 1, {"collective": "nccl"}, {"BAGUA_CUDA_COLLECTIVE": "nccl"}, 30.0),
    ("training", 1, {"collective": "nccl", "ddp": "nccl"}, {"BAGUA_CUDA_COLLECTIVE": "nccl"}, 60.0),
    ("training", 2, {"collective": "staged", "ddp": "gloo"}, {"BAGUA_CUDA_COLLECTIVE": "staged"}, 90.0),
)


class Device:
    """torch's current device, and its clock."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")
        self._library = ctypes.CDLL(bagua.cuda.info()["driver"]["path"] or "libcuda.so.1")
        #: What the device sleeps while calls are enqueued, in its cycles: about 20 ms.
        self._cycles = 40_000_000

    def copy(self, to: Any, from_: Any, size: int) -> None:
        """cuMemcpyDtoDAsync on the current stream."""
        stream = ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
        addresses = ctypes.c_uint64(to.data_ptr()), ctypes.c_uint64(from_.data_ptr())
        code = self._library.cuMemcpyDtoDAsync_v2(*addresses, ctypes.c_size_t(size), stream)
        if code != 0:
            raise RuntimeError(f"cuMemcpyDtoDAsync returned {code}")

    def seconds(self, call: Callable[[], Any], times: int = 10) -> float:
        """Seconds of the device for a call, of so many that follow each other."""
        cuda = self.torch.cuda
        cuda.synchronize()
        for _ in range(4):
            begun, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            cuda._sleep(self._cycles)
            begun.record()
            for _ in range(times):
                call()
            ended.record()
            in_time = not begun.query()
            ended.synchronize()
            if in_time:
                return float(begun.elapsed_time(ended)) / 1e3 / times
            # The device woke up before everything was enqueued.
            self._cycles *= 2
        raise RuntimeError("the device was faster than the host's calls, however long it slept")

    def copy_bandwidth(self, size: int) -> float:
        """Bytes read and written per second by a copy of so many bytes."""
        one = self.torch.zeros(size, dtype=self.torch.uint8, device="cuda")
        two = self.torch.zeros_like(one)
        return 2 * size / statistics.median(self.seconds(lambda: self.copy(two, one, size)) for _ in range(5))


# --- the codec --------------------------------------------------------------------------------------------------------


def levels(torch: Any, low: Any, high: Any) -> tuple[Any, Any, Any]:
    """Scale, upper and lower level of chunks (docs/reference/codecs.md)."""
    low, high = low.float(), high.float()
    scale = 255.0 / (high - low + 1e-7)
    upper = torch.round(high * scale)
    return scale, upper, upper - 255.0


def torch_calls(torch: Any, dtype: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """minmax_u8 of chunks, a row each, operation by operation: what encodes and what decodes."""

    def encode(x: Any) -> tuple[Any, Any, Any]:
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        scale, upper, lower = levels(torch, low, high)
        level = torch.minimum(torch.round(x.float() * scale), upper) - lower
        return level.clamp(0.0, 255.0).to(torch.uint8), low, high

    def decode(q: Any, low: Any, high: Any) -> Any:
        scale, _, lower = levels(torch, low, high)
        return ((q.float() + lower) / scale).to(dtype)

    return encode, decode


def codec(options: dict[str, Any], device: Device) -> None:
    """Rows for each direction, element type and size of chunks."""
    torch = device.torch
    size = int(options["size"])
    with torch.cuda.stream(torch.cuda.Stream()):
        for name in DTYPES:
            contenders = coded(options, device, getattr(torch, name), size)
            times: dict[Any, list[float]] = {key: [] for key in contenders}
            for _ in range(int(options["rounds"])):
                for key in random.sample(list(contenders), len(contenders)):
                    times[key].append(device.seconds(contenders[key]))
            torch.cuda.synchronize()
            count = size // getattr(torch, name).itemsize
            for what, chunk, who in times:
                if who != "bagua":
                    continue
                row: dict[str, Any] = {"what": f"{what} {name}", "chunks": show_size(chunk)}
                row |= goals(what, chunk)
                taken = statistics.median(times[what, chunk, who])
                row |= {"seconds": taken, "bytes_per_s": (size + count) / taken}
                row["of_copy"] = row["bytes_per_s"] * statistics.median(times["copy", size, "driver"]) / (2 * size)
                for other in ("eager", "compile"):
                    if (what, chunk, other) in times:
                        row[f"{other}_over_ours"] = statistics.median(times[what, chunk, other]) / taken
                write_row(options, row)
            taken = statistics.median(times["copy", size, "driver"])
            write_row(options, {"what": f"copy beside {name}", "seconds": taken, "bytes_per_s": 2 * size / taken})


def goals(what: str, chunk: int) -> dict[str, float]:
    """Returns the goals of a codec on a GPU."""
    found = {"goal": 0.8 if what == "decode" or chunk <= 16 * MIB else 0.45}
    if chunk in AGAINST_TORCH:
        found |= {"goal_eager": 5.0, "goal_compile": 1.5}
    return found


def coded(options: dict[str, Any], device: Device, dtype: Any, size: int) -> dict[Any, Callable[[], Any]]:
    """The calls by direction, bytes of a chunk and contender, whose results agree."""
    torch, ours = device.torch, bagua.Codec("minmax_u8")
    stream = torch.cuda.current_stream().cuda_stream
    count = size // dtype.itemsize
    x = torch.randn(count, device="cuda").to(dtype)
    spare = torch.empty_like(x)
    calls: dict[Any, Callable[[], Any]] = {("copy", size, "driver"): lambda: device.copy(spare, x, size)}
    scale = size / (256 * MIB)
    for chunk in CHUNKS:
        chunks = size // max(1, int(chunk * scale))
        data = torch.empty(ours.encoded_bytes(count, dtype=str(dtype).removeprefix("torch."), chunks=chunks),
                           dtype=torch.uint8, device="cuda")  # fmt: skip
        back = torch.empty_like(x)

        def encode(data: Any = data, chunks: int = chunks) -> None:
            ours.encode(x, chunks=chunks, out=data, stream=stream)

        def decode(data: Any = data, back: Any = back, chunks: int = chunks) -> None:
            ours.decode(data, back, chunks=chunks, stream=stream)

        encode()
        decode()
        calls["encode", chunk, "bagua"], calls["decode", chunk, "bagua"] = encode, decode
        if chunk not in AGAINST_TORCH:
            continue
        rows = x.view(chunks, -1)
        first, second = torch_calls(torch, dtype)
        torchs = {
            "eager": (first, second),
            "compile": (torch.compile(first, dynamic=False), torch.compile(second, dynamic=False)),
        }
        for who, (torch_encode, torch_decode) in torchs.items():
            try:
                q, low, high = torch_encode(rows)
                restored = torch_decode(q, low, high)
                agree(torch, data.view(chunks, -1)[:, 32 : 32 + rows.shape[1]], q, back, restored)
            except AssertionError:
                raise
            except Exception as error:
                note = str(error).strip().splitlines()[:1]
                write_row(options, {"what": f"torch {who}", "note": f"not measured: {type(error).__name__} {note}"})
                continue
            calls["encode", chunk, who] = lambda call=torch_encode, rows=rows: call(rows)  # type: ignore[misc]
            calls["decode", chunk, who] = lambda call=torch_decode, given=(q, low, high): call(*given)  # type: ignore[misc]
    return calls


def agree(torch: Any, ours: Any, theirs: Any, back: Any, restored: Any) -> None:
    """Levels differ by one in few elements, by the rounding of another division or a fused product; so do values.

    Where the extremes of a chunk are opposite numbers, as in bfloat16 often, its upper level lies between two, and such
    a rounding moves all levels of the chunk by one. Its values stay.
    """
    off = (ours.int() - theirs.int()).float()
    off = (off - off.mean(1, keepdim=True).round().clamp(-1.0, 1.0)).abs()
    most, mean = float(off.max().item()), float(off.mean().item())
    if most > 1 or mean > 1e-2:
        raise AssertionError(f"torch has levels that are {most:g} off, {mean:g} in the mean")
    far = float((back.float() - restored.view(-1).float()).abs().max().item())
    if far > 0.1:
        raise AssertionError(f"torch decodes to values that are {far} off")


# --- ranks ------------------------------------------------------------------------------------------------------------


def join(options: dict[str, Any]) -> Any:
    """bagua.torch_api, in the group of all ranks."""
    from torch._C._distributed_c10d import FileStore

    import bagua.torch_api as api

    ranks = int(options["ranks"])
    api.init_process_group(FileStore(f"{options['folder']}/ours", ranks), this_rank(), ranks, ranks)
    return api


def all_reduce(options: dict[str, Any], device: Device) -> None:
    """Rows of the time of a sum of two ranks, until the device is done: ours, and gloo's by torch.distributed."""
    import torch.distributed as dist

    torch, api, size = device.torch, join(options), int(options["size"])
    barrier = Barrier(options["folder"], this_rank(), int(options["ranks"]), limit=60.0)
    x, ours = torch.zeros(size // 4, device="cuda"), str(options["collective"])
    contenders: dict[str, Callable[[], Any]] = {ours: lambda: api.allreduce_inplace(x)}
    contenders["gloo"] = lambda: dist.all_reduce(x)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    # The first round opens connections and pins memory.
    for number in range(int(options["rounds"]) + 1):
        for name, call in contenders.items():
            x.fill_(this_rank() + 1.0)
            torch.cuda.synchronize()
            barrier.wait()
            begun = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if number > 0:
                times[name].append(time.perf_counter() - begun)
            if not bool(x.eq(3.0).all().item()):
                raise AssertionError(f"the sum of {name} is wrong")
    barrier.wait()
    if this_rank() == 0:
        bandwidth = device.copy_bandwidth(size)
        for name in contenders:
            row: dict[str, Any] = {
                "what": f"all_reduce by {name}, {options['ranks']} ranks",
                "chunks": show_size(size),
            }
            taken = statistics.median(times[name])
            row |= {"seconds": taken, "bytes_per_s": size / taken, "of_copy": size / taken / bandwidth}
            if name != ours:
                row["ratio"] = statistics.median(times[ours]) / taken
                row["note"] = f"ratio: {ours}'s time over {name}'s"
            write_row(options, row)
    barrier.wait()
    api.destroy_process_group()


def late(options: dict[str, Any], device: Device) -> None:
    """A row of the longest time that a blocking verb took to return behind half a second of the device's work."""
    torch, api = device.torch, join(options)
    x = torch.ones(MIB, device="cuda")
    api.allreduce_inplace(x)
    times = []
    for _ in range(int(options["rounds"]) // 3 + 1):
        torch.cuda.synchronize()
        busy = torch.cuda.Event()
        # 0.5 s at 2 GHz; longer where the clock is slower.
        torch.cuda._sleep(1_000_000_000)
        busy.record()
        begun = time.perf_counter()
        api.allreduce_inplace(x)
        taken = time.perf_counter() - begun
        if busy.query():
            raise AssertionError("the device had finished its work before the verb returned")
        times.append(taken)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"what": f"return of a verb behind 0.5 s of work, {options['collective']}", "goal_s": 0.02}
    row["seconds"] = max(times)
    write_row(options, row)
    api.destroy_process_group()


class Trainer:
    """One contender's copy of the model and its optimizer."""

    def __init__(self, contender: str, torch: Any, width: int) -> None:
        torch.manual_seed(17)
        layers: list[Any] = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(width, width, bias=False), torch.nn.ReLU()]
        self.module: Any = torch.nn.Sequential(*layers).cuda()
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-3, momentum=0.9)
        self.torch = torch
        self.x = torch.randn(4 if width == 16 else BATCH, width, device="cuda")
        if contender == "bagua":
            from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

            self.module = self.module.with_bagua([self.optimizer], GradientAllReduceAlgorithm())
        elif contender == "ddp":
            self.module = torch.nn.parallel.DistributedDataParallel(self.module, device_ids=[0])

    def block(self, steps: int) -> float:
        """Seconds of a step, of so many."""
        self.torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.module(self.x).square().mean().backward()
            self.optimizer.step()
        self.torch.cuda.synchronize()
        return (time.perf_counter() - begun) / steps


def training(options: dict[str, Any], device: Device) -> None:
    """Rows of the times of a step: plain torch, DDP on NCCL or gloo, with_bagua. All ranks have the same input."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch, ranks = device.torch, int(options["ranks"])
    # Sending all of the large model by gloo takes a quarter of a second a step.
    width = WIDTH if ranks == 1 else WIDTH // 2
    torch.set_float32_matmul_precision("high")
    names = ["plain", "bagua", "ddp"]
    store = FileStore(f"{options['folder']}/torch", ranks)
    dist.init_process_group(options["ddp"], store=store, rank=this_rank(), world_size=ranks)
    api = join(options)
    # The same order on all ranks.
    random.seed(17)
    trainers = {}
    for name in names:
        try:
            trainers[name] = Trainer(name, torch, width)
        except (NotImplementedError, RuntimeError, bagua.BaguaError) as error:
            write_row(options, {"what": f"step of {name}", "note": f"not measured: {error}"})
    steps = 10 if ranks == 1 else 2
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for trainer in trainers.values():
        trainer.block(steps)
    for _ in range(int(options["rounds"])):
        for name in random.sample(list(trainers), len(trainers)):
            times[name].append(trainers[name].block(steps))
    for name, trainer in trainers.items():
        for mine, plain in zip(trainer.parameters, trainers["plain"].parameters, strict=True):
            if not torch.allclose(mine.cpu(), plain.cpu(), rtol=1e-3, atol=1e-5):
                raise AssertionError(f"{name} has other weights than plain torch")
        parameters = sum(each.numel() for each in trainer.parameters)
        by = {"plain": "torch alone", "ddp": f"ddp, {options['ddp']}", "bagua": f"bagua, {options['collective']}"}[name]
        row: dict[str, Any] = {"what": f"{ranks} ranks, {parameters / 1e6:.0f} M parameters, {by}"}
        row["seconds"] = statistics.median(times[name])
        if this_rank() == 0:
            write_row(options, row)
    for other, goal in (("plain", 1.02), ("ddp", 1.0)):
        # Beside torch alone only the overhead is compared: a rank of several also sends.
        if this_rank() == 0 and {"bagua", other} <= trainers.keys() and (ranks == 1 or other == "ddp"):
            row = {"what": f"{ranks} ranks, step of bagua over {other}'s", "goal_ratio": goal}
            ratios = [one / two for one, two in zip(times["bagua"], times[other], strict=True)]
            lower, middle, upper = statistics.quantiles(ratios, n=4)
            row |= {"ratio": middle, "note": f"quartiles {lower:.3f} to {upper:.3f} of {len(ratios)} pairs"}
            write_row(options, row)
    api.destroy_process_group()


# --- all of it --------------------------------------------------------------------------------------------------------


def shown(row: dict[str, Any]) -> str:
    """A line of the table."""
    figures = ["-"] * 6
    if "seconds" in row:
        figures[0] = f"{row['seconds'] * 1e3:.3f}"
    if "bytes_per_s" in row:
        figures[1] = f"{row['bytes_per_s'] / 1e9:.0f}"
    for place, key, goal, sign in (
        (2, "of_copy", "goal", ">="),
        (3, "eager_over_ours", "goal_eager", ">="),
        (4, "compile_over_ours", "goal_compile", ">="),
        (5, "ratio", "goal_ratio", "<="),
    ):
        figures[place] = f"{row[key]:.3f}" if key in row else "-"
        if goal in row:
            figures[place] += f" ({sign}{row[goal]:g})"
    if "goal_s" in row:
        figures[0] += f" (<{row['goal_s'] * 1e3:g})"
    widths = (14, 8, 16, 12, 14, 16)
    line = "".join(f"{figure:>{width}}" for figure, width in zip(figures, widths, strict=True))
    return f"{row['what']:<46}{row.get('chunks', ''):>7}{line}  {row.get('note', '')[:160]}".rstrip()


def versions() -> str:
    """The device and the libraries."""
    import torch

    info = bagua.cuda.info()
    found = info["devices"][0]
    return (
        f"{found['name']}, compute capability {found['capability']}; driver for CUDA {info['driver']['version']}, "
        f"NVRTC {info['nvrtc']['version']}, NCCL {info['nccl']['version']}, torch {torch.__version__}"
    )


def main() -> None:
    """Parses the command line, runs the parts, prints a table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--parts", nargs="+", choices=sorted({name for name, *_ in PARTS}), help="only these")
    parser.set_defaults(limit=420.0)
    args = parser.parse_args()
    if args.child:
        options = json.loads(args.child)
        part = {"codec": codec, "all_reduce": all_reduce, "late": late, "training": training}[options["part"]]
        part(options, Device())
        return
    if (reason := bagua.cuda.why_not()) is not None:
        print(f"skipped: {reason}")
        return
    common = {"size": 32 * MIB if args.quick else 256 * MIB, "rounds": 2 if args.quick else 15}
    until, rows = time.monotonic() + args.limit, []
    for name, ranks, options, env, limit in PARTS:
        if args.parts and name not in args.parts:
            continue
        given = {"part": name, **common, **options}
        left = min(limit, until - time.monotonic())
        try:
            if left < 10:
                raise RuntimeError("no time was left")
            rows += run_ranks(__file__, ranks, given, limit=left, env=env)
        except RuntimeError as error:
            rows.append({"what": " ".join([name, *options.values()]), "note": f"not measured: {error}"})
    print(f"{machine()}\n{versions()}")
    heads = ("ms", "GB/s", "of copy", "eager/ours", "compile/ours", "ratio")
    widths = (14, 8, 16, 12, 14, 16)
    print(
        f"{'what (goals in brackets)':<46}{'bytes':>7}"
        + "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True))
    )
    for row in rows:
        print(shown(row))
    save_if_asked(args, "gpu", rows)


if __name__ == "__main__":
    main()
