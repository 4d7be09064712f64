// Calls that put work on a stream, and groups of them.

#include <unistd.h>

#include <map>

#include "comm.h"

using namespace nccl;

namespace {

// What the calling thread has collected since ncclGroupStart.
struct Group {
    int depth = 0;                                  // groups inside groups
    ncclResult_t failed = ncclSuccess;              // the first error of a call
    std::map<Comm *, std::vector<Call>> calls;
    std::map<Comm *, void *> streams;
};

Group &group() {
    static thread_local Group made;
    return made;
}

// The calls of a communicator are in progress from now on.
ncclResult_t begin(const char *function, Comm *comm, void *stream, std::vector<Call> calls) {
    if (comm->stream && comm->stream != stream) return fault(std::string(function) + " on another stream than before");
    comm->stream = stream;
    comm->state = State::busy;
    comm->doing = function;
    comm->polls = 0;
    comm->trouble = {};
    for (const auto &call : calls) {
        comm->trouble.never |= call.trouble.never;
        comm->trouble.stuck |= call.trouble.stuck;
        if (call.trouble.soon) comm->trouble.soon = call.trouble.soon;
        if (call.trouble.later) comm->trouble.later = call.trouble.later;
    }
    comm->waiting = std::move(calls);
    driver()->announce(stream, 1);
    return ncclInProgress;
}

ncclResult_t call(Call made, Comm *comm, void *stream) {
    const std::string name = made.function;
    const auto refuse = [&](const std::string &text, ncclResult_t code = ncclInvalidArgument) {
        if (group().depth && !group().failed) group().failed = code;
        return fault(name + ": " + text, code);
    };
    if (const ncclResult_t code = enter(made.function)) {
        if (group().depth && !group().failed) group().failed = code;
        return code;
    }
    std::unique_lock lock(mutex());
    made.trouble = trouble_of(made.function);
    if (const ncclResult_t code = usable(made.function, comm)) {
        if (group().depth && !group().failed) group().failed = code;
        return code;
    }
    const auto unit = size_of(made.said.dtype);
    if (!unit) return refuse("element type " + std::to_string(made.said.dtype));
    if (made.said.op < 0 || made.said.op > ncclAvg) return refuse("operation " + std::to_string(made.said.op));
    if (made.said.root < 0 || made.said.root >= comm->ranks) return refuse("root " + std::to_string(made.said.root));
    if (made.peer >= comm->ranks) return refuse("peer " + std::to_string(made.peer));
    // What one rank only reads or writes.
    const auto count = made.said.count * unit, all = count * static_cast<std::size_t>(comm->ranks);
    const bool root = made.said.root == comm->rank;
    if (name == "ncclReduceScatter") made.send.bytes = all, made.recv.bytes = count;
    if (name == "ncclAllGather") made.send.bytes = count, made.recv.bytes = all;
    if (name == "ncclAllReduce") made.send.bytes = made.recv.bytes = count;
    if (name == "ncclReduce") made.send.bytes = count, made.recv.bytes = root ? count : 0;
    if (name == "ncclBroadcast") made.send.bytes = root ? count : 0, made.recv.bytes = count;
    if (name == "ncclSend") made.send.bytes = count;
    if (name == "ncclRecv") made.recv.bytes = count;
    if (made.send.bytes > REGION) return refuse("more bytes than this library takes", ncclInternalError);
    for (const auto &range : {made.send, made.recv}) {
        if (range.bytes && !range.address) return refuse("a null pointer");
        if (range.bytes && range.address % unit) return refuse("an address that is not aligned to the elements");
    }
    const auto send = made.send, recv = made.recv;
    const bool apart = send.address + send.bytes <= recv.address || recv.address + recv.bytes <= send.address;
    const auto rank = static_cast<std::size_t>(comm->rank);
    const bool in_place = name == "ncclAllGather"       ? send.address == recv.address + rank * count
                          : name == "ncclReduceScatter" ? recv.address == send.address + rank * count
                                                        : send.address == recv.address;
    if (send.bytes && recv.bytes && !apart && !in_place) return refuse("source and target overlap, and not as in place");
    if (made.trouble.hang) {
        lock.unlock();
        while (!comm->aborted) usleep(1000);
        return error("aborted", ncclSystemError);
    }
    if (!group().depth) return begin(made.function, comm, stream, {made});
    auto &streams = group().streams;
    if (streams.count(comm) && streams[comm] != stream) return refuse("two streams in one group");
    streams[comm] = stream;
    group().calls[comm].push_back(made);
    return ncclSuccess;
}

// Whether something is received where another message of the group is sent from.
bool overlap(const std::vector<Call> &calls) {
    for (const auto &one : calls)
        for (const auto &other : calls)
            if (one.peer >= 0 && other.peer >= 0 && one.send.bytes && other.recv.bytes &&
                one.send.address < other.recv.address + other.recv.bytes &&
                other.recv.address < one.send.address + one.send.bytes)
                return true;
    return false;
}

enum Verb { ALL_REDUCE = 1, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, MESSAGE };

sim::Range at(const void *address) { return {reinterpret_cast<std::uintptr_t>(address), 0}; }

}  // namespace

bool nccl::in_group() { return group().depth > 0; }

NCCL_EXPORT ncclResult_t ncclGroupStart() {
    if (const ncclResult_t code = enter("ncclGroupStart")) return code;
    ++group().depth;
    return ncclSuccess;
}

NCCL_EXPORT ncclResult_t ncclGroupEnd() {
    const ncclResult_t wanted = enter("ncclGroupEnd");
    const std::lock_guard lock(mutex());
    if (group().depth == 0) return fault("ncclGroupEnd without ncclGroupStart");
    if (--group().depth > 0) return wanted;
    const Group ended = std::move(group());
    group() = Group{};
    if (wanted) return wanted;
    if (ended.failed) return ended.failed;
    ncclResult_t result = ncclSuccess;
    auto trouble = trouble_of("ncclGroupEnd");
    for (const auto &[comm, calls] : ended.calls) {
        if (const ncclResult_t code = usable("ncclGroupEnd", comm)) return code;
        if (overlap(calls)) return fault("a message of a group is received where another is sent from", ncclInvalidArgument);
        auto merged = calls;
        // What is wanted of the group is wanted of its first call.
        if (trouble.never || trouble.stuck || trouble.soon || trouble.later) merged.front().trouble = trouble;
        const ncclResult_t code = begin("ncclGroupEnd", comm, ended.streams.at(comm), merged);
        if (code != ncclInProgress) return code;
        result = code;
    }
    return result;
}

NCCL_EXPORT ncclResult_t ncclAllReduce(const void *send, void *recv, std::size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                                       Comm *comm, void *stream) {
    return call({"ncclAllReduce", ALL_REDUCE, at(send), at(recv), {ALL_REDUCE, count, dtype, op, 0}}, comm, stream);
}

NCCL_EXPORT ncclResult_t ncclReduce(const void *send, void *recv, std::size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                                    int root, Comm *comm, void *stream) {
    return call({"ncclReduce", REDUCE, at(send), at(recv), {REDUCE, count, dtype, op, root}}, comm, stream);
}

NCCL_EXPORT ncclResult_t ncclBroadcast(const void *send, void *recv, std::size_t count, ncclDataType_t dtype, int root,
                                       Comm *comm, void *stream) {
    return call({"ncclBroadcast", BROADCAST, at(send), at(recv), {BROADCAST, count, dtype, 0, root}}, comm, stream);
}

NCCL_EXPORT ncclResult_t ncclAllGather(const void *send, void *recv, std::size_t count, ncclDataType_t dtype, Comm *comm,
                                       void *stream) {
    return call({"ncclAllGather", ALL_GATHER, at(send), at(recv), {ALL_GATHER, count, dtype, 0, 0}}, comm, stream);
}

NCCL_EXPORT ncclResult_t ncclReduceScatter(const void *send, void *recv, std::size_t count, ncclDataType_t dtype,
                                           ncclRedOp_t op, Comm *comm, void *stream) {
    return call({"ncclReduceScatter", REDUCE_SCATTER, at(send), at(recv), {REDUCE_SCATTER, count, dtype, op, 0}}, comm, stream);
}

NCCL_EXPORT ncclResult_t ncclSend(const void *send, std::size_t count, ncclDataType_t dtype, int peer, Comm *comm,
                                  void *stream) {
    return call({"ncclSend", MESSAGE, at(send), at(nullptr), {MESSAGE, count, dtype, 0, 0}, peer < 0 ? MAX_RANKS : peer}, comm,
                stream);
}

NCCL_EXPORT ncclResult_t ncclRecv(void *recv, std::size_t count, ncclDataType_t dtype, int peer, Comm *comm, void *stream) {
    return call({"ncclRecv", MESSAGE, at(nullptr), at(recv), {MESSAGE, count, dtype, 0, 0}, peer < 0 ? MAX_RANKS : peer}, comm,
                stream);
}
