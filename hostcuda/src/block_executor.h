// Runs the blocks of a grid: one block per OS thread at a time, its CUDA threads on fibers.
#pragma once
#include <cstddef>
#include <cstdint>

#include "hostcuda/launch.h"

namespace hostcuda {

// One launch, as the executor needs it.
struct Launch {
    Grid grid;
    size_t blocks;
    uint64_t serial;         // counts launches
    char happens_before[2];  // TSan's names for "launch began" and "a thread ended"
};

void run_block(Launch& launch, size_t block_index);

// A stop about the running block as a whole: names kernel and block.
[[noreturn]] void stop_block(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A block of `grid` has asked for this many bytes of static shared memory: a stop when they are too many.
void check_shared_limit(const Grid& grid, size_t static_bytes);
// The grid whose block the calling OS thread runs.
const Grid& running_grid();

}  // namespace hostcuda
