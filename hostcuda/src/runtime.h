// Shared by the files of the runtime (memory, streams, errors, device, profile); internal.h is what the rest sees.
#pragma once
#include <cstdint>
#include <string>

#include "hostcuda/internal.h"

#if defined(__SANITIZE_ADDRESS__)
#define HOSTCUDA_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HOSTCUDA_ASAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define HOSTCUDA_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HOSTCUDA_TSAN 1
#endif
#endif

#ifdef HOSTCUDA_TSAN
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
void AnnotateIgnoreSyncBegin(const char*, int);
void AnnotateIgnoreSyncEnd(const char*, int);
}
#endif

namespace hostcuda {

// While one of these lives, ThreadSanitizer sees neither the accesses nor the locks of this thread. hostcuda's own
// tables are shared by streams that must stay unordered in TSan's eyes: an order that comes only from our locks is
// not one CUDA promises, and would hide the missing event wait that TSan is asked to find.
struct TsanIgnore {
#ifdef HOSTCUDA_TSAN
    TsanIgnore() {
        AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~TsanIgnore() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
        AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    }
#else
    TsanIgnore() {}
    ~TsanIgnore() {}
#endif
    TsanIgnore(const TsanIgnore&) = delete;
    TsanIgnore& operator=(const TsanIgnore&) = delete;
};

// What the calling thread is in the middle of.
enum class Inside { nothing, operation, host_function };
Inside inside();

bool wait_for_all_streams();        // false: called from inside a stream's work, nothing was waited for
void settle_streams_at_exit();      // workers finish what they are at and take nothing new; false within 200 ms
bool streams_are_quiet();
void wait_for_legacy(const char* what, std::function<void()> work, bool host_waits);   // cudaMemcpy, cudaMemset

enum class Place { pageable, pinned, device, bad_device };
Place place_of(const void* pointer, size_t bytes);   // bad_device: device addresses, but not inside one live allocation

void check_canaries(const char* when);               // a damaged redzone is a stop
size_t device_memory_limit();
void prepare_exit();                                 // registers what must run at exit, once
void print_profile();
void report_missing_fault();                         // HOSTCUDA_FAULT asked for a fault that was not planted: says so
std::string describe_size(size_t bytes);

}  // namespace hostcuda
