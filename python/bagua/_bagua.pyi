"""The Rust core of Bagua, in addresses and codes. Import `bagua` instead.

Addresses are those of host memory, counts are elements (of one rank's chunk in the verbs that have chunks), `dtype`
and `op` are codes (`bagua.engine.DTYPES`, `bagua.engine.OPS`), ranks are ranks of the group, timeouts are seconds. The
caller promises that memory stays valid until a verb has returned or its handle is done; `keep` holds any object until
then.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from os import PathLike
from typing import Any, TypeAlias, final

from bagua.config import CudaPlaces, Settings

__all__ = [
    "ALGORITHMS",
    "CODECS",
    "CUDA_ARCHITECTURES",
    "CUDA_KERNELS",
    "DEFINED",
    "DTYPES",
    "MAX_STREAMS",
    "OPS",
    "PEER_SELECTION_MODES",
    "TRANSPORTS",
    "VERBS",
    "Arena",
    "AsyncModelAverage",
    "Averager",
    "Bootstrap",
    "Bucket",
    "Codec",
    "Communicator",
    "CudaCall",
    "CudaDevice",
    "CudaLibraries",
    "Engine",
    "GroupConfig",
    "Handle",
    "JoinServer",
    "RendezvousServer",
    "Store",
    "StoreServer",
    "TensorReader",
    "Tls",
    "WeightLock",
    "check_peer_selection",
    "flight_recorder",
    "listen_for_interrupts",
    "local_address_towards",
    "read_array",
    "rendezvous_at",
    "rendezvous_file",
    "rendezvous_tcp",
    "set_recording",
    "version",
    "wait_for_callbacks",
]

# Codes by name.
DTYPES: dict[str, int]
OPS: dict[str, int]
VERBS: dict[str, int]
# (op, dtype) of every reduction that is defined, by their codes.
DEFINED: frozenset[tuple[int, int]]
CODECS: list[str]
TRANSPORTS: list[str]
# How all_reduce goes between hosts.
ALGORITHMS: list[str]
# How a member chooses its peers.
PEER_SELECTION_MODES: list[str]
MAX_STREAMS: int
# Names of the kernels for devices, by program.
CUDA_KERNELS: dict[str, list[str]]
# Those that kernels are compiled for in advance, where NVRTC knows them.
CUDA_ARCHITECTURES: list[int]

_Shape: TypeAlias = Sequence[int] | None

# (peer, address, count)
_Message: TypeAlias = tuple[int | None, int, int]

@final
class TensorReader:
    def __new__(
        cls, classes: Sequence[type], lazy_flags: Callable[[Any], object], changed: Callable[[tuple[Any]], None]
    ) -> TensorReader: ...
    # Any: the object itself, of one of the classes.
    def at(self, x: object) -> tuple[int, int, int, tuple[int, ...] | None, Any] | None: ...

def read_array(x: object) -> tuple[int, int, int, tuple[int, ...] | None, bool] | None: ...

@final
class Tls:
    def __new__(cls, certificate: bytes | None = None, key: bytes | None = None, ca: bytes | None = None) -> Tls: ...

@final
class GroupConfig:
    def __new__(
        cls,
        rank: int,
        world_size: int,
        settings: Settings,
        *,
        name: str,
        secret: bytes,
        listen_host: str,
    ) -> GroupConfig: ...

@final
class Bootstrap:
    def __new__(cls, config: GroupConfig) -> Bootstrap: ...
    def address(self) -> bytes: ...
    def connect(self, addresses: Sequence[bytes]) -> Communicator: ...

@final
class JoinServer:
    def __new__(cls, config: GroupConfig, token: bytes) -> JoinServer: ...
    @property
    def address(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def refused(self) -> int: ...
    def enter_job(self) -> None: ...
    def note_server(self, rank: int, at: str) -> None: ...
    def status(self, rank: int, at: str, timeout: float) -> dict[str, Any]: ...
    def join(
        self,
        name: str,
        weights: Sequence[tuple[int, int, int, bool]],
        buffers: Sequence[tuple[int, int, int, bool]],
        lock: WeightLock,
        interval: float,
        codec: Codec | None,
        digest: bytes,
        timeout: float,
        device: tuple[CudaDevice, int, object] | None = None,
    ) -> Averager: ...

@final
class StoreServer:
    def __new__(
        cls,
        host: str,
        port: int,
        secret: bytes,
        tls: Tls | None = None,
        kept_in: str | PathLike[str] | None = None,
    ) -> StoreServer: ...
    @property
    def port(self) -> int: ...
    def stop(self) -> None: ...

@final
class Store:
    @staticmethod
    def tcp(host: str, port: int, secret: bytes, timeout: float, tls: Tls | None = None) -> Store: ...
    @staticmethod
    def files(directory: str | PathLike[str]) -> Store: ...
    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes | None: ...
    def set_new(self, key: str, value: bytes) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def wait(self, keys: Sequence[str], timeout: timedelta) -> None: ...

@final
class RendezvousServer:
    def __new__(cls, host: str, port: int) -> RendezvousServer: ...
    def address(self) -> tuple[str, int]: ...
    def serve(
        self,
        world_size: int,
        address: bytes,
        secret: bytes,
        timeout: float,
        tls: Tls | None = None,
        heartbeat_timeout: float = 5.0,
    ) -> list[bytes]: ...

@final
class Handle:
    def wait(self, timeout: float | None = None, *, stream: int | None = None) -> None: ...
    def synchronize(self, timeout: float | None = None) -> None: ...
    def senders(self) -> list[int | None]: ...
    def then(self, callback: Callable[[Exception | None], object], /) -> None: ...
    def is_completed(self) -> bool: ...
    @staticmethod
    def completed() -> Handle: ...

@final
class Codec:
    def __new__(cls, name: str, options: dict[str, float]) -> Codec: ...
    @property
    def name(self) -> str: ...
    @property
    def options(self) -> dict[str, float]: ...
    def encoded_bytes(self, count: int, dtype: int, chunks: int) -> int: ...
    def encode(self, src: int, count: int, dtype: int, chunks: int, dst: int, len: int) -> bool: ...
    def decode(self, src: int, len: int, dst: int, count: int, dtype: int, chunks: int) -> None: ...
    def check_device(self) -> None: ...
    def encode_on_device(
        self, call: CudaCall, src: int, count: int, dtype: int, chunks: int, dst: int, len: int, keep: Any
    ) -> None: ...
    def decode_on_device(
        self, call: CudaCall, src: int, len: int, dst: int, count: int, dtype: int, chunks: int, keep: Any
    ) -> None: ...

@final
class CudaLibraries:
    def __new__(cls) -> CudaLibraries: ...
    def why_not(self, places: CudaPlaces) -> str | None: ...
    def report(self, places: CudaPlaces) -> dict[str, Any]: ...
    def compile(self, places: CudaPlaces, program: str, architecture: int) -> tuple[bytes, bytes, str]: ...
    def cubin(self, places: CudaPlaces, cache: str | None, program: str, architecture: int) -> bytes: ...
    def device(self, places: CudaPlaces, cache: str | None, number: int) -> CudaDevice: ...
    def device_of(self, places: CudaPlaces, address: int) -> int | None: ...

@final
class CudaDevice:
    @property
    def number(self) -> int: ...
    def refuse_capture(self, streams: Sequence[int]) -> None: ...
    def call(self, stream: int, producers: Sequence[int]) -> CudaCall: ...
    def release(self) -> None: ...

@final
class CudaCall:
    def copy(self, to: int, from_: int, bytes: int) -> None: ...

@final
class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def hosts(self) -> list[list[int]]: ...
    @property
    def machines(self) -> list[list[int]]: ...
    @property
    def listen_host(self) -> str: ...
    @property
    def view(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @property
    def collective(self) -> str: ...
    @property
    def transports(self) -> list[str]: ...
    # Any: checked there, and False when it is not what it should be.
    def try_run(self, verb: int, reader: TensorReader, src: object | None, dst: object, op: Any, root: Any) -> bool: ...
    def try_begin(
        self, verb: int, reader: TensorReader, src: object | None, dst: object, op: Any, root: Any
    ) -> Handle | None: ...
    def run(
        self,
        verb: int,
        src: int | None,
        dst: int | None,
        count: int,
        dtype: int,
        op: int = 0,
        root: int = 0,
        *,
        shape: _Shape = None,
        timeout: float | None = None,
        async_op: bool = False,
        keep: object = None,
        place: CudaCall | None = None,
    ) -> Handle | None: ...
    def all_to_all_v(
        self,
        src: int | None,
        src_count: int,
        dst: int,
        dst_count: int,
        dtype: int,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
        *,
        timeout: float | None = None,
        async_op: bool = False,
        keep: object = None,
        place: CudaCall | None = None,
    ) -> Handle | None: ...
    def cuda_call(
        self, device: CudaDevice, stream: int, producers: Sequence[int], collective: str, check: bool = False
    ) -> CudaCall: ...
    def cuda_messages(self, device: CudaDevice, stream: int, producers: Sequence[int]) -> CudaCall: ...
    def send(
        self,
        address: int,
        count: int,
        dtype: int,
        to: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
        keep: object = None,
        place: CudaCall | None = None,
    ) -> Handle | None: ...
    def recv(
        self,
        address: int,
        count: int,
        dtype: int,
        from_: int | None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
        keep: object = None,
        place: CudaCall | None = None,
    ) -> Handle | None: ...
    def exchange(
        self,
        sends: Sequence[_Message],
        recvs: Sequence[_Message],
        dtype: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
        keep: object = None,
        place: CudaCall | None = None,
    ) -> Handle | None: ...
    def subgroup(self, ranks: Sequence[int], name: str) -> Communicator | None: ...
    def shrink(self, timeout: float | None = None, *, quorum: str = "majority") -> tuple[Communicator, list[int]]: ...
    def arena(self, nbytes: int, *, label: str = "bagua-arena") -> Arena: ...
    def engine(self, name: str) -> Engine: ...
    def averager(
        self,
        name: str,
        weights: Sequence[tuple[int, int, int, bool]],
        lock: WeightLock,
        interval: float,
        codec: Codec | None,
        *,
        buffers: Sequence[tuple[int, int, int, bool]],
        join_server: JoinServer | None,
        digest: bytes,
        takes_part: bool,
        device: tuple[CudaDevice, int, object] | None = None,
    ) -> Averager: ...
    def raise_(self, kind: str, message: str) -> None: ...
    def abort(self, reason: str) -> None: ...
    def leave(self) -> None: ...
    def cause(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

@final
class Arena:
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shared(self) -> bool: ...

@final
class Bucket:
    # (name, address, count, dtype, padding)
    def __new__(
        cls,
        name: str,
        tensors: Sequence[tuple[str, int, int, int, bool]],
        *,
        device: CudaDevice | None = None,
        collective: str = "auto",
        check: bool = False,
        keep: object = None,
    ) -> Bucket: ...
    @property
    def name(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def dtype(self) -> int: ...
    def append_centralized(self, average: bool, hierarchical: bool, scattergather: bool) -> None: ...
    def append_compressed(self, codec: Codec, average: bool, hierarchical: bool, error_feedback: bool) -> None: ...
    def append_automatic(self, codec: Codec, average: bool, hierarchical: bool) -> None: ...
    def choice(self) -> str | None: ...
    def append_decentralized(self, peer_selection_mode: str, hierarchical: bool) -> None: ...
    def append_low_precision_decentralized(self, codec: Codec, hierarchical: bool) -> None: ...
    def append_asynchronous_model_average(self, lock: WeightLock, *, elsewhere: bool = False) -> AsyncModelAverage: ...
    def copy_from_extra(self, name: str, *, stream: int | None = None) -> None: ...
    @property
    def step(self) -> int: ...
    def set_step(self, step: int) -> None: ...
    def append_callback(self, function: Callable[[str], object]) -> None: ...
    def attach(
        self,
        name: str,
        address: int,
        count: int,
        dtype: int,
        *,
        device: CudaDevice | None = None,
        keep: object = None,
    ) -> None: ...
    def clear_ops(self) -> None: ...
    def ops(self) -> list[str]: ...

@final
class AsyncModelAverage:
    @property
    def takes_part(self) -> bool: ...
    def set_takes_part(self, takes_part: bool) -> None: ...

@final
class WeightLock:
    def __new__(cls) -> WeightLock: ...
    def lock(self, *, stream: int | None = None) -> None: ...
    def unlock(self, *, stream: int | None = None) -> None: ...
    def begin_training(self, *, stream: int | None = None) -> None: ...
    def pause_training(self, limit: float, *, stream: int | None = None) -> None: ...
    def end_training(self, *, stream: int | None = None) -> None: ...
    def order(self, *, stream: int | None = None) -> None: ...
    def mark(self, *, stream: int | None = None) -> None: ...
    def is_used_here(self) -> bool: ...
    @property
    def waited(self) -> float: ...

@final
class Averager:
    def check(self) -> None: ...
    def abort(self, timeout: float) -> None: ...
    def resume(self) -> None: ...
    def synchronize(self, timeout: float) -> None: ...
    def wait_joined(self, timeout: float) -> None: ...
    @property
    def forwards(self) -> int: ...
    def set_forwards(self, forwards: int) -> None: ...
    def count_step(self) -> None: ...
    def stop(self, timeout: float) -> None: ...
    def stats(self) -> dict[str, Any]: ...

@final
class Engine:
    def register(self, buckets: Sequence[Bucket]) -> list[str]: ...
    def mark_ready(
        self,
        number: int,
        address: int | None = None,
        count: int | None = None,
        *,
        stream: int | None = None,
        producers: Sequence[int] | None = None,
        keep: object = None,
    ) -> None: ...
    def wait(self, timeout: float | None = None, *, stream: int | None = None) -> int: ...
    def cuda_call(
        self, device: CudaDevice, stream: int, producers: Sequence[int], collective: str, check: bool = False
    ) -> CudaCall: ...
    def unready(self) -> list[str]: ...
    def shutdown(self) -> None: ...
    def run(
        self,
        verb: int,
        src: int | None,
        dst: int | None,
        count: int,
        dtype: int,
        op: int = 0,
        root: int = 0,
        *,
        shape: _Shape = None,
        timeout: float | None = None,
        async_op: bool = False,
        keep: object = None,
        place: CudaCall | None = None,
    ) -> Handle | None: ...

def rendezvous_tcp(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    address: bytes,
    secret: bytes,
    timeout: float,
    tls: Tls | None = None,
    heartbeat_timeout: float = 5.0,
) -> list[bytes]: ...
def rendezvous_at(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    address: bytes,
    secret: bytes,
    timeout: float,
    tls: Tls | None = None,
    heartbeat_timeout: float = 5.0,
) -> list[bytes]: ...
def rendezvous_file(
    path: str | PathLike[str], rank: int, world_size: int, address: bytes, timeout: float
) -> list[bytes]: ...
def local_address_towards(host: str, port: int) -> str: ...
def version() -> str: ...
def flight_recorder() -> list[dict[str, Any]]: ...
def set_recording(on: bool) -> None: ...
def listen_for_interrupts() -> int: ...
def check_peer_selection(peer_selection_mode: str, members: int) -> None: ...
def wait_for_callbacks(timeout: float) -> None: ...
