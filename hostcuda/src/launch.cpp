// Launches: what CUDA refuses is refused here, then the blocks go to the pool.
#include "hostcuda/launch.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <string>
#include <unordered_map>

#include "block_executor.h"
#include "hostcuda/internal.h"
#include "sanitizers.h"
#include "schedule.h"
#include "shared_memory.h"
#include "symbols.h"
#include "thread_pool.h"

namespace hostcuda {
namespace {

struct Function {
    std::string name;
    size_t max_dynamic_bytes = kSharedBytesWithoutAsking;  // cudaFuncSetAttribute
    std::atomic<size_t> static_bytes{0};                   // the most that any block has asked for
};

// Entries are never removed, so references stay good.
Function& function(const void* kernel) {
    static std::mutex mutex;
    static auto& functions = *new std::unordered_map<const void*, Function>;  // blocks may still run when main has returned
    std::lock_guard lock(mutex);
    Function& entry = functions[kernel];
    if (entry.name.empty()) {
        char text[512];
        symbol_name(kernel, text, sizeof(text));
        entry.name = text;
        // Messages name the kernel, not its parameter types: they are the bulk of a demangled name and help nobody.
        if (entry.name.back() == ')') {
            int depth = 0;
            for (size_t i = entry.name.size(); i-- > 0;) {
                depth += entry.name[i] == ')' ? 1 : entry.name[i] == '(' ? -1 : 0;
                if (depth == 0) {
                    entry.name.resize(i);
                    break;
                }
            }
            if (entry.name.rfind("void ", 0) == 0) entry.name.erase(0, 5);
        }
    }
    return entry;
}

__attribute__((format(printf, 2, 3))) cudaError_t refuse(cudaError_t error, const char* format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    fprintf(stderr, "hostcuda: %s\n", text);
    return error;
}

}  // namespace

uint64_t schedule_seed() {
    static const uint64_t seed = static_cast<uint64_t>(env_integer("HOSTCUDA_SCHEDULE", 0, 0, INT64_MAX));
    return seed;
}

size_t scheduled_block(size_t i, size_t blocks, uint64_t serial) {
    const uint64_t seed = schedule_seed();
    if (seed == 0 || blocks == 1) return i;
    const uint64_t random = mix(seed ^ mix(serial));
    size_t step = 1 + random % (blocks - 1);
    while (std::gcd(step, blocks) != 1) step++;
    return static_cast<size_t>((static_cast<unsigned __int128>(i) * step + (random >> 32)) % blocks);
}

const char* kernel_name(const void* kernel) { return function(kernel).name.c_str(); }

cudaError_t check_launch(const cudaLaunchConfig_t* config, const void* kernel) {
    if (config == nullptr || kernel == nullptr) return refuse(cudaErrorInvalidValue, "a launch without a configuration or a kernel");
    const Function& f = function(kernel);
    const char* const name = f.name.c_str();
    const dim3 grid = config->gridDim, block = config->blockDim;
    if (config->numAttrs != 0) return refuse(cudaErrorNotSupported, "launch of %s: launch attributes are not served", name);
    if (block.x == 0 || block.y == 0 || block.z == 0) {
        return refuse(cudaErrorInvalidConfiguration, "launch of %s: empty block (%u,%u,%u)", name, block.x, block.y, block.z);
    }
    if (static_cast<uint64_t>(block.x) * block.y * block.z > 1024 || block.x > 1024 || block.y > 1024) {
        return refuse(cudaErrorInvalidConfiguration, "launch of %s: block (%u,%u,%u) has %llu threads, a block holds 1024 at most", name, block.x,
                      block.y, block.z, static_cast<unsigned long long>(block.x) * block.y * block.z);
    }
    if (block.z > 64) {
        return refuse(cudaErrorInvalidConfiguration, "launch of %s: block.z is %u, the largest is 64", name, block.z);
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
        return refuse(cudaErrorInvalidConfiguration, "launch of %s: empty grid (%u,%u,%u); a launcher with nothing to do must return first", name, grid.x,
                      grid.y, grid.z);
    }
    if (grid.x > 0x7fffffffu) {
        return refuse(cudaErrorInvalidConfiguration, "launch of %s: grid.x is %u, the largest is 2147483647", name, grid.x);
    }
    if (grid.y > 65535 || grid.z > 65535) {
        return refuse(cudaErrorInvalidConfiguration, "launch of %s: grid (%u,%u,%u), the largest y and z are 65535; put the long axis in x", name, grid.x,
                      grid.y, grid.z);
    }
    if (config->dynamicSmemBytes > f.max_dynamic_bytes) {
        return refuse(cudaErrorInvalidValue,
                      "launch of %s: %zu bytes of dynamic shared memory, allowed are %zu; ask with cudaFuncSetAttribute("
                      "cudaFuncAttributeMaxDynamicSharedMemorySize), up to %zu on sm_%d",
                      name, config->dynamicSmemBytes, f.max_dynamic_bytes, max_shared_memory(), device_arch());
    }
    const size_t static_bytes = f.static_bytes.load(std::memory_order_relaxed);
    if (config->dynamicSmemBytes + static_bytes > max_shared_memory()) {
        return refuse(cudaErrorInvalidValue, "launch of %s: %zu bytes of dynamic and %zu of static shared memory, sm_%d has %zu", name,
                      config->dynamicSmemBytes, static_bytes, device_arch(), max_shared_memory());
    }
    return cudaSuccess;
}

void check_shared_limit(const Grid& grid, size_t static_bytes) {
    if (static_bytes > kSharedBytesWithoutAsking) {
        stop_block("%zu bytes of static shared memory, a kernel may have %zu; use dynamic shared memory", static_bytes, kSharedBytesWithoutAsking);
    }
    Function& f = function(grid.kernel);
    // Without asking, static and dynamic together may have 48 KiB.
    const size_t limit = f.max_dynamic_bytes > kSharedBytesWithoutAsking ? max_shared_memory() : kSharedBytesWithoutAsking;
    if (static_bytes + grid.dynamic_bytes > limit) {
        stop_block("%zu bytes of static and %zu of dynamic shared memory, allowed are %zu together; use less or ask with cudaFuncSetAttribute("
                   "cudaFuncAttributeMaxDynamicSharedMemorySize), up to %zu on sm_%d",
                   static_bytes, grid.dynamic_bytes, limit, max_shared_memory(), device_arch());
    }
    size_t seen = f.static_bytes.load(std::memory_order_relaxed);
    while (seen < static_bytes && !f.static_bytes.compare_exchange_weak(seen, static_bytes, std::memory_order_relaxed)) {
    }
}

namespace {
HOSTCUDA_UNCHECKED void run_one_block(void* context, size_t i) {
    Launch& launch = *static_cast<Launch*>(context);
    run_block(launch, scheduled_block(i, launch.blocks, launch.serial));
}
}  // namespace

void run_grid(const Grid& grid) {
    static std::atomic<uint64_t> launches{0};
    Launch launch{};
    launch.grid = grid;
    launch.blocks = static_cast<size_t>(grid.grid.x) * grid.grid.y * grid.grid.z;
    launch.serial = launches.fetch_add(1, std::memory_order_relaxed);
    const DeviceAccess access;
#if HOSTCUDA_TSAN
    __tsan_release(&launch.happens_before[0]);
#endif
    parallel_for_unordered(launch.blocks, run_one_block, &launch);
#if HOSTCUDA_TSAN
    __tsan_acquire(&launch.happens_before[1]);
#endif
}

cudaError_t set_function_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    if (kernel == nullptr) return set_error(cudaErrorInvalidDeviceFunction);
    Function& f = function(kernel);
    switch (attribute) {
        case cudaFuncAttributeMaxDynamicSharedMemorySize:
            if (value < 0 || static_cast<size_t>(value) + f.static_bytes.load(std::memory_order_relaxed) > max_shared_memory()) {
                return set_error(refuse(cudaErrorInvalidValue,
                                        "cudaFuncSetAttribute(%s): %d bytes of dynamic and %zu of static shared memory, sm_%d has %zu",
                                        f.name.c_str(), value, f.static_bytes.load(std::memory_order_relaxed), device_arch(), max_shared_memory()));
            }
            f.max_dynamic_bytes = static_cast<size_t>(value);
            return set_error(cudaSuccess);
        case cudaFuncAttributePreferredSharedMemoryCarveout:
            return set_error(value >= -1 && value <= 100 ? cudaSuccess : cudaErrorInvalidValue);
    }
    return set_error(cudaErrorInvalidValue);
}

cudaError_t get_function_attributes(cudaFuncAttributes* attributes, const void* kernel) {
    if (attributes == nullptr) return set_error(cudaErrorInvalidValue);
    if (kernel == nullptr) return set_error(cudaErrorInvalidDeviceFunction);
    const Function& f = function(kernel);
    *attributes = {};
    attributes->sharedSizeBytes = f.static_bytes.load(std::memory_order_relaxed);
    attributes->maxThreadsPerBlock = 1024;
    attributes->maxDynamicSharedSizeBytes = static_cast<int>(f.max_dynamic_bytes);
    attributes->ptxVersion = attributes->binaryVersion = device_arch();
    return set_error(cudaSuccess);
}

}  // namespace hostcuda
