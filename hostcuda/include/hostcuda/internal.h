// What the parts of hostcuda say to one another. Programs do not include this file.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "hostcuda/runtime_api.h"

namespace hostcuda {

// ---- stops --------------------------------------------------------------------------------------------------------
// Prints "hostcuda: <text>", with kernel, block and thread when a CUDA thread is the caller, and abort()s.
[[noreturn]] void stop(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Set by the execution core: writes "kernel name, block (x,y,z), thread (x,y,z)" of the calling CUDA thread into text
// and returns true, or returns false outside a kernel. It must be callable from a signal handler.
extern bool (*describe_caller)(char* text, size_t size);

// Gives the calling OS thread a stack of its own for the fault handler, so that a CUDA thread that overflows its fiber
// is a stop with words. Once for each thread that runs blocks; later calls do nothing.
void use_fault_stack();

// Remembers the error for cudaGetLastError (per host thread) and returns it. Every runtime call ends with it.
cudaError_t set_error(cudaError_t error);

// ---- environment --------------------------------------------------------------------------------------------------
// Each variable is read once, strictly: a value that makes no sense is a stop.
const char* env_text(const char* name);                                     // unset or "": null
bool env_flag(const char* name);                                            // unset, "" or 0: false; 1: true
long long env_integer(const char* name, long long unset, long long low, long long high);
size_t env_bytes(const char* name, size_t unset);                           // 80GB, 24GiB, 1.5GiB, 1000000

bool async_mode();            // HOSTCUDA_ASYNC=1
uint64_t async_seed();        // HOSTCUDA_ASYNC_SEED
bool protect_mode();          // HOSTCUDA_PROTECT=1
bool profile_mode();          // HOSTCUDA_PROFILE=1
bool fault_mode();            // HOSTCUDA_FAULT is set
int device_arch();            // HOSTCUDA_ARCH: 80, 89 or 90
size_t max_shared_memory();   // bytes a block may opt in to on that architecture
int num_threads();            // OS threads that run blocks (and oneDNN's)

// ---- streams ------------------------------------------------------------------------------------------------------
// Puts work on a stream: runs it now in the calling thread, or on the stream's worker when HOSTCUDA_ASYNC=1. A null
// stream is a stop (there is no default stream here); a destroyed stream gives cudaErrorInvalidResourceHandle.
// `what` names the work in messages and in the HOSTCUDA_PROFILE table; it is copied. The work is timed for the
// profile here, so callers do not call profile_add themselves.
// Work that itself makes runtime calls (cudaMemcpy, enqueue on any stream) has them run at once, as part of it.
cudaError_t enqueue(cudaStream_t stream, const char* what, std::function<void()> work);
// The same test alone, for calls that must fail before they do anything. `call` is the runtime function's name.
cudaError_t check_stream(cudaStream_t stream, const char* call);

// ---- device memory ------------------------------------------------------------------------------------------------
// Two bytes that are a NaN as bf16 and as fp16; repeated, a NaN as float and double and a huge positive integer.
constexpr uint16_t kPoison16 = 0x7FFA;
constexpr uint32_t kPoison32 = 0x7FFA7FFAu;

// Device memory may be touched while one of these is alive (it matters when HOSTCUDA_PROTECT=1 only). Take one round
// the work itself, on the thread that does it; nesting is fine.
struct DeviceAccess {
    DeviceAccess();
    ~DeviceAccess();
    DeviceAccess(const DeviceAccess&) = delete;
    DeviceAccess& operator=(const DeviceAccess&) = delete;
};

bool is_device_pointer(const void* pointer);   // inside a live device allocation
bool is_pinned_pointer(const void* pointer);   // inside memory of cudaMallocHost, cudaHostAlloc or cudaHostRegister
// HOSTCUDA_PROTECT: a kernel argument that is neither null, device memory nor pinned memory is a stop. No-op otherwise.
void check_device_pointer(const void* pointer, const char* kernel, int argument);

// ---- profile ------------------------------------------------------------------------------------------------------
void profile_add(const char* name, double seconds);

}  // namespace hostcuda
