// Communicators: what a rank has of one, what its ranks share, and what calls wait to be put on a stream.
#pragma once

#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../sim/library.h"
#include "nccl.h"

namespace nccl {

constexpr int MAX_RANKS = 16;
// Polls after which a call is no longer in progress.
constexpr int POLLS = 3;
// Bytes that a rank may give to one call, or to the messages of one group.
constexpr std::size_t REGION = std::size_t{1} << 30;
constexpr std::size_t HEADER = std::size_t{1} << 20;

// What a rank says of a collective, which must be equal on all.
struct Said {
    int verb;                // number of the function
    unsigned long long count;
    ncclDataType_t dtype;
    int op;
    int root;
    bool operator==(const Said &) const = default;
};

// A rank, as the others see it.
struct Member {
    sim::SharedEvent page;                     // its work, which others may let begin
    std::atomic<int> process;                  // 0: it has not come yet
    std::atomic<int> device;                   // number of its device
    Said said;                                 // of the newest collective that it has begun
    std::atomic<unsigned long long> began;     // the number of that, from 1
    std::atomic<unsigned long long> finished;  // of the newest that it has read all others' data of
};

// The newest message from one rank to another.
struct Message {
    std::atomic<unsigned long long> sent;   // its number, from 1
    std::atomic<unsigned long long> taken;  // the newest that was received
    unsigned long long at, count;           // where it is in the sender's region; elements
    ncclDataType_t dtype;
};

// The beginning of the memory that all ranks of a communicator map; the ranks' regions follow.
struct Shared {
    unsigned long long magic, nonce;
    std::atomic<int> ranks;  // 0 until the first has come
    Member members[MAX_RANKS];
    Message messages[MAX_RANKS][MAX_RANKS];  // sender, receiver
};
static_assert(sizeof(Shared) < HEADER);

// What BAGUA_SIM_NCCL wants of one call.
struct Trouble {
    bool never = false;   // it stays in progress
    bool stuck = false;   // its work does not end
    bool hang = false;    // it does not return
    ncclResult_t soon = 0;   // what it turns out to be when it is polled
    ncclResult_t later = 0;  // what the communicator turns out to be afterwards
};

// One call that puts work on a stream.
struct Call {
    const char *function;
    int verb;              // number of the function
    sim::Range send, recv;
    Said said;
    int peer = -1;         // of a message
    Trouble trouble = {};
};

enum class State { starting, ready, busy, finalizing, finalized, failed };

// A rank's communicator. Never freed, so that no address is used twice, and work that is late finds it.
struct Comm {
    Shared *shared = nullptr;
    int rank = 0, ranks = 0, device = 0;
    State state = State::starting;
    std::string doing;                     // the function that is in progress
    int polls = 0;                         // of the call that is in progress
    Trouble trouble;                       // of that call
    std::vector<Call> waiting;             // what is put on the stream when it is polled
    void *stream = nullptr;                // the one stream that it may use
    unsigned long long launches = 0;       // works that were put on the stream
    unsigned long long collectives = 0;    // collectives of its works that began
    unsigned long long sent[MAX_RANKS] = {}, received[MAX_RANKS] = {};  // messages, by peer
    ncclResult_t result = ncclSuccess;     // why it failed
    ncclResult_t later = 0;                // why it will fail
    int later_polls = 0;                   // after so many polls
    std::atomic<bool> aborted = false;
    std::atomic<int> pending = 0;          // works that have not ended
    std::atomic<int> running = 0;          // works that run

    unsigned char *region(int of) const { return reinterpret_cast<unsigned char *>(shared) + HEADER + of * REGION; }
};

// The lock over everything but works that run.
std::mutex &mutex();
// Communicators that live.
std::set<Comm *> &living();
// The simulator; null without one.
const sim::Library *driver();
// The library's version, as ncclGetVersion counts.
int version();

// A mistake of the caller, in the report and as the last error. Returns `code`.
ncclResult_t fault(const std::string &text, ncclResult_t code = ncclInvalidUsage);
// What ncclGetLastError says from now on. Returns `code`.
ncclResult_t error(const std::string &text, ncclResult_t code);
// Counts a call, and says what BAGUA_SIM_FAIL wants of it.
ncclResult_t enter(const char *function);
// What BAGUA_SIM_NCCL wants of this call of a function.
Trouble trouble_of(const char *function);
// The communicator, if it may be used by a call that may make it busy; null and the result where not.
ncclResult_t usable(const char *function, Comm *comm);
// Whether calls of this thread are collected.
bool in_group();

// Puts what waits on the stream.
ncclResult_t launch(Comm *comm);
// Bytes of an element.
std::size_t size_of(ncclDataType_t dtype);
// Combines the ranks' elements, in this library's own order.
void combine(ncclDataType_t dtype, ncclRedOp_t op, unsigned char *out, const std::vector<const unsigned char *> &from,
             std::size_t count);

}  // namespace nccl
