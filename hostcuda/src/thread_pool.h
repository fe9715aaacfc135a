// The OS threads that run blocks.
#pragma once
#include <cstddef>

namespace hostcuda {

// Calls run(context, i) for each i in [0, count), in any order, on num_threads() threads, the caller among them; returns when all are done.
// A caller that finds the pool busy (another stream's kernel, or a call from within) does all of it alone.
void parallel_for(size_t count, void (*run)(void* context, size_t index), void* context);


// The same, but to TSan nothing is ordered by it: the caller says what is (see run_grid).
void parallel_for_unordered(size_t count, void (*run)(void* context, size_t index), void* context);

}  // namespace hostcuda
