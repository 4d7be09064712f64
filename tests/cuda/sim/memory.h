// Device and host memory: where it is, who uses it, and what is wrong with a range of addresses.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "abi.h"

namespace sim {

struct Context;

// How memory came to be.
enum class Kind { plain, ordered, pinned };

// Memory that a call of the driver made.
struct Allocation {
    std::uintptr_t base = 0;             // first address, as the caller sees it; never given out again
    std::size_t bytes = 0;               // what was asked for
    std::size_t mapped = 0;              // bytes in whole pages
    Kind kind = Kind::plain;             // how it came to be
    Context *context = nullptr;          // whose it is
    int fd = -1;                         // the memfd with the bytes of device memory
    unsigned char *shadow = nullptr;     // device memory's second mapping, through which the simulator copies
    bool live = true;                    // false once the memory is gone
    bool free_enqueued = false;          // cuMemFreeAsync was called: later calls must not name it
    bool born = true;                    // false until cuMemAllocAsync's place in its stream is reached
    unsigned users = 0;                  // operations that are enqueued or run, and name it
    unsigned open_count = 0;             // kernels that run now and may touch `base` itself

    ~Allocation();
    // Whether the bytes are a device's.
    bool on_device() const { return kind <= Kind::ordered; }
    // The bytes at an address of this allocation, for the simulator.
    unsigned char *at(std::uintptr_t address) const {
        return on_device() ? shadow + (address - base) : reinterpret_cast<unsigned char *>(address);
    }
};

using Memory = std::shared_ptr<Allocation>;

// A range of addresses that a call named, after the checks.
struct Place {
    Memory memory;               // null for pageable host memory
    std::uintptr_t address = 0;  // its first byte

    // Whether the bytes are a device's.
    bool on_device() const { return memory && memory->on_device(); }
    // The bytes, for the simulator.
    unsigned char *data() const {
        return memory ? memory->at(address) : reinterpret_cast<unsigned char *>(address);
    }
};

// Which memory a parameter may name.
enum class Side { host, device };

// Makes device or pinned memory with a pattern that is a NaN in every float type and zero in none.
CUresult allocate(Context *context, Kind kind, std::size_t bytes, Memory *made);

// Takes memory away: the caller's addresses lose their access for good.
void release(Memory memory);

// The memory with an address, dead or alive; null where the address is not the driver's.
Memory memory_at(std::uintptr_t address);

// All memory that is alive.
std::vector<Memory> all_memory();

// Checks a range that a call named; a mistake is a fault and an error.
CUresult resolve(const char *function, std::uintptr_t address, std::size_t bytes, Side side, Place *place);

// What is wrong with memory when an operation begins that uses it; empty if nothing is.
std::string unusable(const Allocation &memory);

// Gives and takes access to the addresses that the caller sees, while a kernel runs.
void open_for_kernel(Allocation &memory);
void close_after_kernel(Allocation &memory);

// Whether an address is in the range from which device memory is taken.
bool in_device_range(std::uintptr_t address);

// An address or a size as text for a fault.
std::string hex(std::uintptr_t value);

}  // namespace sim
