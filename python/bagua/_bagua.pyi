"""
The Rust core of Bagua. Import `bagua` instead: this module takes addresses and codes.
"""

from _typeshed import Incomplete, SupportsGetItem, SupportsLenAndGetItem
from datetime import timedelta
from os import PathLike
from typing import Any, SupportsFloat, SupportsIndex, final

__all__ = ["Arena", "AsyncModelAverage", "Averager", "Bootstrap", "Bucket", "Codec", "Communicator", "CompressedExchange", "CudaCall", "CudaDevice", "CudaLibraries", "Engine", "GroupConfig", "Handle", "JoinServer", "RendezvousServer", "Store", "StoreServer", "TensorReader", "Tls", "WeightLock", "check_peer_selection", "flight_recorder", "local_address_towards", "read_array", "rendezvous_at", "rendezvous_file", "rendezvous_tcp", "tables", "version", "wait_for_callbacks"]

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
        True if peers on this host can map this memory; otherwise the memory is private.
        """

@final
class AsyncModelAverage:
    """
    The operation of a bucket that averages weights. `takes_part` says if this rank takes part in its rounds.
    """
    def set_takes_part(self, /, takes_part: bool) -> None:
        """
        Makes this rank's weights count and change from the next round on, or not.
        """
    @property
    def takes_part(self, /) -> bool:
        """
        True if this rank's weights count and are changed.
        """

@final
class Averager:
    """
    Averages the weights of a model with those of the other ranks, on its own thread.

    If that thread fails, every method except `stop` and `stats` raises its error.
    """
    def abort(self, /, timeout: SupportsFloat | SupportsIndex) -> None:
        """
        Ends this rank's part in the averaging. Waits for at most `timeout` seconds until nothing writes to its weights.
        """
    def check(self, /) -> None:
        """
        Raises the error of the averaging thread, if it has failed.
        """
    def count_step(self, /) -> None:
        """
        Counts a step of the optimizer.
        """
    @property
    def forwards(self, /) -> int:
        """
        The caller's count of forward passes, which a joining rank takes over from the job.
        """
    def resume(self, /) -> None:
        """
        Takes part in the averaging again from the next round on.
        """
    def set_forwards(self, /, forwards: SupportsIndex) -> None:
        """
        Sets the caller's count of forward passes.
        """
    def stats(self, /) -> dict:
        """
        Statistics of this rank's averaging. Durations are in seconds.
        """
    def stop(self, /, timeout: SupportsFloat | SupportsIndex) -> None:
        """
        Ends the thread. A round in progress may end first, for at most `timeout` seconds. Further calls do nothing.
        """
    def synchronize(self, /, timeout: SupportsFloat | SupportsIndex) -> None:
        """
        Runs one round of averaging in which every participating rank holds its locks throughout. Raises
        BaguaTimeoutError, which names the ranks that did not call.
        """
    def wait_joined(self, /, timeout: SupportsFloat | SupportsIndex) -> None:
        """
        Waits for at most `timeout` seconds until a joining rank has an average without its own weights.
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
        Stops listening and ends the control thread. Has no effect after `connect`.

        Without this call, both end with this object, which the traceback of an error may keep alive.
        """
    def connect(self, /, addresses: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]], waiting: Any | None = None) -> Communicator:
        """
        Connects to all peers and opens the group's main lane. `addresses[r]` is the address of rank r. Only once.

        Every 50 to 200 ms, `waiting` is called with the ranks that this rank waits for. Raises BaguaTimeoutError, which
        names the ranks that did not connect within `connect_timeout`.
        """

@final
class Bucket:
    """
    Named tensors of one element type that are communicated together: a list of (name, address, count, dtype, padding).

    The caller promises that the addresses stay valid as long as the bucket is registered with an engine. With `device`,
    the addresses are on that CUDA device, and `keep` is held until the device has finished with them. `collective` is a
    value of BAGUA_CUDA_COLLECTIVE, and `check` a value of BAGUA_CUDA_CHECK.

    Raises ValueError for an empty list or a repeated name, TypeError for mixed element types.
    """
    def __new__(cls, /, name: str, tensors: SupportsGetItem[int, tuple[str, SupportsIndex, SupportsIndex, SupportsIndex, bool]], *, device: CudaDevice | None = None, collective: str = "auto", check: bool = False, keep: Any | None = None) -> Bucket: ...
    def append_asynchronous_model_average(self, /, lock: WeightLock, *, elsewhere: bool = False) -> AsyncModelAverage:
        """
        Adds a round of asynchronous averaging of weights that are used under `lock`. On a device, the lock orders other
        streams with the operations on the bucket. `elsewhere` turns this off, for an averaging that runs the rounds
        itself.

        Raises TypeError if the elements are not real floating-point numbers.
        """
    def append_automatic(self, /, codec: Codec, average: bool, hierarchical: bool, exact: SupportsIndex = 0) -> None:
        """
        Adds an all_reduce with or without a codec: both are timed now and then, and the faster is kept. `exact` and
        errors as in append_compressed.
        """
    def append_callback(self, /, function: Any) -> None:
        """
        Adds a call of `function(bucket name)` on the communication thread. No other operation waits for the GIL.

        If the function raises, the engine and the group fail. The next call of the engine on this rank raises
        BaguaError with that exception as its cause, and the other ranks get PeerRaisedError with its class and text.
        `clear_ops` drops the function.
        """
    def append_centralized(self, /, average: bool, hierarchical: bool, scattergather: bool) -> None:
        """
        Adds an all_reduce, which averages over all ranks if `average` is true and sums otherwise. With `hierarchical`,
        ranks of one host combine their tensors first, even if the group would not. `scattergather` has no effect,
        because every all_reduce here is a reduce-scatter followed by an all-gather.
        """
    def append_compressed(self, /, codec: Codec, average: bool, hierarchical: bool, error_feedback: bool, exact: SupportsIndex = 0) -> None:
        """
        Adds an all_reduce through a codec. `error_feedback` needs the extra tensor "error", with one float32 for each
        element except padding. The last `exact` elements, which must be padding, are added without the codec.

        Raises TypeError if the codec does not encode the element type, ValueError if the codec's options do not fit the
        number of elements.
        """
    def append_decentralized(self, /, peer_selection_mode: str, hierarchical: bool) -> None:
        """
        Adds an averaging with peers, into the extra tensor "peer_weight" of the bucket's length and type.

        Raises ValueError for an unknown selection, TypeError for elements without a mean.
        """
    def append_low_precision_decentralized(self, /, codec: Codec, hierarchical: bool) -> None:
        """
        Adds a round of the compressed ring, with the extra tensors "weight", "left_peer_weight" and
        "right_peer_weight".

        Raises the same errors as `append_compressed`.
        """
    def attach(self, /, name: str, address: SupportsIndex, count: SupportsIndex, dtype: SupportsIndex, *, device: CudaDevice | None = None, keep: Any | None = None) -> None:
        """
        Registers an extra tensor for the operations (peer weights, replicas, error memory), or replaces the one of the
        same name. The address must stay valid as long as the bucket is registered. With `device`, the address is on
        that device, and `keep` is held like that of the bucket.

        Raises ValueError while the bucket is being communicated, TypeError if the tensor is not on the bucket's device.
        """
    @property
    def bytes(self, /) -> int:
        """
        Number of bytes of all tensors, padding included.
        """
    def choice(self, /) -> str | None:
        """
        Name of the codec that an automatic operation uses now, "" if it uses none. None without such an operation.
        """
    def clear_ops(self, /) -> None:
        """
        Removes all operations. Raises ValueError while the bucket is being communicated.
        """
    def copy_from_extra(self, /, name: str, *, stream: SupportsIndex | None = None) -> None:
        """
        Copies an extra tensor of the bucket's length into the bucket. On a device, the copy is work of `stream` (None:
        the legacy stream). Raises ValueError while the bucket is being communicated.
        """
    @property
    def dtype(self, /) -> int:
        """
        Code of the element type (see `DTYPES`).
        """
    @property
    def name(self, /) -> str:
        """
        Name of the bucket.
        """
    def ops(self, /) -> list[str]:
        """
        Names of the operations, in the order in which they run.
        """
    def set_step(self, /, step: SupportsIndex) -> None:
        """
        Counts communications from `step`, to resume a training. Raises ValueError while the bucket is being
        communicated.
        """
    @property
    def step(self, /) -> int:
        """
        Number of times the bucket was communicated since it was registered. `set_step` sets this number.
        """

@final
class Codec:
    """
    A codec with its options, for callers that pass addresses. Users have `bagua.Codec`. The caller promises that the
    addresses stay valid, and that no other code writes to a source or uses a destination, until the call has returned,
    or on a device until the work is done.

    Raises ValueError for an unknown name or an option out of its range, TypeError for an unknown option or one of the
    wrong type.
    """
    def __new__(cls, /, name: str, options: dict) -> Codec: ...
    def check_device(self, /) -> None:
        """
        Raises NotImplementedError if the codec has no kernels for devices.
        """
    def decode(self, /, src: SupportsIndex, len: SupportsIndex, dst: SupportsIndex, count: SupportsIndex, dtype: SupportsIndex, chunks: SupportsIndex, *, call: CudaCall | None = None, keep: Any | None = None) -> None:
        """
        Decodes the `len` bytes at `src` into `count` elements at `dst`, in `chunks` equal parts. `call` is that of
        `encode`.

        Raises the errors of `encode`, and ValueError for bytes that no encoder writes. A device does not check for such
        bytes.
        """
    def encode(self, /, src: SupportsIndex, count: SupportsIndex, dtype: SupportsIndex, chunks: SupportsIndex, dst: SupportsIndex, len: SupportsIndex, *, call: CudaCall | None = None, keep: Any | None = None) -> None:
        """
        Encodes `count` elements at `src`, in `chunks` equal parts, into the `len` bytes at `dst`.

        With `call`, both addresses are on its device: the call's stream does the work, and `keep` is held until the
        device is done.

        Raises the errors of `encoded_bytes`, and ValueError if `len` differs from `encoded_bytes` or if the memory
        overlaps. On a device, also raises the errors of `check_device`, BaguaError without NVRTC, and DeviceError.
        """
    def encoded_bytes(self, /, count: SupportsIndex, dtype: SupportsIndex, chunks: SupportsIndex) -> int:
        """
        Returns the number of bytes that `count` elements take when they are encoded in `chunks` equal parts.

        Raises ValueError if `chunks` does not divide `count` or an option does not fit, TypeError for a type that
        cannot be encoded.
        """
    @property
    def name(self, /) -> str:
        """
        Registered name of the codec.
        """
    @property
    def options(self, /) -> dict:
        """
        All options of the codec with their values.
        """

@final
class Communicator:
    """
    A group of ranks and its main lane. Verbs run in program order; a blocking verb runs on the calling thread.

    The caller promises that an address stays valid until the verb has returned or its handle is done. `keep` holds any
    object until then. Verbs raise ValueError or TypeError before anything is sent, and the classes of `bagua.errors`
    afterwards.
    """
    def __repr__(self, /) -> str: ...
    def abort(self, /, reason: str) -> None:
        """
        Poisons the group on every rank with AbortedError.
        """
    def all_to_all_v(self, /, src: SupportsIndex | None, src_count: SupportsIndex, dst: SupportsIndex, dst_count: SupportsIndex, dtype: SupportsIndex, send_counts: SupportsGetItem[int, SupportsIndex], send_displs: SupportsGetItem[int, SupportsIndex], recv_counts: SupportsGetItem[int, SupportsIndex], recv_displs: SupportsGetItem[int, SupportsIndex], *, timeout: SupportsFloat | SupportsIndex | None = None, async_op: bool = False, keep: Any | None = None, place: CudaCall | None = None) -> Handle | None:
        """
        Sends `send_counts[r]` elements, from element `send_displs[r]` of the source, to each rank r, and receives
        `recv_counts[r]` elements from rank r at element `recv_displs[r]` of the destination. `src_count` and
        `dst_count` are the elements of the whole buffers. With `src` None, works in place at `dst` and ignores
        `src_count`.
        """
    def arena(self, /, nbytes: SupportsIndex, *, label: str = "bagua-arena") -> Arena:
        """
        Allocates `nbytes` zeroed bytes for tensors. Not collective. If the tensors of a verb lie in such memory on all
        ranks of a host, the verb works on the peers' memory directly. The first such verb maps it.
        """
    def averager(self, /, name: str, weights: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex, bool]], lock: WeightLock, interval: SupportsFloat | SupportsIndex, codec: Codec | None, *, buffers: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex, bool]], join_server: JoinServer | None, digest: SupportsLenAndGetItem[SupportsIndex], takes_part: bool, device: tuple[CudaDevice, SupportsIndex, Any] | None = None) -> Averager:
        """
        Averages weights every `interval` seconds with the other ranks, through a codec if one is given. `weights` is a
        list of (address, count, dtype), with the same counts and dtypes on all ranks. Every rank of the group calls
        this, in the same order.

        In an elastic job, `join_server` is this rank's server: lost ranks leave the averaging, and processes that join
        get the average and a rank's `buffers`. `digest` is a digest of everything that must be equal on all ranks.

        Each entry of `weights` and `buffers` ends in a boolean, which is true for memory on the CUDA device of
        `device`, a tuple (device, stream, keep). The first snapshot is taken after the work that the stream has now.
        `keep` is held until the averager has stopped and the device is done.

        The caller promises that the addresses stay valid until the averager has stopped, and that the memory is used
        under `lock`.
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
        Returns the device's side of one operation, to be passed as `place`. The operation begins after the work that
        `stream` and the streams of `producers` have when the verb is called. `collective` is a value of
        BAGUA_CUDA_COLLECTIVE. With `check` (BAGUA_CUDA_CHECK), ranks first compare their calls.

        Raises NotImplementedError for a stream that is being captured, ValueError for an unknown collective,
        DeviceError.
        """
    def cuda_messages(self, /, device: CudaDevice, stream: SupportsIndex, producers: SupportsGetItem[int, SupportsIndex]) -> CudaCall:
        """
        Returns the device's side of messages, as `cuda_call` does for verbs.
        """
    def engine(self, /, name: str) -> Engine:
        """
        An engine with a lane and a thread of its own. Every rank of the group calls it, in the same order.
        """
    def exchange(self, /, sends: SupportsGetItem[int, tuple[SupportsIndex | None, SupportsIndex, SupportsIndex]], recvs: SupportsGetItem[int, tuple[SupportsIndex | None, SupportsIndex, SupportsIndex]], dtype: SupportsIndex, *, tag: SupportsIndex = 0, timeout: SupportsFloat | SupportsIndex | None = None, async_op: bool = False, keep: Any | None = None, place: CudaCall | None = None) -> Handle | None:
        """
        Sends and receives messages, independently of the verbs. `sends` and `recvs` are lists of (peer, address,
        count). The other side must use the same type, tag and count. The peer of a receive may be None, for any rank:
        `Handle.senders` then tells the sender. `keep` is held until all messages are done, even if Ctrl-C ends a
        blocking call earlier. With `place`, which `cuda_messages` returns, the addresses are on a device, and the bytes
        travel through host memory.
        """
    @property
    def hosts(self, /) -> list[list[int]]:
        """
        Group ranks on each host, hosts in the order of their first rank.
        """
    def leave(self, /) -> None:
        """
        Leaves the group in order, and closes every connection of this rank. Leaving the world leaves its sub-groups.
        Further calls do nothing.
        """
    @property
    def listen_host(self, /) -> str:
        """
        The IP address on which this rank listens for the others.
        """
    @property
    def machines(self, /) -> list[list[int]]:
        """
        Ranks of the group on each machine, in the order of their first rank. Unlike `hosts`, also lists ranks of a
        machine together if they may not share memory.
        """
    @property
    def name(self, /) -> str:
        """
        Name of the group.
        """
    def raise_(self, /, kind: str, message: str) -> None:
        """
        Poisons the group on every rank. The other ranks get PeerRaisedError with this class name and text.
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
        Runs a verb (a code in `VERBS`) on host memory. In the following, n is the number of ranks and r a rank.

        `count` elements of type `dtype` (a code in `DTYPES`) are the whole tensor for all_reduce, reduce and broadcast,
        and one rank's shard for the other verbs. `src` and `dst` are addresses. Without `src` the verb works in place
        at `dst`, where shard r starts at element r * count. Otherwise all_gather and gather (on its root) write n *
        count elements, scatter (on its root) and reduce_scatter read n * count, and all_to_all does both. If this rank
        receives nothing, `dst` may be None. `op` is a code in `OPS`, and `root` a rank of the group; verbs without an
        operation or a root ignore them. With `async_op`, returns a handle, and `keep` is held until the handle is done.

        With `place` the addresses are on a device. The verb runs on the communication thread, and `keep` is held until
        the device is done. This thread waits for the other ranks, never for the device. When the verb has returned,
        later work of the call's stream runs after the verb.
        """
    def shrink(self, /, timeout: SupportsFloat | SupportsIndex | None = None, *, quorum: str = "majority") -> tuple[Communicator, list[int]]:
        """
        Leaves this group, and returns the group of the surviving ranks, with the rank in this group of each of its
        ranks. Every survivor calls it with the same `quorum`: "majority" or "any". `timeout` is in seconds.

        Raises ValueError for invalid arguments and for a sub-group, BaguaTimeoutError, which names the living ranks
        that have not called, PeerLostError, which names this rank, if the other ranks continued without it, and
        BaguaError without a quorum.
        """
    @property
    def size(self, /) -> int:
        """
        Number of ranks in the group.
        """
    def stats(self, /) -> dict:
        """
        Returns the counters since the group was built as a dict. Times are in seconds.
        """
    def subgroup(self, /, ranks: SupportsGetItem[int, SupportsIndex], name: str) -> Communicator | None:
        """
        Returns the group of some members, given as ranks of this group: rank r of the new group is `ranks[r]`. If this
        rank is not a member, returns None. Members call this in the same order, with the same ranks and name.
        """
    @property
    def timeout(self, /) -> float:
        """
        Default deadline of an operation, in seconds.
        """
    @property
    def transports(self, /) -> list[str]:
        """
        Name of the transport to each rank, "self" for this rank.
        """
    def try_begin(self, /, verb: SupportsIndex, reader: TensorReader, src: Any | None, dst: Any, op: Any, root: Any) -> Handle | None:
        """
        Starts a verb as `try_run` does, without waiting. Returns a handle, or None if it did nothing. The memory is
        held until the handle is done.
        """
    def try_run(self, /, verb: SupportsIndex, reader: TensorReader, src: Any | None, dst: Any, op: Any, root: Any) -> bool:
        """
        Runs a blocking verb (a code in `VERBS`) on plain tensors, from `src`, which may be None, to `dst`, which is
        modified. `root` is ignored by verbs without a root. Returns False, and does nothing, if the tensors are not
        plain or do not fit the verb. `run` then raises the error.
        """
    @property
    def view(self, /) -> int:
        """
        Number of the group's membership. 1 for a group that was joined, and larger after every `shrink`.
        """

@final
class CompressedExchange:
    """
    An exchange that combines tensors in host memory over the `size` members of a group, through a codec. `rank` is this
    process's rank in the group.

    Two functions send the records. A record is `record` bytes of host memory, and there is one for each member.
    `all_to_all(sent, received, record)` sends block j of `sent` to member j, and stores the block from member i at
    place i of `received`. `all_gather(blocks, record)` starts with block `rank` of `blocks`, and fills in the block of
    each other member. Both functions return when the exchange is done. The methods pass on the exceptions that they
    raise.
    """
    def __new__(cls, /, codec: Codec, rank: SupportsIndex, size: SupportsIndex, all_to_all: Any, all_gather: Any) -> CompressedExchange: ...
    def all_reduce(self, /, address: SupportsIndex, count: SupportsIndex, dtype: SupportsIndex, *, call: SupportsIndex, error: SupportsIndex | None) -> None:
        """
        Replaces the `count` elements of type `dtype` at `address` by their mean over the members. `call` is the number
        of the call, equal on all members: codecs with randomness use it as a seed. `error` is None or the address of
        the error memory, which has `count` float32. The caller promises that both addresses stay valid, and that no
        other code uses them, until the call has returned.

        Raises TypeError for a type that cannot be encoded, ValueError if an option of the codec does not fit the count.
        """
    def reduce_scatter(self, /, address: SupportsIndex, result: SupportsIndex, count: SupportsIndex, dtype: SupportsIndex, *, average: bool, call: SupportsIndex, error: SupportsIndex | None) -> None:
        """
        Combines the `count` elements of type `dtype` at `address`, which consist of one part for each member, and
        stores this member's part of the result at `result`: the mean over the members if `average`, otherwise the sum.
        Each part is encoded once. The elements at `address` are overwritten. `call` and `error` are those of
        `all_reduce`. The caller promises that the three addresses stay valid, that their memory does not overlap, and
        that no other code uses it, until the call has returned.

        Raises TypeError for a type that cannot be encoded, ValueError if the count is not a multiple of the number of
        members, or if an option of the codec does not fit the count.
        """

@final
class CudaCall:
    """
    The device's side of one operation, as `Communicator.cuda_call` returns it.
    """
    def copy(self, /, to: SupportsIndex, from_: SupportsIndex, bytes: SupportsIndex) -> None:
        """
        Copies `bytes` between two arrays of the device, on the call's stream: after the work of the producers, and
        before the verb begins. The caller promises that both addresses stay valid until the device is done.
        """

@final
class CudaDevice:
    """
    A CUDA device of this process, with its primary context: see `CudaLibraries.device`.
    """
    def call(self, /, stream: SupportsIndex, producers: SupportsGetItem[int, SupportsIndex]) -> CudaCall:
        """
        Returns the device's side of one call without a group. The call runs on `stream`, after the work that the
        streams of `producers` have now.

        Raises NotImplementedError for a stream that is being captured, DeviceError.
        """
    @property
    def number(self, /) -> int:
        """
        Number of the device in this process.
        """
    def refuse_capture(self, /, streams: SupportsGetItem[int, SupportsIndex]) -> None:
        """
        Raises NotImplementedError if one of the streams is being captured into a graph. The capture continues.
        """
    def release(self, /) -> None:
        """
        Drops the arrays of calls without a group that the device has finished with. Does not wait.
        """

@final
class CudaLibraries:
    """
    The CUDA driver, NVRTC and NCCL in the process that creates this object. A forked child cannot use them.

    The constructor loads nothing. The first use of a library searches the places (`bagua.config.CudaPlaces`) of that
    call. Later calls use the library that was found.
    """
    def __new__(cls, /) -> CudaLibraries: ...
    def cubin(self, /, places: Incomplete, cache: str | PathLike[str] | None, program: str, architecture: SupportsIndex) -> bytes:
        """
        Returns the machine code of a program for an architecture (90: compute capability 9.0), from the folder `cache`.
        If it is not there, compiles it without a driver and stores it. With None, nothing is stored.
        """
    def device(self, /, places: Incomplete, cache: str | PathLike[str] | None, number: SupportsIndex) -> CudaDevice:
        """
        Returns the device with this number. The first use of a device may create its primary context, which is slow.
        The first call for a device fixes the places and the folder `cache` (None: no cache) of its kernels and of NCCL.

        Raises BaguaError with the text of `why_not()` if there is no CUDA, and DeviceError.
        """
    def device_of(self, /, places: Incomplete, address: SupportsIndex) -> int | None:
        """
        Returns the number of the device that has the memory at an address; None for host memory, -1 for managed memory.
        Raises the errors of `device`.
        """
    def report(self, /, places: Incomplete) -> dict:
        """
        Returns the libraries and devices of this process. `driver`, `nvrtc` and `nccl` are dicts with `path`, `version`
        and `error`, each None if it does not apply. The dict of `nvrtc` also has `architectures`. `devices` are dicts
        with `name`, `capability` (major, minor), `memory` (bytes) and `uuid` (16 bytes), each None if the driver does
        not report it. Initialises the driver.
        """
    def why_not(self, /, places: Incomplete) -> str | None:
        """
        Returns one line that says why no device can be used, or None. Every call returns the same. Initialises the
        driver.
        """

@final
class Engine:
    """
    A strictly ordered queue of buckets with its own lane and communication thread.
    """
    def cuda_call(self, /, device: CudaDevice, stream: SupportsIndex, producers: SupportsGetItem[int, SupportsIndex], collective: str, check: bool = False) -> CudaCall:
        """
        Returns the device's side of one operation, as `Communicator.cuda_call` does.
        """
    def mark_ready(self, /, number: SupportsIndex, address: SupportsIndex | None = None, count: SupportsIndex | None = None, *, stream: SupportsIndex | None = None, producers: SupportsGetItem[int, SupportsIndex] | None = None, keep: Any | None = None) -> None:
        """
        Marks the tensor with this number as final for this step. `address` and `count` give its new location if it
        moved; None means the same place as before.

        For a tensor on a device, the bucket is communicated after the work that `stream` (None: the legacy stream) has
        now, and with `keep` also after that of the streams of `producers`. `keep` is held until the device is done.

        Raises ValueError for an unknown number or a tensor that was marked already, NotImplementedError for a stream
        that is being captured, and the error of the communication thread if it failed.
        """
    def register(self, /, buckets: SupportsGetItem[int, Bucket]) -> list[str]:
        """
        Waits for pending buckets, then replaces the buckets. The order of the list is the order of communication, equal
        on all ranks.

        Returns the names of the tensors except padding. The number of a tensor is its index in this list. Raises
        ValueError if a tensor name, or a tensor's memory, appears twice.
        """
    def run(self, /, verb: SupportsIndex, src: SupportsIndex | None, dst: SupportsIndex | None, count: SupportsIndex, dtype: SupportsIndex, op: SupportsIndex = 0, root: SupportsIndex = 0, *, shape: SupportsGetItem[int, SupportsIndex] | None = None, timeout: SupportsFloat | SupportsIndex | None = None, async_op: bool = False, keep: Any | None = None, place: CudaCall | None = None) -> Handle | None:
        """
        A verb: see the communicator's; in order with the buckets.
        """
    def set_step(self, /, step: SupportsIndex, after_load: bool = False) -> None:
        """
        Sets the training step, counted from 1, of buckets that are communicated from now on. If another rank
        communicates them in another step, both raise MismatchError. So do ranks of which only one has loaded a state
        before the step (`after_load`). Ranks do not compare steps if `step` is 0, which is the initial value.
        """
    def shutdown(self, /) -> None:
        """
        Ends the thread. Queued buckets fail with AbortedError. Further calls do nothing.
        """
    def unready(self, /) -> list[str]:
        """
        Names of the tensors that are not ready, of buckets that were not communicated since the last `wait`.
        """
    def wait(self, /, timeout: SupportsFloat | SupportsIndex | None = None, *, stream: SupportsIndex | None = None) -> int:
        """
        Waits until every scheduled bucket is done, for at most `timeout` seconds, and returns the number of buckets.
        Ctrl-C ends the wait.

        For buckets on a device, work that `stream` (None: the legacy stream) gets from now on sees the results. The
        device may still be working.

        Raises the error of the communication thread. Raises ValueError, which names the missing tensors, if only some
        tensors of a bucket are ready. Raises NotImplementedError for a stream that is being captured; a later wait then
        reports the buckets.
        """

@final
class GroupConfig:
    """
    The parameters of a rank that joins the group `name` and listens on any free port of `listen_host`.

    `settings` has the attributes of `bagua.config.Settings`:
    - Ranks with equal `host_id` share memory ("": boot id and network namespace).
    - `transport` is one of `TRANSPORTS`.
    - `streams_per_peer` (1 to 64) is the number of TCP streams to a rank on another host.
    - `algorithm` (one of `ALGORITHMS`) is the algorithm of all_reduce between hosts.
    - `timeout` (of an operation, and of connecting) and `heartbeat_timeout` are in seconds.
    - `tls` encrypts every TCP connection.

    Raises ValueError for invalid arguments.
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
        Returns the handle of an operation that had nothing to do.
        """
    def is_completed(self, /) -> bool:
        """
        True if the operation is done, with or without an error, and its device too.
        """
    def senders(self, /) -> list[int | None]:
        """
        Ranks of the group that sent the received messages, in the order of the receives; None for a message on its way.
        """
    def synchronize(self, /, timeout: SupportsFloat | SupportsIndex | None = None) -> None:
        """
        Waits until the operation is done, also on its device, for at most `timeout` seconds. Ctrl-C ends the wait.
        Raises the errors of `wait`.
        """
    def then(self, callback: Any, /) -> None:
        """
        Calls `callback(error)` exactly once when the operation is done. `error` is None, or the exception that `wait`
        raises.

        If the operation is done already, this thread calls the callback now. Otherwise the thread "bagua-callbacks"
        does. It calls the callbacks of all handles of the process one after another, so a callback may block and start
        operations, and delays only other callbacks. An exception of a callback goes to `sys.unraisablehook`. Only if
        this thread calls the callback, an exception that is not an Exception (KeyboardInterrupt, SystemExit) is raised
        here.

        Raises TypeError if `callback` is not callable, BaguaError in a forked child while the operation is pending.
        """
    def wait(self, /, timeout: SupportsFloat | SupportsIndex | None = None, *, stream: SupportsIndex | None = None) -> None:
        """
        Waits until the operation is done, for at most `timeout` seconds (None: until the operation's own deadline).
        Ctrl-C ends the wait.

        For an operation on a device, work that `stream` (None: the call's stream) gets from now on sees the result. The
        device may still be working.

        Raises BaguaTimeoutError if `timeout` passes, and the operation continues. Raises NotImplementedError for a
        stream that is being captured, and otherwise the error of the operation.
        """

@final
class JoinServer:
    """
    The server of one rank of an elastic job. Accepts clients that know the secret and the token, and connects to the
    servers of other ranks.

    `config` is that of the groups that this process joins. `token` is a random number of the job. Addresses are
    "host:port". Raises BaguaError if the socket cannot be opened.
    """
    def __new__(cls, /, config: GroupConfig, token: SupportsGetItem[int, SupportsIndex]) -> JoinServer: ...
    @property
    def address(self, /) -> str:
        """
        Address at which the server listens.
        """
    def enter_job(self, /) -> None:
        """
        Notes that this rank is in the job from now on.
        """
    @property
    def incarnation(self, /) -> int:
        """
        Random number that identifies this process among all processes of its rank.
        """
    def join(self, /, name: str, weights: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex, bool]], buffers: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex, bool]], lock: WeightLock, interval: SupportsFloat | SupportsIndex, codec: Codec | None, digest: SupportsLenAndGetItem[SupportsIndex], timeout: SupportsFloat | SupportsIndex, device: tuple[CudaDevice, SupportsIndex, Any] | None = None) -> Averager:
        """
        Joins the averaging of a model in the running job. Unlike `Communicator.averager`, only the joining rank calls
        it. This rank has the job's weights after `Averager.wait_joined`. The caller's promise about the addresses is
        that of `Communicator.averager`.

        Raises MismatchError for a model that does not fit, BaguaTimeoutError after `timeout` seconds.
        """
    def note_server(self, /, rank: SupportsIndex, at: str) -> None:
        """
        Notes where the server of another rank listens.
        """
    @property
    def refused(self, /) -> int:
        """
        Number of connections that the server has refused.
        """
    def status(self, /, rank: SupportsIndex, at: str, timeout: SupportsFloat | SupportsIndex) -> dict:
        """
        Requests the state of a rank: {"rank", "incarnation", "in_job", "models"}. Raises BaguaError if the rank's
        server refuses or does not answer within `timeout` seconds.
        """

@final
class RendezvousServer:
    """
    Rank 0's server of a rendezvous. Listens at once, on `host` (an IP address) and `port` (0: any free port).

    Raises ValueError for an invalid address, BaguaError if the socket cannot be opened.
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
    Values, which are bytes, by key, with the methods of torch.distributed.Store. The methods raise BaguaError if the
    store does not answer or cannot store a value.
    """
    def add(self, /, key: str, amount: SupportsIndex) -> int:
        """
        Adds `amount` to the number that is the value of a key (0 if it has none), and returns the sum.
        """
    @staticmethod
    def files(directory: str | PathLike[str]) -> Store:
        """
        Returns a store in the files of a directory, which only their owner can read.
        """
    def get(self, /, key: str) -> bytes | None:
        """
        Returns the value of a key, or None if it has none. Does not wait.
        """
    def set(self, /, key: str, value: SupportsGetItem[int, SupportsIndex]) -> None:
        """
        Sets the value of a key.
        """
    def set_new(self, /, key: str, value: SupportsGetItem[int, SupportsIndex]) -> bytes:
        """
        Sets the value of a key unless it has one. Returns the value that the key has then.
        """
    @staticmethod
    def tcp(host: str, port: SupportsIndex, secret: SupportsGetItem[int, SupportsIndex], timeout: SupportsFloat | SupportsIndex, tls: Tls | None = None) -> Store:
        """
        Connects to a `StoreServer`. Raises BaguaTimeoutError if no server answers within `timeout` seconds, BaguaError
        if the server has another secret or only one side uses TLS.
        """
    def wait(self, /, keys: SupportsGetItem[int, str], timeout: timedelta) -> None:
        """
        Waits until all keys have a value. Raises BaguaTimeoutError after `timeout`, a timedelta.
        """

@final
class StoreServer:
    """
    A server of a store on `host` ("": every address) and `port` (0: any free port), until `stop`. With `kept_in`, the
    values are stored in that file for a later server.

    Raises BaguaError, whose cause is the OSError, if the server cannot listen there or use the file.
    """
    def __new__(cls, /, host: str, port: SupportsIndex, secret: SupportsGetItem[int, SupportsIndex], tls: Tls | None = None, kept_in: str | PathLike[str] | None = None) -> StoreServer: ...
    @property
    def port(self, /) -> int:
        """
        Port on which the server listens.
        """
    def stop(self, /) -> None:
        """
        Ends the server. Further calls do nothing.
        """

@final
class TensorReader:
    """
    A reader of tensors of some classes that share one exchange table. Without classes it reads none.

    `lazy_flags` is called with a tensor that is otherwise plain, and returns a false value unless torch has a
    conjugation or negation of it that is not applied yet. `changed` is called with a tuple of one tensor after a verb
    has written to it. With `compares_shapes` false, a verb compares only the sizes of the ranks' tensors. Raises
    TypeError for classes without an exchange table.
    """
    def __new__(cls, /, classes: SupportsGetItem[int, type], lazy_flags: Any, changed: Any | None = None, *, compares_shapes: bool = True) -> TensorReader: ...
    def at(self, /, x: Any) -> tuple[int, int, int, tuple | None] | None:
        """
        Returns address, number of elements, code of the type and dimensions (None for one dimension) of a plain tensor.
        Returns None for all others, including a tensor with a lazy negation.
        """

@final
class Tls:
    """
    A TLS 1.3 configuration. Without arguments, ranks authenticate with a key pair derived from the job's secret. With
    the PEM texts of this rank's certificate, its private key and the CA, ranks authenticate with certificates that the
    CA signed.

    Raises ValueError, which says which argument cannot be used and why.
    """
    def __new__(cls, /, certificate: SupportsGetItem[int, SupportsIndex] | None = None, key: SupportsGetItem[int, SupportsIndex] | None = None, ca: SupportsGetItem[int, SupportsIndex] | None = None) -> Tls: ...

@final
class WeightLock:
    """
    The lock of one model's weights. The training, the averaging and the user's code take it in the order in which they
    ask for it.

    For weights on a CUDA device, the lock also orders streams: work that the new holder puts on its `stream` runs after
    the work of the earlier holders, and a holder that releases the lock names the stream of its own work. None is the
    legacy stream. No thread waits for the device. Taking the lock with a stream that is being captured raises
    NotImplementedError and leaves the lock free. Releasing the lock frees it even if the call raises.

    The lock has no effect in a forked child, because nothing averages there.
    """
    def __new__(cls, /) -> WeightLock: ...
    def begin_training(self, /, *, stream: SupportsIndex | None = None) -> None:
        """
        Takes the lock for the training, on any thread. Further calls only remove the time limit of `pause_training`.
        """
    def end_training(self, /, *, stream: SupportsIndex | None = None) -> None:
        """
        Ends the training's hold of the lock. Has no effect if another thread has taken the lock.
        """
    def is_used_here(self, /) -> bool:
        """
        True while this thread uses the weights. A wait for a round on this thread would then never end.
        """
    def lock(self, /, *, stream: SupportsIndex | None = None) -> None:
        """
        Takes the lock for this thread, which may hold it already. Waits without the GIL; Ctrl-C ends the wait.
        """
    def mark(self, /, *, stream: SupportsIndex | None = None) -> None:
        """
        Orders the next holder's work after the work that `stream` has now, without releasing the lock. Call it after a
        time in which no other thread used the weights, so that no lock was needed.
        """
    def order(self, /, *, stream: SupportsIndex | None = None) -> None:
        """
        Makes work that `stream` gets from now on run after the work of all who held the lock before. Takes no lock.
        """
    def pause_training(self, /, limit: SupportsFloat | SupportsIndex, *, stream: SupportsIndex | None = None) -> None:
        """
        Lets other threads take the lock after `limit` seconds, unless the training continues before.
        """
    def unlock(self, /, *, stream: SupportsIndex | None = None) -> None:
        """
        Releases the lock once for this thread. Raises BaguaError on a thread that does not hold it.
        """
    @property
    def waited(self, /) -> float:
        """
        Seconds that threads have waited for the lock.
        """

def check_peer_selection(peer_selection_mode: str, members: SupportsIndex) -> None:
    """
    Raises ValueError if the peer selection does not exist, or does not work with this number of members.
    """

def flight_recorder() -> list[dict]:
    """
    Returns the last operations of this process as dicts, oldest first. Times are in seconds since the epoch. See
    `bagua.flight_recorder`.
    """

def local_address_towards(host: str, port: SupportsIndex) -> str:
    """
    Returns the local address of the route to `host:port`. Sends nothing.
    """

def read_array(x: Any) -> tuple[int, int, int, tuple | None, bool] | None:
    """
    Returns address, number of elements, code of the type, dimensions (None for one dimension), and true if the array is
    writeable, of a contiguous NumPy array. Returns None for all other objects.
    """

def rendezvous_at(host: str, port: SupportsIndex, rank: SupportsIndex, world_size: SupportsIndex, address: SupportsGetItem[int, SupportsIndex], secret: SupportsGetItem[int, SupportsIndex], timeout: SupportsFloat | SupportsIndex, tls: Tls | None = None, heartbeat_timeout: SupportsFloat | SupportsIndex = 5.0, waiting: Any | None = None) -> list[bytes]:
    """
    Exchanges addresses as `rendezvous_tcp` does on ranks other than 0, through the `RendezvousServer` at `host:port`.

    Raises PeerLostError if the connection to the server fails or breaks.
    """

def rendezvous_file(path: str | PathLike[str], rank: SupportsIndex, world_size: SupportsIndex, address: SupportsGetItem[int, SupportsIndex], timeout: SupportsFloat | SupportsIndex, waiting: Any | None = None) -> list[bytes]:
    """
    Exchanges addresses through files next to `path`, on a file system that all ranks share. `timeout` is in seconds.

    Returns the blobs of all ranks, by rank. Raises BaguaTimeoutError naming the missing ranks, or another BaguaError.
    """

def rendezvous_tcp(host: str, port: SupportsIndex, rank: SupportsIndex, world_size: SupportsIndex, address: SupportsGetItem[int, SupportsIndex], secret: SupportsGetItem[int, SupportsIndex], timeout: SupportsFloat | SupportsIndex, tls: Tls | None = None, heartbeat_timeout: SupportsFloat | SupportsIndex = 5.0, waiting: Any | None = None) -> list[bytes]:
    """
    Exchanges addresses through a TCP server that rank 0 runs on `host:port` until every rank has all addresses.

    `address` is this rank's blob from `Bootstrap.address()`, `timeout` is in seconds. Returns the blobs of all ranks,
    by rank. A rank whose process ends after it has connected is lost unless another process takes its rank within
    `heartbeat_timeout` seconds. While this rank knows which ranks are missing, it calls `waiting` with them every 50 to
    200 ms.

    Raises BaguaTimeoutError, which names the missing ranks, PeerLostError, which names a lost rank, or another
    BaguaError.
    """

def tables() -> dict:
    """
    Returns the core's tables by name: codes of element types, operations and verbs, and lists of names. The module
    `bagua.extension` exports each table under the same name and describes it.
    """

def version() -> str:
    """
    Returns the version of this build.
    """

def wait_for_callbacks(timeout: SupportsFloat | SupportsIndex) -> None:
    """
    Waits until every callback that was given to `Handle.then` has returned. Call it at the end of a program, after
    leaving its groups.

    Raises BaguaError if some have not returned after `timeout` seconds. Raises ValueError in a callback, which would
    wait for itself.
    """
