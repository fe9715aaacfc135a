// Shared memory of the block that an OS thread runs.
#pragma once
#include <cstddef>

namespace hostcuda {

// Poisons the dynamic bytes and forgets the last block's static arrays.
void begin_block_shared_memory(size_t dynamic_bytes);
// Checks the guarded bytes round every array: a changed one is a stop.
void end_block_shared_memory();

// 48 KiB: what a block may have without cudaFuncSetAttribute.
constexpr size_t kSharedBytesWithoutAsking = 48 * 1024;

}  // namespace hostcuda
