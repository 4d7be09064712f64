// What a pretended library over the driver, such as tests/cuda/nccl, may ask of the simulator. It needs no other header of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace sim {

// The page that all processes with an inter-process event, or with work that waits for each other, map.
struct SharedEvent {
    std::atomic<unsigned long long> recorded;   // number of the newest record, from 1
    std::atomic<unsigned long long> completed;  // number of the newest record that was reached
    std::atomic<unsigned long long> wanted;     // the newest record that somebody waits for
    std::atomic<int> recorder;                  // the process that recorded last
};

// Bytes of a device that work names.
struct Range {
    std::uintptr_t address;  // as the caller sees it
    std::size_t bytes;       // may be 0
};

// What the work of a library does: with the bytes of its ranges, for the host. Returns what poisons the context, or 0.
using LibraryWork = int (*)(void *data, unsigned char *const *bytes);

// The functions, which take no lock that a library could hold.
struct Library {
    // Counts a call; what BAGUA_SIM_FAIL wants it to return, 0 for nothing.
    int (*call)(const char *function);
    // Records a mistake of the caller.
    void (*fault)(const char *text);
    // So many more things of the library that must be given back.
    void (*owns)(int more);
    // The number of the calling thread's current device, -1 without one.
    int (*device)();
    // So many more calls on a stream whose work has not reached it: an event that is recorded meanwhile is a fault.
    void (*announce)(void *stream, int more);
    // Puts work on a stream of a device; addresses are checked now, and again when it runs. `page` is that of this process
    // and `number` the work's: other processes let it begin by `wanted`. What a driver's call would return.
    int (*enqueue)(const char *function, int device, void *stream, const Range *ranges, std::size_t count,
                   SharedEvent *page, unsigned long long number, LibraryWork work, void *data);
    // The code of BAGUA_SIM_* variables with a number.
    unsigned long long (*number)(const char *variable, unsigned long long otherwise);
};

}  // namespace sim

// Exported by the driver's library.
extern "C" const sim::Library *simLibrary();
