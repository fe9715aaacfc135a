// Shared memory of the block that an OS thread runs.
#pragma once
#include <cstddef>

namespace hostcuda {

// Poisons the dynamic bytes and forgets the last block's static arrays.
void begin_block_shared_memory(size_t dynamic_bytes);
// Checks the guarded bytes round every array: a changed one is a stop.
void end_block_shared_memory();

// Where the arrays of the calling OS thread's blocks lie, once it has begun one.
constexpr size_t kSharedMemoryBytes = 384 * 1024;
char* shared_memory_begin();

// 48 KiB: what a block may have without cudaFuncSetAttribute.
constexpr size_t kSharedBytesWithoutAsking = 48 * 1024;

}  // namespace hostcuda
