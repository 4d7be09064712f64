// The threads of a block as fibers of one thread of the host, which take turns at barriers and shuffles.
#pragma once
#include <cstddef>

namespace bagua {

// Numbers of up to three dimensions.
struct Dim {
    unsigned x, y, z;
};

// Where the running fiber is in its grid.
struct Here {
    Dim thread, block, block_size, grid_size;
};

// What a launch ended with; the number is what bagua_host_launch returns.
enum Outcome {
    DONE = 0,
    NO_SUCH_KERNEL = 1,
    // A block of no or more than 1024 threads, an empty grid, or no memory.
    BAD_LAUNCH = 2,
    // Some threads of a block wait at a barrier that others never reach: those ended, or wait at another one.
    DIVERGED = 3,
};

const Here &here();
// The number of the running fiber in its warp.
unsigned lane();
// The block's dynamic shared memory. Its contents are never zero at the start of a block.
void *dynamic_shared();
// Returns when all threads of the block have called it.
void sync_block();
// Returns when all lanes of the mask have called it.
void sync_warp(unsigned mask);
// Gives a value to the other lanes of the mask, and returns the one that lane `source` gives.
unsigned long long exchange_in_warp(unsigned mask, unsigned long long value, unsigned source);

// Runs the blocks of a grid in the order of their numbers. `body` is called once for each thread.
Outcome run_grid(Dim grid, Dim block, size_t shared_bytes, void (*body)(void *), void *argument);

}  // namespace bagua
