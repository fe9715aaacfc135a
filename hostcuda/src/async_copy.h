// Asynchronous copies of the block that an OS thread runs.
#pragma once

namespace hostcuda {

// Forgets what the last block's threads left pending. After begin_block_shared_memory.
void begin_block_async_copies(unsigned threads);
void end_block_async_copies();

}  // namespace hostcuda
