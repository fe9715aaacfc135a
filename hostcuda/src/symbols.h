// Names of functions and variables in this program, for messages.
#pragma once
#include <cstddef>

namespace hostcuda {

// The demangled name of the symbol that starts at `address`, or "0x..." where there is none. Local symbols are found too.
void symbol_name(const void* address, char* text, size_t size);

}  // namespace hostcuda
