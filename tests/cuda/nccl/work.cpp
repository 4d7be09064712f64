// Work on the stream: what the ranks of a communicator do together when all of them have come so far.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "comm.h"

namespace nccl {
namespace {

// What was put on the stream by one call, or by one group of calls.
struct Launch {
    Comm *comm;
    std::vector<Call> calls;
    bool stuck;
};

void raise(std::atomic<unsigned long long> &number, unsigned long long to) {
    auto seen = number.load();
    while (seen < to && !number.compare_exchange_weak(seen, to)) {
    }
}

// Waits until something is so, and lets the work of some ranks begin meanwhile; false once the communicator is aborted.
template <class Condition>
bool wait(const Comm &comm, const std::vector<int> &peers, Condition condition) {
    while (!condition()) {
        if (comm.aborted) return false;
        for (const int peer : peers) {
            auto &page = comm.shared->members[peer].page;
            raise(page.wanted, page.recorded.load());
        }
        usleep(100);
    }
    return true;
}

std::vector<int> others(const Comm &comm) {
    std::vector<int> found;
    for (int rank = 0; rank < comm.ranks; ++rank)
        if (rank != comm.rank) found.push_back(rank);
    return found;
}

std::string text_of(const Said &said) {
    return "function " + std::to_string(said.verb) + ", " + std::to_string(said.count) + " elements of type " +
           std::to_string(said.dtype) + ", operation " + std::to_string(said.op) + ", root " + std::to_string(said.root);
}

// Ranks that disagree: a fault, or nothing ever happens, as with NCCL.
bool agreed(Comm &comm, bool equal, const std::string &text) {
    if (equal) return true;
    if (std::getenv("BAGUA_SIM_NCCL_HANG")) return wait(comm, {}, [] { return false; });
    driver()->fault(text.c_str());
    return false;
}

bool collective(Comm &comm, const Call &call, unsigned char *send, unsigned char *recv) {
    Member &own = comm.shared->members[comm.rank];
    const auto number = ++comm.collectives;
    const auto peers = others(comm);
    if (call.send.bytes) std::memcpy(comm.region(comm.rank), send, call.send.bytes);
    own.said = call.said;
    own.began.store(number);
    bool equal = true;
    for (const int peer : peers) {
        const Member &other = comm.shared->members[peer];
        if (!wait(comm, {peer}, [&] { return other.began.load() >= number; })) return false;
        equal = equal && agreed(comm, other.said == call.said,
                                "NCCL: rank " + std::to_string(comm.rank) + " does " + text_of(call.said) + ", rank " +
                                    std::to_string(peer) + " does " + text_of(other.said));
    }
    if (comm.aborted) return false;
    if (equal && call.recv.bytes) {
        const std::string name = call.function;
        const std::size_t bytes = call.said.count * size_of(call.said.dtype);
        std::vector<const unsigned char *> from;
        for (int rank = 0; rank < comm.ranks; ++rank)
            from.push_back(comm.region(rank) + (name == "ncclReduceScatter" ? static_cast<std::size_t>(comm.rank) * bytes : 0));
        if (name == "ncclBroadcast")
            std::memcpy(recv, from[static_cast<std::size_t>(call.said.root)], bytes);
        else if (name == "ncclAllGather")
            for (std::size_t rank = 0; rank < from.size(); ++rank) std::memcpy(recv + rank * bytes, from[rank], bytes);
        else
            combine(call.said.dtype, call.said.op, recv, from, call.said.count);
    }
    own.finished.store(number);
    return wait(comm, peers, [&] {
        for (const int peer : peers)
            if (comm.shared->members[peer].finished.load() < number) return false;
        return true;
    });
}

// All messages of a group: the i-th ones to and from each peer, then the next.
bool messages(Comm &comm, const std::vector<const Call *> &calls, const std::map<const Call *, unsigned char *> &bytes) {
    std::map<std::pair<bool, int>, std::vector<const Call *>> queues;
    for (const Call *call : calls) queues[{call->send.bytes != 0 || std::string(call->function) == "ncclSend", call->peer}].push_back(call);
    std::size_t at = 0;
    for (std::size_t round = 0;; ++round) {
        bool any = false;
        for (const auto &[key, queue] : queues) {
            if (!key.first || round >= queue.size()) continue;
            any = true;
            const Call &call = *queue[round];
            Message &message = comm.shared->messages[comm.rank][call.peer];
            if (call.send.bytes) std::memcpy(comm.region(comm.rank) + at, bytes.at(&call), call.send.bytes);
            message.at = at;
            message.count = call.said.count;
            message.dtype = call.said.dtype;
            message.sent.store(++comm.sent[call.peer]);
            at += call.send.bytes;
        }
        for (const auto &[key, queue] : queues) {
            if (key.first || round >= queue.size()) continue;
            any = true;
            const Call &call = *queue[round];
            Message &message = comm.shared->messages[call.peer][comm.rank];
            const auto number = ++comm.received[call.peer];
            if (!wait(comm, {call.peer}, [&] { return message.sent.load() >= number; })) return false;
            const bool equal = message.count == call.said.count && message.dtype == call.said.dtype;
            if (agreed(comm, equal, "NCCL: rank " + std::to_string(call.peer) + " sends " + std::to_string(message.count) +
                                        " elements of type " + std::to_string(message.dtype) + " to rank " +
                                        std::to_string(comm.rank) + ", which receives " + std::to_string(call.said.count) +
                                        " of type " + std::to_string(call.said.dtype)) &&
                call.recv.bytes)
                std::memcpy(bytes.at(&call), comm.region(call.peer) + message.at, call.recv.bytes);
            if (comm.aborted) return false;
            message.taken.store(number);
        }
        for (const auto &[key, queue] : queues) {
            if (!key.first || round >= queue.size()) continue;
            const int peer = queue[round]->peer;
            const Message &message = comm.shared->messages[comm.rank][peer];
            if (!wait(comm, {peer}, [&] { return message.taken.load() >= comm.sent[peer]; })) return false;
        }
        if (!any) return true;
    }
}

int run(void *data, unsigned char *const *bytes) {
    const std::unique_ptr<Launch> launch(static_cast<Launch *>(data));
    Comm &comm = *launch->comm;
    ++comm.running;
    const auto ended = [&] {
        --comm.pending;
        --comm.running;
        return 0;
    };
    if (launch->stuck) wait(comm, {}, [] { return false; });
    std::vector<const Call *> group;
    std::map<const Call *, unsigned char *> places;
    std::size_t most = 0;
    for (std::size_t at = 0; at < launch->calls.size() && !comm.aborted; ++at) {
        const Call &call = launch->calls[at];
        most = std::max(most, call.send.bytes);
        if (call.peer >= 0) {
            group.push_back(&call);
            places[&call] = call.send.bytes ? bytes[2 * at] : bytes[2 * at + 1];
        } else if (!collective(comm, call, bytes[2 * at], bytes[2 * at + 1])) {
            return ended();
        }
    }
    if (!group.empty() && !comm.aborted) messages(comm, group, places);
    // Large regions are given back.
    if (most > HEADER) madvise(comm.region(comm.rank), REGION, MADV_REMOVE);
    return ended();
}

}  // namespace

ncclResult_t launch(Comm *comm) {
    auto *made = new Launch{comm, std::move(comm->waiting), comm->trouble.stuck || comm->trouble.later != 0};
    comm->waiting.clear();
    std::vector<sim::Range> ranges;
    for (const auto &call : made->calls) {
        ranges.push_back(call.send);
        ranges.push_back(call.recv);
    }
    ++comm->pending;
    const int code = driver()->enqueue(made->calls.front().function, comm->device, comm->stream, ranges.data(), ranges.size(),
                                       &comm->shared->members[comm->rank].page, ++comm->launches, run, made);
    if (!code) return ncclSuccess;
    --comm->pending;
    delete made;
    return error("the driver returned " + std::to_string(code), ncclUnhandledCudaError);
}

}  // namespace nccl
