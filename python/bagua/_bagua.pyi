"""
The Rust core of Bagua. Import `bagua` instead: this module takes addresses and codes.
"""

from _typeshed import Incomplete, SupportsGetItem, SupportsLenAndGetItem
from datetime import timedelta
from os import PathLike
from typing import Any, SupportsFloat, SupportsIndex, final

__all__ = ["Arena", "AsyncModelAverage", "Averager", "Bootstrap", "Bucket", "Codec", "Communicator", "CompressedExchange", "CudaCall", "CudaDevice", "CudaLibraries", "Engine", "GroupConfig", "Handle", "JoinServer", "RendezvousServer", "Store", "StoreServer", "TensorReader", "Tls", "WeightLock", "check_peer_selection", "flight_recorder", "local_address_towards", "read_array", "rendezvous_at", "rendezvous_file", "rendezvous_tcp", "set_recording", "tables", "version", "wait_for_callbacks"]

@final
class Arena:
    """
    Memory for tensors that the other ranks of the host can map, to access them directly.

    Users of the address must keep this object, which owns the memory. It may outlive the group.
    """
    @property
    def address(self, /) -> int:
        """
        Address of the first byte; a multiple of the page size.
        """
    @property
    def nbytes(self, /) -> int:
        """
        Length in bytes.
        """
    @property
    def shared(self, /) -> bool:
        """
        True when peers on this host can map this memory; otherwise it is private.
        """

@final
class AsyncModelAverage:
    """
    A bucket's operation that averages weights: whether this rank takes part in its rounds.
    """
    def set_takes_part(self, /, takes_part: bool) -> None:
        """
        Says so for the rounds from the next one on.
        """
    @property
    def takes_part(self, /) -> bool:
        """
        True when this rank's weights count and are changed.
        """

@final
class Averager:
    """
    Averages the weights of one model with those of the other ranks, on a thread of its own.

    Every method but `stop` and `stats` raises what failed on that thread.
    """
    def abort(self, /, timeout: SupportsFloat | SupportsIndex) -> None:
        """
        This rank takes part no more. Waits for at most `timeout` seconds until nothing writes to its weights any more.
        """
    def check(self, /) -> None:
        """
        Nothing failed so far.
        """
    def count_step(self, /) -> None:
        """
        The optimizer made a step.
        """
    @property
    def forwards(self, /) -> int:
        """
        The caller's count of forwards, which a joining rank takes over from the job.
        """
    def resume(self, /) -> None:
        """
        This rank takes part from the next round on.
        """
    def set_forwards(self, /, forwards: SupportsIndex) -> None:
        """
        Sets the caller's count of forwards.
        """
    def stats(self, /) -> dict:
        """
        Numbers of this rank; durations in seconds.
        """
    def stop(self, /, timeout: SupportsFloat | SupportsIndex) -> None:
        """
        Ends the thread; a round in progress may end first, for at most `timeout` seconds. Idempotent.
        """
    def synchronize(self, /, timeout: SupportsFloat | SupportsIndex) -> None:
        """
        One round of all ranks that take part with their locks held throughout. BaguaTimeoutError names those that never called.
        """
    def wait_joined(self, /, timeout: SupportsFloat | SupportsIndex) -> None:
        """
        Waits for at most `timeout` seconds until a joining rank's weights are the average of a round in which its own did not count.
        """

@final
class Bootstrap:
    """
    A rank that listens and has an address, but is not connected to any peer.

    Raises BaguaError when the socket cannot be opened.
    """
    def __new__(cls, /, config: GroupConfig) -> Bootstrap: ...
    def address(self, /) -> bytes:
        """
        This rank's address: opaque bytes that all ranks need for `connect`.
        """
    def close(self, /) -> None:
        """
        Listens no longer, and ends the control thread, unless `connect` was called.

        Otherwise they end with this object, which the traceback of an error may keep.
        """
    def connect(self, /, addresses: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]], waiting: Any | None = None) -> Communicator:
        """
        Connects to all peers and opens the group's main lane. `addresses[r]` is the address of rank r. May be called once.

        `waiting` is called with the ranks that this rank waits for, every 50 to 200 ms. Raises BaguaTimeoutError naming the ranks that did not
        connect within `connect_timeout`.
        """

@final
class Bucket:
    """
    Named tensors of one element type that travel together: a list of (name, address, count, dtype, padding).

    The caller promises that the addresses stay valid as long as the bucket is registered with an engine. With `device` they are addresses of
    that CUDA device, and `keep` is held until it is done with them; `collective` is a value of BAGUA_CUDA_COLLECTIVE, and `check`
    of BAGUA_CUDA_CHECK.
    Raises ValueError for an empty list or a repeated name, TypeError for mixed element types.
    """
    def __new__(cls, /, name: str, tensors: SupportsGetItem[int, tuple[str, SupportsIndex, SupportsIndex, SupportsIndex, bool]], *, device: CudaDevice | None = None, collective: str = "auto", check: bool = False, keep: Any | None = None) -> Bucket: ...
    def append_asynchronous_model_average(self, /, lock: WeightLock, *, elsewhere: bool = False) -> AsyncModelAverage:
        """
        Adds a round of asynchronous model averaging, of weights that are used under `lock`. On a device the lock orders streams with what
        operations do with the bucket, unless it is `elsewhere`: with an averaging that makes the rounds itself.

        Raises TypeError for elements that are not real floating-point numbers.
        """
    def append_automatic(self, /, codec: Codec, average: bool, hierarchical: bool) -> None:
        """
        Adds an all_reduce with or without a codec: both are timed now and then, and the faster is kept. Raises as
        append_compressed.
        """
    def append_callback(self, /, function: Any) -> None:
        """
        Adds a call of `function(bucket name)` on the communication thread: the one operation that waits for the GIL.

        An exception in it fails the engine and the group: the next call of the engine on this rank raises BaguaError from it, and the other
        ranks get PeerRaisedError with its class and text. `clear_ops` lets go of the function.
        """
    def append_centralized(self, /, average: bool, hierarchical: bool, scattergather: bool) -> None:
        """
        Adds an all_reduce: the average of all ranks, or the sum. `hierarchical` combines inside hosts first, also where the group would
        go flat; `scattergather` changes nothing, as every route is a reduce-scatter followed by an all-gather.
        """
    def append_compressed(self, /, codec: Codec, average: bool, hierarchical: bool, error_feedback: bool) -> None:
        """
        Adds an all_reduce through a codec. `error_feedback` needs the extra tensor "error": a float32 for each element, padding left
        out.

        Raises TypeError for an element type that the codec does not encode, ValueError for a codec whose options do not fit the
        number of elements.
        """
    def append_decentralized(self, /, peer_selection_mode: str, hierarchical: bool) -> None:
        """
        Adds an averaging with peers, into the extra tensor "peer_weight" of the bucket's length and type.

        Raises ValueError for an unknown selection, TypeError for elements without a mean.
        """
    def append_low_precision_decentralized(self, /, codec: Codec, hierarchical: bool) -> None:
        """
        Adds a round of the compressed ring, with the extra tensors "weight", "left_peer_weight" and "right_peer_weight".

        Raises as append_compressed.
        """
    def attach(self, /, name: str, address: SupportsIndex, count: SupportsIndex, dtype: SupportsIndex, *, device: CudaDevice | None = None, keep: Any | None = None) -> None:
        """
        Registers a tensor of the operations beside the bucket's own (peer weights, replicas, error memory); one of the same name is
        replaced. The address stays valid as long as the bucket is registered; it is one of `device`, whose `keep` is held as the bucket's.
        Raises ValueError while the bucket is being communicated, TypeError for another place than the bucket's.
        """
    @property
    def bytes(self, /) -> int:
        """
        Bytes of all tensors, padding included.
        """
    def choice(self, /) -> str | None:
        """
        The codec that an automatic operation uses now, "" for none; None without such an operation.
        """
    def clear_ops(self, /) -> None:
        """
        Removes all operations. Raises ValueError while the bucket is being communicated.
        """
    def copy_from_extra(self, /, name: str, *, stream: SupportsIndex | None = None) -> None:
        """
        Copies an extra tensor of the bucket's length into the bucket; on a device as work of `stream` (None: the legacy stream). Raises
        ValueError while the bucket is being communicated.
        """
    @property
    def dtype(self, /) -> int:
        """
        Code of the element type.
        """
    @property
    def name(self, /) -> str:
        """
        Its name.
        """
    def ops(self, /) -> list[str]:
        """
        Names of the operations, in the order in which they run.
        """
    def set_step(self, /, step: SupportsIndex) -> None:
        """
        Counts communications from `step` on, to resume a training. Raises ValueError while the bucket is being communicated.
        """
    @property
    def step(self, /) -> int:
        """
        How often it was communicated, since it was registered or since a step was set.
        """

@final
class Codec:
    """
    A codec with its options. `bagua.Codec` is the one for users; this one takes addresses. The caller promises that they stay valid, and
    that no other code writes to a source or uses a destination, until the call has returned; on a device, until that is done.

    Raises ValueError for an unknown name or an option out of its range, TypeError for an option that the codec does not have or of
    another type.
    """
    def __new__(cls, /, name: str, options: dict) -> Codec: ...
    def check_device(self, /) -> None:
        """
        Raises NotImplementedError when the codec has no kernels.
        """
    def decode(self, /, src: SupportsIndex, len: SupportsIndex, dst: SupportsIndex, count: SupportsIndex, dtype: SupportsIndex, chunks: SupportsIndex, *, call: CudaCall | None = None, keep: Any | None = None) -> None:
        """
        Decodes the `len` bytes at `src` into `count` elements at `dst`, in `chunks` equal parts; with `call` as `encode`.

        Raises as `encode`, and ValueError for bytes that no encoder writes, which are not looked for on a device.
        """
    def encode(self, /, src: SupportsIndex, count: SupportsIndex, dtype: SupportsIndex, chunks: SupportsIndex, dst: SupportsIndex, len: SupportsIndex, *, call: CudaCall | None = None, keep: Any | None = None) -> None:
        """
        Encodes `count` elements at `src` in `chunks` equal parts into the `len` bytes at `dst`.

        With `call` both are memory of its device: the work is put on the call's stream, and `keep` is held until the device is done.

        Raises as `encoded_bytes`, and ValueError when `len` is another number than that, or when the memory overlaps; on a device also as
        `check_device`, BaguaError without NVRTC, DeviceError.
        """
    def encoded_bytes(self, /, count: SupportsIndex, dtype: SupportsIndex, chunks: SupportsIndex) -> int:
        """
        Bytes of the records of `count` elements in `chunks` equal parts.

        Raises ValueError unless `chunks` divides `count`, or when an option does not fit; TypeError for a type that cannot be encoded.
        """
    @property
    def name(self, /) -> str:
        """
        Registered name.
        """
    @property
    def options(self, /) -> dict:
        """
        All options with their values.
        """

@final
class Communicator:
    """
    A group of ranks and its main lane: every verb runs in program order, a blocking one on the calling thread.

    The caller promises that an address stays valid until the verb has returned or its handle is done. `keep` holds any object
    until then. Verbs raise ValueError or TypeError before anything is sent, and the classes of `bagua.errors` afterwards.
    """
    def __repr__(self, /) -> str: ...
    def abort(self, /, reason: str) -> None:
        """
        Poisons the group on every rank with AbortedError.
        """
    def all_to_all_v(self, /, src: SupportsIndex | None, src_count: SupportsIndex, dst: SupportsIndex, dst_count: SupportsIndex, dtype: SupportsIndex, send_counts: SupportsGetItem[int, SupportsIndex], send_displs: SupportsGetItem[int, SupportsIndex], recv_counts: SupportsGetItem[int, SupportsIndex], recv_displs: SupportsGetItem[int, SupportsIndex], *, timeout: SupportsFloat | SupportsIndex | None = None, async_op: bool = False, keep: Any | None = None, place: CudaCall | None = None) -> Handle | None:
        """
        Rank r gets `send_counts[r]` elements from `send_displs[r]` of every rank's source, at `recv_displs` of its destination.
        `src_count` and `dst_count` are the elements of the whole buffers. `src` None: in place at `dst` (`src_count` is not used).
        """
    def arena(self, /, nbytes: SupportsIndex, *, label: str = "bagua-arena") -> Arena:
        """
        Memory for tensors, `nbytes` zeroed bytes, made by this rank alone. Verbs on tensors that lie in such memory on all ranks of a host
        work on the peers' memory directly: the ranks map each other's in the first of them. Local.
        """
    def averager(self, /, name: str, weights: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex, bool]], lock: WeightLock, interval: SupportsFloat | SupportsIndex, codec: Codec | None, *, buffers: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex, bool]], join_server: JoinServer | None, digest: SupportsLenAndGetItem[SupportsIndex], takes_part: bool, device: tuple[CudaDevice, SupportsIndex, Any] | None = None) -> Averager:
        """
        Averages weights, a list of (address, count, dtype) equal in count and dtype on all ranks, every `interval` seconds with the other
        ranks, through a codec if there is one. Every rank of the group calls it, in the same order.

        In an elastic job `join_server` is this rank's: ranks that are lost leave the averaging, and processes that join get
        the average, and a rank's `buffers`; `digest` is that of what must be equal on all ranks.

        Entries of `weights` and `buffers` end in whether they are on the CUDA device of `device`, a tuple (device, stream, keep): the first
        snapshot comes behind what the stream has now, and `keep` is held until the averager has stopped and the device is done.

        The caller promises that the addresses stay valid until the averager has stopped, and that the memory is used under `lock`.
        """
    def cause(self, /) -> None:
        """
        Raises the group's first failure, if there is one.
        """
    @property
    def collective(self, /) -> str:
        """
        Name of the collective in use: "solo", "shm", "net" or "hier".
        """
    def cuda_call(self, /, device: CudaDevice, stream: SupportsIndex, producers: SupportsGetItem[int, SupportsIndex], collective: str, check: bool = False) -> CudaCall:
        """
        The device's side of one operation, to be passed as `place`: it begins after what `stream` and the streams of `producers` have at the
        call of the verb. `collective` is a value of BAGUA_CUDA_COLLECTIVE; with `check` (BAGUA_CUDA_CHECK) the ranks compare calls first.

        Raises NotImplementedError for a stream that is being captured, ValueError for an unknown collective, DeviceError.
        """
    def cuda_messages(self, /, device: CudaDevice, stream: SupportsIndex, producers: SupportsGetItem[int, SupportsIndex]) -> CudaCall:
        """
        As `cuda_call`, for messages.
        """
    def engine(self, /, name: str) -> Engine:
        """
        An engine with a lane and a thread of its own. Every rank of the group calls it, in the same order.
        """
    def exchange(self, /, sends: SupportsGetItem[int, tuple[SupportsIndex | None, SupportsIndex, SupportsIndex]], recvs: SupportsGetItem[int, tuple[SupportsIndex | None, SupportsIndex, SupportsIndex]], dtype: SupportsIndex, *, tag: SupportsIndex = 0, timeout: SupportsFloat | SupportsIndex | None = None, async_op: bool = False, keep: Any | None = None, place: CudaCall | None = None) -> Handle | None:
        """
        Messages, in both directions and beside the verbs: lists of (peer, address, count). The other side must have the same type, tag and
        count. The peer of a receive may be None for any rank: `Handle.senders` says who it was. `keep` is held until all are done, also by a
        blocking call, which Ctrl-C may end before. With `place`, which `cuda_messages` makes, the addresses are a device's: the bytes travel
        through host memory.
        """
    @property
    def hosts(self, /) -> list[list[int]]:
        """
        Group ranks on each host, hosts in the order of their first rank.
        """
    def leave(self, /) -> None:
        """
        Says goodbye and closes every connection of this rank. Idempotent; leaving the world leaves its sub-groups.
        """
    @property
    def listen_host(self, /) -> str:
        """
        The IP address on which this rank listens for the others.
        """
    @property
    def machines(self, /) -> list[list[int]]:
        """
        Group ranks on each machine, in the order of their first rank: as `hosts`, and also where ranks may not share memory.
        """
    @property
    def name(self, /) -> str:
        """
        Name of the group.
        """
    def raise_(self, /, kind: str, message: str) -> None:
        """
        Poisons the group on every rank: the others get PeerRaisedError with this class name and text.
        """
    @property
    def rank(self, /) -> int:
        """
        This process's rank in the group.
        """
    @property
    def ranks(self, /) -> list[int]:
        """
        World ranks of the members, by group rank.
        """
    def run(self, /, verb: SupportsIndex, src: SupportsIndex | None, dst: SupportsIndex | None, count: SupportsIndex, dtype: SupportsIndex, op: SupportsIndex = 0, root: SupportsIndex = 0, *, shape: SupportsGetItem[int, SupportsIndex] | None = None, timeout: SupportsFloat | SupportsIndex | None = None, async_op: bool = False, keep: Any | None = None, place: CudaCall | None = None) -> Handle | None:
        """
        A verb, by its code in `VERBS`, on host memory. n is the number of ranks, r a rank.

        `count` elements of type `dtype` (a code in `DTYPES`) are the whole tensor for all_reduce, reduce and broadcast, and one rank's
        shard for the others. `src` and `dst` are addresses; without `src` the verb works in place at `dst`, whose shard r lies at r *
        count. Otherwise all_gather and gather (on its root) write n * count elements, scatter (on its root) and reduce_scatter read
        n * count, and all_to_all does both; `dst` may be None where this rank gets nothing. `op` is a code in `OPS`, `root` a rank of
        the group; verbs that have none ignore them. With `async_op` it returns a handle, and `keep` is held until that is done.

        With `place` the addresses are a device's: the verb runs on the communication thread, `keep` is held until the device is done, and
        this thread waits for the other ranks, never for the device. When the verb has returned, the call's stream is ordered after it.
        """
    def shrink(self, /, timeout: SupportsFloat | SupportsIndex | None = None, *, quorum: str = "majority") -> tuple[Communicator, list[int]]:
        """
        The group of the ranks that are left, with the rank here of each of its ranks; this group is left. Every such rank calls it, with
        the same `quorum`: "majority" or "any". `timeout` is in seconds.

        Raises ValueError for arguments that cannot be used and for a sub-group, BaguaTimeoutError naming the ranks that live and have not
        called, PeerLostError naming this rank when the others went on without it, and BaguaError without a quorum.
        """
    @property
    def size(self, /) -> int:
        """
        Number of ranks.
        """
    def stats(self, /) -> dict:
        """
        Counters since the group was built: a plain dict, times in seconds.
        """
    def subgroup(self, /, ranks: SupportsGetItem[int, SupportsIndex], name: str) -> Communicator | None:
        """
        The group of some members, given as ranks of this group: its rank r is `ranks[r]`. None when this rank is not among them. The
        members call it in the same order, with the same ranks and name.
        """
    @property
    def timeout(self, /) -> float:
        """
        Default deadline of an operation, in seconds.
        """
    @property
    def transports(self, /) -> list[str]:
        """
        Name of the transport towards each rank, "self" for this one.
        """
    def try_begin(self, /, verb: SupportsIndex, reader: TensorReader, src: Any | None, dst: Any, op: Any, root: Any) -> Handle | None:
        """
        As `try_run`, but asynchronous: returns a handle, which holds the tensors, or None where nothing is done.
        """
    def try_run(self, /, verb: SupportsIndex, reader: TensorReader, src: Any | None, dst: Any, op: Any, root: Any) -> bool:
        """
        A blocking verb (by its code in `VERBS`) on plain tensors: from `src`, which may be None, to `dst`, which then has changed.
        `root` is the root of the verbs that have one. Returns False, and does nothing, where the tensors are not plain or do not fit
        the verb; `run` then says what is wrong.
        """
    @property
    def view(self, /) -> int:
        """
        Number of the membership: 1 for a group that was joined, and grows with every `shrink`.
        """

@final
class CompressedExchange:
    """
    Combines tensors in host memory over the `size` members of a group, through a codec. `rank` is this process's place among them.

    Two functions send the records, which are blocks of `record` bytes, one for each member, at an address of host memory:
    `all_to_all(sent, received, record)` sends block j of `sent` to member j and stores the block of member i at place i of `received`;
    `all_gather(blocks, record)` fills `blocks`, of which block `rank` is there, with the block of each member. Both return when that is
    done. What they raise, the methods raise.
    """
    def __new__(cls, /, codec: Codec, rank: SupportsIndex, size: SupportsIndex, all_to_all: Any, all_gather: Any) -> CompressedExchange: ...
    def all_reduce(self, /, address: SupportsIndex, count: SupportsIndex, dtype: SupportsIndex, *, call: SupportsIndex, error: SupportsIndex | None) -> None:
        """
        Replaces the `count` elements of type `dtype` at `address` by their mean over the members. `call` is the number of the call, equal on
        all members, from which codecs that draw at random draw. `error` is the address of as many float32, the error memory, or None. The
        caller promises that both stay valid, and that no other code uses them, until the call has returned.

        Raises TypeError for a type that cannot be encoded, ValueError when an option of the codec does not fit the count.
        """
    def reduce_scatter(self, /, address: SupportsIndex, result: SupportsIndex, count: SupportsIndex, dtype: SupportsIndex, *, average: bool, call: SupportsIndex, error: SupportsIndex | None) -> None:
        """
        Combines the `count` elements of type `dtype` at `address`, which consist of one part for each member, and stores this member's part
        of the result at `result`: the mean over the members if `average`, else the sum. Each part is encoded once. The elements at
        `address` are overwritten. `call` and `error` are those of `all_reduce`. The caller promises that all three places stay valid, that
        they do not overlap, and that no other code uses them, until the call has returned.

        Raises TypeError for a type that cannot be encoded, ValueError if the count is not a multiple of the number of members, or if an
        option of the codec does not fit the count.
        """

@final
class CudaCall:
    """
    The device's side of one operation: see `Communicator.cuda_call`.
    """
    def copy(self, /, to: SupportsIndex, from_: SupportsIndex, bytes: SupportsIndex) -> None:
        """
        Copies `bytes` between two arrays of the device on the call's stream, behind the work of its producers and before the verb begins.
        The caller promises that both addresses stay valid until the device is done.
        """

@final
class CudaDevice:
    """
    A CUDA device of this process, with its primary context: see `CudaLibraries.device`.
    """
    def call(self, /, stream: SupportsIndex, producers: SupportsGetItem[int, SupportsIndex]) -> CudaCall:
        """
        The device's side of one call without a group, on `stream` and behind what the streams of `producers` have then.

        Raises NotImplementedError for a stream that is being captured, DeviceError.
        """
    @property
    def number(self, /) -> int:
        """
        Number of the device in this process.
        """
    def refuse_capture(self, /, streams: SupportsGetItem[int, SupportsIndex]) -> None:
        """
        Raises NotImplementedError when one of the streams is being captured into a graph, and leaves the capture as it is.
        """
    def release(self, /) -> None:
        """
        Lets go of the arrays of calls without a group that the device is done with. Does not wait.
        """

@final
class CudaLibraries:
    """
    The CUDA driver, NVRTC and NCCL of the process that creates this. A forked child of it has none.

    Creating it loads nothing. Each library is looked for at its first use, in the places (`bagua.config.CudaPlaces`) of that call, and
    what was found holds from then on.
    """
    def __new__(cls, /) -> CudaLibraries: ...
    def compile(self, /, places: Incomplete, program: str, architecture: SupportsIndex) -> tuple[bytes, bytes, str]:
        """
        A program of kernels for an architecture (90: compute capability 9.0), compiled without a driver: PTX, machine code, and the log.
        """
    def cubin(self, /, places: Incomplete, cache: str | PathLike[str] | None, program: str, architecture: SupportsIndex) -> bytes:
        """
        Machine code of a program for an architecture: from the folder `cache`, or compiled and then kept there. None: nothing is kept.
        """
    def device(self, /, places: Incomplete, cache: str | PathLike[str] | None, number: SupportsIndex) -> CudaDevice:
        """
        A device, by its number. The first use of a device may create its primary context, which takes a while. The places and the folder
        `cache` (None: nothing is kept) of the first call for a device are those of its kernels and of NCCL.

        Raises BaguaError with `why_not()` where there is no CUDA, DeviceError.
        """
    def device_of(self, /, places: Incomplete, address: SupportsIndex) -> int | None:
        """
        Number of the device whose memory an address is; None for memory of the host, -1 for managed memory. Raises as `device`.
        """
    def report(self, /, places: Incomplete) -> dict:
        """
        What there is: `driver`, `nvrtc` and `nccl` as dicts with `path`, `version` and `error`, None where that does not apply; nvrtc's
        `architectures`; and `devices` as dicts with `name`, `capability` (major, minor), `memory` (bytes) and `uuid` (16 bytes), None where
        the driver does not report it. Initialises the driver.
        """
    def why_not(self, /, places: Incomplete) -> str | None:
        """
        Why no device can be used, in one line, the same at each call; None when one can. Initialises the driver.
        """

@final
class Engine:
    """
    One strictly ordered queue of buckets with a lane and a communication thread of its own.
    """
    def cuda_call(self, /, device: CudaDevice, stream: SupportsIndex, producers: SupportsGetItem[int, SupportsIndex], collective: str, check: bool = False) -> CudaCall:
        """
        The device's side of one operation: see the communicator's.
        """
    def mark_ready(self, /, number: SupportsIndex, address: SupportsIndex | None = None, count: SupportsIndex | None = None, *, stream: SupportsIndex | None = None, producers: SupportsGetItem[int, SupportsIndex] | None = None, keep: Any | None = None) -> None:
        """
        The values of the tensor with this number are final for this step. `address` and `count` say where it is now, if it moved; in the same
        place as before.

        Of a tensor on a device the bucket is communicated behind the work that `stream` (None: the legacy stream) has now, and `keep` is held
        until the device is done; with `keep` also behind that of the streams of `producers`.

        Raises ValueError for an unknown number or a tensor that was marked already, NotImplementedError for a stream that is being captured,
        and what went wrong on the communication thread.
        """
    def register(self, /, buckets: SupportsGetItem[int, Bucket]) -> list[str]:
        """
        Waits for what is pending, then replaces the buckets. Their order is the order of communication, equal on all ranks.

        Returns the names of the tensors, padding left out: a tensor's index in this list is its number. Raises ValueError for a
        tensor name, or the memory of a tensor, that appears twice.
        """
    def run(self, /, verb: SupportsIndex, src: SupportsIndex | None, dst: SupportsIndex | None, count: SupportsIndex, dtype: SupportsIndex, op: SupportsIndex = 0, root: SupportsIndex = 0, *, shape: SupportsGetItem[int, SupportsIndex] | None = None, timeout: SupportsFloat | SupportsIndex | None = None, async_op: bool = False, keep: Any | None = None, place: CudaCall | None = None) -> Handle | None:
        """
        A verb: see the communicator's; in order with the buckets.
        """
    def set_step(self, /, step: SupportsIndex, after_load: bool = False) -> None:
        """
        Buckets that go from now on belong to this step of a training, counted from 1: MismatchError where another rank communicates them in
        another one, or has not loaded a state before it as this one (`after_load`). 0, as in the beginning: the steps are not compared.
        """
    def shutdown(self, /) -> None:
        """
        Ends the thread: what is queued fails with AbortedError. Idempotent.
        """
    def unready(self, /) -> list[str]:
        """
        Names of the tensors that are not ready, of buckets that were not communicated since the last `wait`.
        """
    def wait(self, /, timeout: SupportsFloat | SupportsIndex | None = None, *, stream: SupportsIndex | None = None) -> int:
        """
        Waits until every scheduled bucket is done, at most `timeout` seconds, and returns how many were. Ctrl-C ends the wait.

        Of buckets on a device, work that `stream` (None: the legacy stream) gets from now on sees the results; the device may still have work.

        Raises what went wrong; ValueError names the tensors that are missing of a bucket that is partly ready. NotImplementedError for a
        stream that is being captured: another wait reports the buckets.
        """

@final
class GroupConfig:
    """
    The parameters with which a rank joins a group, which is called `name` and listens on any free port of `listen_host`.

    `settings` has the attributes of `bagua.config.Settings`: ranks with equal `host_id` share memory ("": boot id and network namespace),
    `transport` is one of `TRANSPORTS`, `streams_per_peer` (1 to 64) is the number of TCP streams to a rank on another host, `algorithm` (one
    of `ALGORITHMS`) is the algorithm of all_reduce between hosts; `timeout` (of an operation, and of connecting) and `heartbeat_timeout` are
    in seconds; with `tls` every TCP connection is encrypted. Raises ValueError for invalid arguments.
    """
    def __new__(cls, /, rank: SupportsIndex, world_size: SupportsIndex, settings: Any, *, name: str, secret: SupportsGetItem[int, SupportsIndex], listen_host: str) -> GroupConfig: ...

@final
class Handle:
    """
    The outcome of an asynchronous operation, now or later.
    """
    @staticmethod
    def completed() -> Handle:
        """
        The handle of an operation that had nothing to do.
        """
    def is_completed(self, /) -> bool:
        """
        True when the operation is done, well or not, and its device with it.
        """
    def senders(self, /) -> list[int | None]:
        """
        Ranks of the group that sent the messages that were received, in the order of the receives; None for a message that has not come.
        """
    def synchronize(self, /, timeout: SupportsFloat | SupportsIndex | None = None) -> None:
        """
        Waits until the operation is done, on its device too, at most `timeout` seconds. Ctrl-C ends the wait. Raises as `wait`.
        """
    def then(self, callback: Any, /) -> None:
        """
        Calls `callback(error)` when the operation is done, exactly once: `error` is None, or the exception that `wait` raises.

        When the operation is done already, the call happens here. Otherwise it happens on the thread "bagua-callbacks", which
        calls the callbacks of all handles of the process one after another: a callback may block and start operations, and
        only other callbacks wait for it. An exception of a callback goes to `sys.unraisablehook`; only one that is no Exception
        (KeyboardInterrupt, SystemExit) is raised here, when the call happens here.

        Raises TypeError for what is not callable, BaguaError in a forked child while the operation is pending.
        """
    def wait(self, /, timeout: SupportsFloat | SupportsIndex | None = None, *, stream: SupportsIndex | None = None) -> None:
        """
        Waits until the operation is done, at most `timeout` seconds (None: until its own deadline ends it). Ctrl-C ends the wait.

        Of an operation on a device, work that `stream` (None: the call's) gets from now on sees the result; the device may still have work.

        Raises BaguaTimeoutError when `timeout` passes, which leaves the operation running; NotImplementedError for a stream that is being
        captured; else what the operation raises.
        """

@final
class JoinServer:
    """
    The server of one rank of an elastic job: it accepts who knows the secret and the token, and connects to the servers of other ranks.

    `config` is that of the groups that this process joins; `token` is a random number of the job.
    Addresses are "host:port". Raises BaguaError when the socket cannot be opened.
    """
    def __new__(cls, /, config: GroupConfig, token: SupportsGetItem[int, SupportsIndex]) -> JoinServer: ...
    @property
    def address(self, /) -> str:
        """
        Where it listens.
        """
    def enter_job(self, /) -> None:
        """
        This rank is in the job now.
        """
    @property
    def incarnation(self, /) -> int:
        """
        A number that no other process of this rank has.
        """
    def join(self, /, name: str, weights: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex, bool]], buffers: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex, bool]], lock: WeightLock, interval: SupportsFloat | SupportsIndex, codec: Codec | None, digest: SupportsLenAndGetItem[SupportsIndex], timeout: SupportsFloat | SupportsIndex, device: tuple[CudaDevice, SupportsIndex, Any] | None = None) -> Averager:
        """
        Joins the averaging of a model in the running job: as `Communicator.averager`, but not collective, and alone where the other
        ranks run. The weights are the job's after `Averager.wait_joined`. The caller promises the same of the addresses.

        Raises MismatchError for a model that does not fit, BaguaTimeoutError after `timeout` seconds.
        """
    def note_server(self, /, rank: SupportsIndex, at: str) -> None:
        """
        Notes where the server of another rank listens.
        """
    @property
    def refused(self, /) -> int:
        """
        How many connections it refused.
        """
    def status(self, /, rank: SupportsIndex, at: str, timeout: SupportsFloat | SupportsIndex) -> dict:
        """
        Requests the state of a rank: {"rank", "incarnation", "in_job", "models"}. Raises BaguaError when its server does not answer within
        `timeout` seconds, or refuses.
        """

@final
class RendezvousServer:
    """
    Rank 0's server of a rendezvous. It listens from its creation on: on `host`, an IP address, and `port`, 0 for any free port.

    Raises ValueError for an invalid address, BaguaError when the socket cannot be opened.
    """
    def __new__(cls, /, host: str, port: SupportsIndex) -> RendezvousServer: ...
    def address(self, /) -> tuple[str, int]:
        """
        Host and port, which the other ranks pass to `rendezvous_at`.
        """
    def serve(self, /, world_size: SupportsIndex, address: SupportsGetItem[int, SupportsIndex], secret: SupportsGetItem[int, SupportsIndex], timeout: SupportsFloat | SupportsIndex, tls: Tls | None = None, heartbeat_timeout: SupportsFloat | SupportsIndex = 5.0, waiting: Any | None = None) -> list[bytes]:
        """
        Exchanges the addresses of all ranks; `address` is rank 0's blob, `timeout` is in seconds. May be called once.

        Returns the blobs of all ranks, by rank. Raises BaguaTimeoutError and PeerLostError as `rendezvous_tcp`.
        """

@final
class Store:
    """
    Values, which are bytes, by key, with the calls of torch.distributed.Store. Its methods raise BaguaError when the store does not answer
    or cannot keep a value.
    """
    def add(self, /, key: str, amount: SupportsIndex) -> int:
        """
        Adds to the number that a key has as its value, 0 without one, and returns the sum.
        """
    @staticmethod
    def files(directory: str | PathLike[str]) -> Store:
        """
        The files of a directory, readable by their owner only.
        """
    def get(self, /, key: str) -> bytes | None:
        """
        The value of a key; None without one. Does not wait.
        """
    def set(self, /, key: str, value: SupportsGetItem[int, SupportsIndex]) -> None:
        """
        Sets the value of a key.
        """
    def set_new(self, /, key: str, value: SupportsGetItem[int, SupportsIndex]) -> bytes:
        """
        Sets the value of a key that has none, and returns the value that it has then.
        """
    @staticmethod
    def tcp(host: str, port: SupportsIndex, secret: SupportsGetItem[int, SupportsIndex], timeout: SupportsFloat | SupportsIndex, tls: Tls | None = None) -> Store:
        """
        Connects to a `StoreServer`. Raises BaguaTimeoutError when none answers within `timeout` seconds, BaguaError when it has another
        secret or only one of the two uses TLS.
        """
    def wait(self, /, keys: SupportsGetItem[int, str], timeout: timedelta) -> None:
        """
        Waits until all keys have a value. Raises BaguaTimeoutError after `timeout`, a timedelta.
        """

@final
class StoreServer:
    """
    Serves a store on `host` ("": every address) and `port` (0: any free one) until `stop`. The values are kept in the file `kept_in`, if it
    is given, for a later server.

    Raises BaguaError, whose cause is the OSError, when it cannot listen there or use the file.
    """
    def __new__(cls, /, host: str, port: SupportsIndex, secret: SupportsGetItem[int, SupportsIndex], tls: Tls | None = None, kept_in: str | PathLike[str] | None = None) -> StoreServer: ...
    @property
    def port(self, /) -> int:
        """
        The port that it listens on.
        """
    def stop(self, /) -> None:
        """
        Ends it. Idempotent.
        """

@final
class TensorReader:
    """
    Reads the tensors of some classes that share one exchange table; without classes, none.

    `lazy_flags` is called with a tensor that is plain otherwise and returns its lazy operations (a conjugation or negation that torch has
    not applied yet): falsy for a plain tensor. `changed` is called with a tuple of one tensor after a verb has written to it. Raises
    TypeError for classes without such a table.
    """
    def __new__(cls, /, classes: SupportsGetItem[int, type], lazy_flags: Any, changed: Any) -> TensorReader: ...
    def at(self, /, x: Any) -> tuple[int, int, int, tuple | None, Any] | None:
        """
        Address, number of elements, code of the type, dimensions (None for one dimension) and the tensor itself, of a plain tensor; None
        for all others, also for a tensor with a lazy negation.
        """

@final
class Tls:
    """
    TLS 1.3: without arguments by a key pair that is derived from the job's secret; with the PEM texts of this rank's certificate, its
    private key and the CA by certificates, which the CA has signed for all ranks.

    Raises ValueError that says which of them cannot be used, and why.
    """
    def __new__(cls, /, certificate: SupportsGetItem[int, SupportsIndex] | None = None, key: SupportsGetItem[int, SupportsIndex] | None = None, ca: SupportsGetItem[int, SupportsIndex] | None = None) -> Tls: ...

@final
class WeightLock:
    """
    The lock of one model's weights, between its training, its averaging and its user: first come, first served.

    Of weights on a CUDA device who takes it has work that its `stream` gets from then on come behind that of the holders before; who gives
    it back says where its own work is. None is the legacy stream. No thread waits for the device. A stream that is being captured is a
    NotImplementedError, and the lock is not taken; it is given back whatever is raised.

    Without effect in a forked child, where nothing averages.
    """
    def __new__(cls, /) -> WeightLock: ...
    def begin_training(self, /, *, stream: SupportsIndex | None = None) -> None:
        """
        Takes it for the training, from whichever thread; counts once. Ends a pause.
        """
    def end_training(self, /, *, stream: SupportsIndex | None = None) -> None:
        """
        Ends the training's hold; without effect when others have taken it.
        """
    def is_used_here(self, /) -> bool:
        """
        True while this thread uses it: a wait for a round would then never end.
        """
    def lock(self, /, *, stream: SupportsIndex | None = None) -> None:
        """
        Takes it for this thread, which may have it already. Waits without the GIL; Ctrl-C ends the wait.
        """
    def mark(self, /, *, stream: SupportsIndex | None = None) -> None:
        """
        Who takes the lock next comes behind the work that `stream` has now, without giving it back: after a time in which no other thread
        used the weights, so that no lock was needed.
        """
    def order(self, /, *, stream: SupportsIndex | None = None) -> None:
        """
        Work that `stream` gets from now on comes behind that of all who held the lock before, without taking it.
        """
    def pause_training(self, /, limit: SupportsFloat | SupportsIndex, *, stream: SupportsIndex | None = None) -> None:
        """
        Lets others take it after `limit` seconds, unless the training goes on before.
        """
    def unlock(self, /, *, stream: SupportsIndex | None = None) -> None:
        """
        Gives one `lock` of this thread back. Raises BaguaError on a thread that does not hold it.
        """
    @property
    def waited(self, /) -> float:
        """
        Seconds that threads have waited for it.
        """

def check_peer_selection(peer_selection_mode: str, members: SupportsIndex) -> None:
    """
    Refuses a peer selection that does not exist, or does not work among so many members: ValueError.
    """

def flight_recorder() -> list[dict]:
    """
    The last operations of this process as dicts, oldest first; times in seconds since the epoch. See `bagua.flight_recorder`.
    """

def local_address_towards(host: str, port: SupportsIndex) -> str:
    """
    The local address of the route to `host:port`. Sends nothing.
    """

def read_array(x: Any) -> tuple[int, int, int, tuple | None, bool] | None:
    """
    Address, number of elements, code of the type, dimensions (None for one dimension), and whether it is writeable, of a contiguous NumPy
    array; None for all other objects.
    """

def rendezvous_at(host: str, port: SupportsIndex, rank: SupportsIndex, world_size: SupportsIndex, address: SupportsGetItem[int, SupportsIndex], secret: SupportsGetItem[int, SupportsIndex], timeout: SupportsFloat | SupportsIndex, tls: Tls | None = None, heartbeat_timeout: SupportsFloat | SupportsIndex = 5.0, waiting: Any | None = None) -> list[bytes]:
    """
    As `rendezvous_tcp` on ranks other than 0, through the `RendezvousServer` at `host:port`.

    Raises PeerLostError when the connection to the server fails or breaks.
    """

def rendezvous_file(path: str | PathLike[str], rank: SupportsIndex, world_size: SupportsIndex, address: SupportsGetItem[int, SupportsIndex], timeout: SupportsFloat | SupportsIndex, waiting: Any | None = None) -> list[bytes]:
    """
    Exchanges addresses through files next to `path`, on a file system that all ranks share. `timeout` is in seconds.

    Returns the blobs of all ranks, by rank. Raises BaguaTimeoutError naming the missing ranks, or another BaguaError.
    """

def rendezvous_tcp(host: str, port: SupportsIndex, rank: SupportsIndex, world_size: SupportsIndex, address: SupportsGetItem[int, SupportsIndex], secret: SupportsGetItem[int, SupportsIndex], timeout: SupportsFloat | SupportsIndex, tls: Tls | None = None, heartbeat_timeout: SupportsFloat | SupportsIndex = 5.0, waiting: Any | None = None) -> list[bytes]:
    """
    Exchanges addresses through a TCP server that rank 0 runs on `host:port` until every rank has all of them.

    `address` is this rank's blob from `Bootstrap.address()`, `timeout` is in seconds. Returns the blobs of all ranks, by rank.
    A rank whose process ends after it came is lost unless another one takes its rank within `heartbeat_timeout` seconds. `waiting` is called
    with the ranks that this rank waits for, every 50 to 200 ms while it knows of any.
    Raises BaguaTimeoutError naming the missing ranks, PeerLostError naming a lost one, or another BaguaError.
    """

def set_recording(on: bool) -> None:
    """
    Whether operations that begin from now on are recorded, as they are by default. For benchmarks of the recorder itself.
    """

def tables() -> dict:
    """
    By the names that `bagua.engine` gives them, which describes them.
    """

def version() -> str:
    """
    Version of this build.
    """

def wait_for_callbacks(timeout: SupportsFloat | SupportsIndex) -> None:
    """
    Waits until every callback that was given to `Handle.then` has returned. For the end of a program, after its groups were left.

    Raises BaguaError when some have not after `timeout` seconds, ValueError in a callback, which would wait for itself.
    """
