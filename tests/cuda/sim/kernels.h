// Kernels that run on the host: the same sources, compiled by the host's compiler into a library.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "stream.h"

namespace sim {

// A launch, with its parameters as they were at the call.
struct Launch {
    std::string kernel;                         // name
    std::array<unsigned, 3> grid{};             // blocks
    std::array<unsigned, 3> block{};            // threads of a block
    unsigned shared_bytes = 0;                  // dynamic shared memory of a block
    std::vector<std::vector<std::max_align_t>> parameters;  // the bytes of each, aligned for any type
};

// The sizes of a kernel's parameters in bytes; an error and a fault if the library or the kernel is absent.
CUresult parameter_sizes(const std::string &kernel, std::vector<std::size_t> *sizes);

// The memory that parameters point into: every word of theirs that is an address. A wrong one is a text.
std::vector<Memory> memory_of(const Launch &launch, const Context *context, std::string *wrong);

// Runs a launch on the calling thread, with access to this memory and no other of a device.
Outcome run_launch(Launch &launch, const std::vector<Memory> &memory);

}  // namespace sim
