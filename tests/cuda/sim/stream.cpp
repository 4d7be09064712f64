#include "stream.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "report.h"

namespace sim {
namespace {

thread_local bool inside_host_function = false;

microseconds delay() {
    static const microseconds value(number_from_environment("BAGUA_SIM_DELAY_US", 100000));
    return value;
}

// Raises a number that several processes raise.
void raise(std::atomic<unsigned long long> &number, unsigned long long to) {
    auto seen = number.load();
    while (seen < to && !number.compare_exchange_weak(seen, to)) {
    }
}

// How long a thread sleeps that another process can wake.
constexpr microseconds POLL(500);

// Lets records begin that another process waits for, and says whether the stream holds any.
bool heed_other_processes(Stream *stream) {
    bool any = false;
    for (const auto &work : stream->queue)
        for (const auto &record : work->records) {
            any = true;
            if (!work->wanted && record.page->wanted.load() >= record.number) want(work);
        }
    return any;
}

// Whether everything is done for which an operation waits; what is not becomes wanted.
bool may_begin(const Work &work) {
    bool ready = true;
    for (const auto &other : work->after)
        if (!other->done) {
            want(other);
            ready = false;
        }
    return ready;
}

// Runs an operation and says what became of it. The lock is not held while it runs.
void run(Lock &lock, const Work &work) {
    Context *context = work->stream->context;
    Outcome outcome;
    for (const auto &memory : work->uses)
        if (const auto text = unusable(*memory); outcome.text.empty() && !text.empty())
            outcome = {CUDA_ERROR_ILLEGAL_ADDRESS, text};
    if (outcome.code == CUDA_SUCCESS && work->run && !context->sticky) {
        lock.unlock();
        outcome = work->run();
        lock.lock();
    }
    if (!outcome.text.empty()) fault(work->function + ": " + outcome.text);
    if (outcome.code && !context->sticky) context->sticky = outcome.code;
    for (const auto &memory : work->uses) --memory->users;
    if (work->place) work->place();
    for (const auto &record : work->records) {
        raise(record.page->completed, record.number);
    }
    work->ended = Clock::now();
    work->done = true;
    work->run = nullptr;
    work->place = nullptr;
    work->uses.clear();
    work->after.clear();
}

// A stream's thread.
void serve(Stream *stream) {
    pthread_setname_np(pthread_self(), "sim-stream");
    State &all = state();
    Lock lock(all.mutex);
    while (!stream->queue.empty() || !stream->destroyed) {
        if (stream->queue.empty()) {
            all.changed.wait(lock);
            continue;
        }
        const Work work = stream->queue.front();
        bool poll = heed_other_processes(stream);
        const auto now = Clock::now();
        if (!work->wanted && now < work->due) {
            all.changed.wait_until(lock, poll ? std::min(work->due, now + POLL) : work->due);
            continue;
        }
        work->wanted = true;
        if (!may_begin(work)) {
            if (poll)
                all.changed.wait_for(lock, POLL);
            else
                all.changed.wait(lock);
            continue;
        }
        run(lock, work);
        stream->queue.pop_front();
        all.changed.notify_all();
    }
    std::erase(stream->context->streams, stream);
}

thread_local int capture_mode = CAPTURE_GLOBAL;

// Whether a capture forbids the calling thread to make unsafe calls.
bool forbids(const Capture &capture) {
    if (capture.status != CAPTURE_ACTIVE || capture_mode == CAPTURE_RELAXED) return false;
    if (pthread_equal(capture.thread, pthread_self())) return capture.mode != CAPTURE_RELAXED;
    return capture_mode == CAPTURE_GLOBAL && capture.mode == CAPTURE_GLOBAL;
}

}  // namespace

Stream *make_stream(Context *context, unsigned flags, bool legacy) {
    auto *stream = new Stream;
    stream->context = context;
    stream->flags = flags;
    stream->legacy = legacy;
    context->streams.push_back(stream);
    // Signals are for the program's own threads.
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&blocked, number);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    std::thread(serve, stream).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return stream;
}

CUresult find_stream(const char *function, void *handle, Stream **stream) {
    const auto number = reinterpret_cast<std::uintptr_t>(handle);
    Context *context = current();
    if (number <= CU_STREAM_LEGACY) {
        if (!context->legacy) context->legacy = make_stream(context, 0, true);
        *stream = context->legacy;
    } else if (number == CU_STREAM_PER_THREAD) {
        Stream *&mine = context->per_thread[pthread_self()];
        if (!mine) mine = make_stream(context, 0);
        *stream = mine;
    } else {
        auto *named = static_cast<Stream *>(handle);
        if (!state().streams.count(named)) {
            fault(std::string(function) + ": " + hex(number) + " is no stream, or was destroyed");
            return CUDA_ERROR_INVALID_HANDLE;
        }
        *stream = named;
    }
    return CUDA_SUCCESS;
}

Work operation(const char *function, Stream *stream, std::function<Outcome()> run, std::vector<Memory> uses) {
    auto work = std::make_shared<Operation>();
    work->function = function;
    work->stream = stream;
    work->run = std::move(run);
    for (auto &memory : uses)
        if (memory) work->uses.push_back(std::move(memory));
    return work;
}

CUresult enqueue(Work work, Work *made) {
    Stream *stream = work->stream;
    Context *context = stream->context;
    if (stream->legacy)
        for (const auto *other : context->streams)
            if (other->blocking() && other->capture) {
                other->capture->status = CAPTURE_INVALIDATED;
                return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
            }
    if (stream->capture) {
        if (stream->capture->status != CAPTURE_ACTIVE) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        ++stream->capture->nodes;
        return CUDA_SUCCESS;
    }
    const auto follow = [&](const Work &other) {
        if (other && !other->done) work->after.push_back(other);
    };
    if (stream->legacy) {
        for (const auto *other : context->streams)
            if (other->blocking()) follow(other->last);
    } else if (stream->blocking() && context->legacy) {
        follow(context->legacy->last);
    }
    for (const auto &memory : work->uses) ++memory->users;
    work->due = Clock::now() + delay();
    stream->queue.push_back(work);
    stream->last = work;
    if (made) *made = work;
    state().changed.notify_all();
    return CUDA_SUCCESS;
}

void want(const Work &work) {
    std::vector<Work> todo{work};
    bool any = false;
    while (!todo.empty()) {
        const Work next = todo.back();
        todo.pop_back();
        if (!next || next->done || next->wanted) continue;
        for (const auto &before : next->stream->queue) {
            if (!before->wanted) {
                any = before->wanted = true;
                todo.insert(todo.end(), before->after.begin(), before->after.end());
            }
            if (before == next) break;
        }
    }
    if (any) state().changed.notify_all();
}

CUresult wait_for(Lock &lock, const Work &work) {
    if (!work) return CUDA_SUCCESS;
    want(work);
    state().changed.wait(lock, [&] { return work->done; });
    return work->stream->context->sticky;
}

CUresult wait_for_all(Lock &lock, Context *context) {
    std::vector<Work> all;
    for (const auto *stream : context->streams)
        if (stream->last) all.push_back(stream->last);
    for (const auto &work : all) want(work);
    for (const auto &work : all) wait_for(lock, work);
    return context->sticky;
}

bool in_host_function() { return inside_host_function; }

void enter_host_function(bool inside) { inside_host_function = inside; }

int exchange_capture_mode(int mode) { return std::exchange(capture_mode, mode); }

CUresult unsafe_in_capture(const Context *asked) {
    bool refused = false;
    for (auto *context : state().contexts)
        for (auto *stream : context->streams)
            if (stream->capture && (context == asked || forbids(*stream->capture))) {
                stream->capture->status = CAPTURE_INVALIDATED;
                refused = true;
            }
    return refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

}  // namespace sim
