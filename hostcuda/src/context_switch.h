// Switching between stacks within one OS thread.
#pragma once
#include <cstddef>

namespace hostcuda {

// Saves the caller's registers and stack pointer in *save and goes on where `target` was saved. It returns when something switches back.
void switch_context(void** save, void* target);

// A context that calls entry() on a fresh stack at [bottom, top); entry must not return.
void* make_context(char* bottom, char* top, void (*entry)());

}  // namespace hostcuda
