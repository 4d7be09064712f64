// Streams: threads that run enqueued operations in order, as late as they may.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "context.h"
#include "library.h"
#include "memory.h"

namespace sim {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

struct Stream;
struct Capture;

using EventPage = std::shared_ptr<SharedEvent>;

// How an operation ended.
struct Outcome {
    CUresult code = CUDA_SUCCESS;  // what poisons the context, if it is not success
    std::string text;              // a fault, if it is not empty
};

// The end of an operation, for other processes.
struct SharedRecord {
    EventPage page;             // where they look
    unsigned long long number;  // the operation's
};

// One operation of a stream.
struct Operation {
    std::string function;                            // the call that enqueued it
    Stream *stream = nullptr;                        // where it runs
    std::function<Outcome()> run;                    // what it does, called without the lock; may be empty
    std::function<void()> place;                     // what happens under the lock when its place is reached
    std::vector<Memory> uses;                        // memory that must be alive when it begins
    std::vector<std::shared_ptr<Operation>> after;   // operations of other streams that must have ended
    std::vector<SharedRecord> records;               // where its end is recorded for other processes; one or none
    Clock::time_point due;                           // when it begins although nobody wants it
    Clock::time_point ended;                         // when it ended
    bool wanted = false;                             // it may begin
    bool done = false;                               // it has ended
};

using Work = std::shared_ptr<Operation>;

// A stream, and the thread that is it. Never deleted, so that no handle is used twice.
struct Stream {
    Context *context = nullptr;          // whose it is
    unsigned flags = 0;                  // CU_STREAM_NON_BLOCKING or 0
    bool legacy = false;                 // it is the stream of handles 0 and 1
    bool destroyed = false;              // cuStreamDestroy was called; what is enqueued still runs
    std::deque<Work> queue;              // what has not ended
    Work last;                           // what was enqueued last, null or ended where nothing pends
    std::shared_ptr<Capture> capture;    // what it is captured into, null outside a capture
    int announced = 0;                   // calls of a library over the driver whose work has not reached it yet

    // Whether it is ordered with the legacy stream.
    bool blocking() const { return !legacy && !(flags & CU_STREAM_NON_BLOCKING); }
};

// An event; deleted never, for the same reason.
struct Event {
    Context *context = nullptr;          // whose it is
    unsigned flags = 0;                  // CU_EVENT_*
    Work record;                         // its newest record, null before the first
};

// A sequence of calls that becomes a graph.
struct Capture {
    int mode = CAPTURE_GLOBAL;           // CAPTURE_GLOBAL, _THREAD_LOCAL or _RELAXED
    int status = CAPTURE_ACTIVE;         // CAPTURE_ACTIVE or _INVALIDATED
    pthread_t thread{};                  // who began it
    unsigned long nodes = 0;             // operations in it
};

// Makes a stream and its thread.
Stream *make_stream(Context *context, unsigned flags, bool legacy = false);

// The stream of a handle in the current context.
CUresult find_stream(const char *function, void *handle, Stream **stream);

// Enqueues an operation; into the capture, where the stream is captured. `made` may be null.
CUresult enqueue(Work work, Work *made = nullptr);

// An operation that is not enqueued yet.
Work operation(const char *function, Stream *stream, std::function<Outcome()> run = nullptr,
               std::vector<Memory> uses = {});

// Lets an operation begin, all that is before it, and all that those wait for.
void want(const Work &work);

// Waits on the calling thread until an operation has ended, and says how the context is.
CUresult wait_for(Lock &lock, const Work &work);

// Waits for all of a context's streams.
CUresult wait_for_all(Lock &lock, Context *context);

// Whether the calling thread runs a host function now.
bool in_host_function();
// Marks it.
void enter_host_function(bool inside);

// Refuses calls that must not be made while a capture is under way, and invalidates the capture. With `context`,
// calls that ask for everything that a context does.
CUresult unsafe_in_capture(const Context *context = nullptr);

// Sets how strict captures are with the calling thread, and returns how strict they were.
int exchange_capture_mode(int mode);

}  // namespace sim
