// Devices, primary contexts, each thread's stack of them, and the lock over everything.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "abi.h"

namespace sim {

struct Stream;
struct Event;

using Lock = std::unique_lock<std::mutex>;

// The primary context of a pretended device.
struct Context {
    CUdevice device = 0;                          // ordinal
    unsigned retained = 0;                        // how often it is retained; 0: it does not exist
    CUresult sticky = 0;                          // the error that every later call returns
    Stream *legacy = nullptr;                     // the stream of handles 0 and 1
    std::map<pthread_t, Stream *> per_thread;     // the streams of handle 2
    std::vector<Stream *> streams;                // all, those above included
};

// What the whole process has, under one lock.
struct State {
    std::mutex mutex;                  // over everything but the bytes of memory
    std::condition_variable changed;   // an operation ended, became wanted, or was enqueued
    bool initialized = false;          // cuInit has succeeded
    bool ending = false;               // the process runs its exit functions
    std::vector<Context *> contexts;   // one for each device
    std::set<Event *> events;          // those that exist
    std::set<Stream *> streams;        // those that were created and not destroyed
    unsigned long lost = 0;            // what libraries over the driver have not given back
};

State &state();

// The contexts of the calling thread, the current one last.
std::vector<Context *> &context_stack();

// The current context, null if there is none.
Context *current();

// Makes the pretended devices and prepares for the process's end; at cuInit.
CUresult initialize();

// The context of a device, null if there is no such device.
Context *context_of(CUdevice device);

// Whether a handle is a context's.
bool is_context(const void *handle);

// Whether this process was forked after the library was loaded.
bool forked();

}  // namespace sim
