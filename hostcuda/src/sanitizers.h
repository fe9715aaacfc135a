// What the executor tells AddressSanitizer and ThreadSanitizer; nothing in a plain build.
#pragma once
#include <cstddef>

#if defined(__has_feature)
#define HOSTCUDA_HAS_FEATURE(name) __has_feature(name)
#else
#define HOSTCUDA_HAS_FEATURE(name) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || HOSTCUDA_HAS_FEATURE(address_sanitizer)
#define HOSTCUDA_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define HOSTCUDA_ASAN 0
#endif

#if defined(__SANITIZE_THREAD__) || HOSTCUDA_HAS_FEATURE(thread_sanitizer)
#define HOSTCUDA_TSAN 1
#include <sanitizer/tsan_interface.h>
#else
#define HOSTCUDA_TSAN 0
#endif

namespace hostcuda {
constexpr bool kAsan = HOSTCUDA_ASAN;
constexpr bool kTsan = HOSTCUDA_TSAN;
}  // namespace hostcuda
