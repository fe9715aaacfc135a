// The one device: its properties, the number of threads behind it, and what happens at exit.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>

#include "runtime.h"

namespace hostcuda {

// Ranks of this job on this machine, so that they share its cores and memory.
static int local_ranks() {
    for (const char* name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"})
        if (const char* value = getenv(name)) return std::max(1, atoi(value));
    return 1;
}

static int allowed_cpus(cpu_set_t* set) {
    CPU_ZERO(set);
    if (sched_getaffinity(0, sizeof *set, set) != 0) return 1;
    return CPU_COUNT(set);
}

int num_threads() {
    static const int threads = [] {
        cpu_set_t before;
        int cpus = allowed_cpus(&before);
        const int bound = cpus;
        const bool under_mpi = getenv("OMPI_COMM_WORLD_LOCAL_SIZE") != nullptr;
        if (under_mpi) {
            // mpirun binds each rank to one core or one socket by default, which would put all threads of a rank on
            // it. Ask for every CPU; the kernel keeps to those the container may use.
            cpu_set_t all;
            CPU_ZERO(&all);
            const long online = std::min<long>(sysconf(_SC_NPROCESSORS_CONF), CPU_SETSIZE);
            for (long cpu = 0; cpu < online; cpu++) CPU_SET(cpu, &all);
            cpu_set_t now;
            if (sched_setaffinity(0, sizeof all, &all) == 0) cpus = allowed_cpus(&now);
        }
        long long wanted = env_integer("HOSTCUDA_THREADS", 0, 1, 1024);
        if (wanted == 0)
            if (const char* omp = getenv("OMP_NUM_THREADS")) wanted = std::min(atoi(omp), 1024);
        if (wanted <= 0) wanted = std::max(1, cpus / local_ranks());
        if (under_mpi && bound >= wanted) sched_setaffinity(0, sizeof before, &before);   // the binding was wide enough
        return static_cast<int>(wanted);
    }();
    return threads;
}

static size_t machine_memory() {
    size_t bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    std::ifstream cgroup("/sys/fs/cgroup/memory.max");   // a container may hold less; the file may say "max"
    size_t limit;
    if (cgroup >> limit) bytes = std::min(bytes, limit);
    return bytes;
}

size_t device_memory_limit() {
    static const size_t limit = env_bytes("HOSTCUDA_MEMORY", machine_memory() / local_ranks() / 256 * 256);
    return limit;
}

size_t max_shared_memory() { return (device_arch() == 80 ? 163 : device_arch() == 89 ? 99 : 227) * size_t{1024}; }

static size_t shared_memory_per_multiprocessor() { return max_shared_memory() + 1024; }

static int threads_per_multiprocessor() { return device_arch() == 89 ? 1536 : 2048; }

static std::string cpu_name() {
    std::ifstream file("/proc/cpuinfo");
    std::string line;
    while (std::getline(file, line))
        if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos) return line.substr(line.find(": ") + 2);
    return "unknown processor";
}

void prepare_exit() {
    static std::once_flag once;
    std::call_once(once, [] {
        fault_mode();   // nonsense in HOSTCUDA_FAULT is a stop at the start, not at the first launch
        std::atexit([] {
            settle_streams_at_exit();
            report_missing_fault();
            if (streams_are_quiet()) check_canaries("exit");
            print_profile();
        });
    });
}

}  // namespace hostcuda

using namespace hostcuda;

cudaError_t cudaGetDeviceCount(int* count) {
    if (!count) return set_error(cudaErrorInvalidValue);
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    if (!device) return set_error(cudaErrorInvalidValue);
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return set_error(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
    if (!prop) return set_error(cudaErrorInvalidValue);
    if (device != 0) return set_error(cudaErrorInvalidDevice);
    *prop = cudaDeviceProp{};
    static const std::string name = "hostcuda (" + cpu_name() + ")";
    snprintf(prop->name, sizeof prop->name, "%s", name.c_str());
    prop->totalGlobalMem = device_memory_limit();
    prop->sharedMemPerBlock = 48 * 1024;
    prop->regsPerBlock = 65536;
    prop->warpSize = 32;
    prop->maxThreadsPerBlock = 1024;
    prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024;
    prop->maxThreadsDim[2] = 64;
    prop->maxGridSize[0] = 0x7FFFFFFF;
    prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
    prop->totalConstMem = 65536;
    prop->major = device_arch() / 10;
    prop->minor = device_arch() % 10;
    prop->multiProcessorCount = num_threads();   // one block at a time on each
    prop->concurrentKernels = async_mode();
    prop->asyncEngineCount = async_mode() ? 2 : 0;
    prop->unifiedAddressing = 1;
    const long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    prop->l2CacheSize = l2 > 0 ? static_cast<int>(std::min<long>(l2, 1 << 30)) : 1 << 20;
    prop->maxThreadsPerMultiProcessor = threads_per_multiprocessor();
    prop->streamPrioritiesSupported = 1;
    prop->sharedMemPerMultiprocessor = shared_memory_per_multiprocessor();
    prop->regsPerMultiprocessor = 65536;
    prop->sharedMemPerBlockOptin = max_shared_memory();
    prop->maxBlocksPerMultiProcessor = device_arch() == 89 ? 24 : 32;
    prop->reservedSharedMemPerBlock = 1024;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attr, int device) {
    if (!value) return set_error(cudaErrorInvalidValue);
    cudaDeviceProp prop;
    if (cudaGetDeviceProperties(&prop, device) != cudaSuccess) return cudaErrorInvalidDevice;
    switch (attr) {
        case cudaDevAttrMaxThreadsPerBlock: *value = prop.maxThreadsPerBlock; break;
        case cudaDevAttrMaxBlockDimX: *value = prop.maxThreadsDim[0]; break;
        case cudaDevAttrMaxBlockDimY: *value = prop.maxThreadsDim[1]; break;
        case cudaDevAttrMaxBlockDimZ: *value = prop.maxThreadsDim[2]; break;
        case cudaDevAttrMaxGridDimX: *value = prop.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY: *value = prop.maxGridSize[1]; break;
        case cudaDevAttrMaxGridDimZ: *value = prop.maxGridSize[2]; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(prop.sharedMemPerBlock); break;
        case cudaDevAttrTotalConstantMemory: *value = static_cast<int>(prop.totalConstMem); break;
        case cudaDevAttrWarpSize: *value = prop.warpSize; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = prop.regsPerBlock; break;
        case cudaDevAttrMultiProcessorCount: *value = prop.multiProcessorCount; break;
        case cudaDevAttrIntegrated: *value = prop.integrated; break;
        case cudaDevAttrConcurrentKernels: *value = prop.concurrentKernels; break;
        case cudaDevAttrL2CacheSize: *value = prop.l2CacheSize; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = prop.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrAsyncEngineCount: *value = prop.asyncEngineCount; break;
        case cudaDevAttrUnifiedAddressing: *value = prop.unifiedAddressing; break;
        case cudaDevAttrComputeCapabilityMajor: *value = prop.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = prop.minor; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = static_cast<int>(prop.sharedMemPerMultiprocessor); break;
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = prop.regsPerMultiprocessor; break;
        case cudaDevAttrCooperativeLaunch: *value = 0; break;   // no block ever waits for another
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(prop.sharedMemPerBlockOptin); break;
        default: return set_error(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* pciBusId, int len, int device) {
    if (!pciBusId || len < 13) return set_error(cudaErrorInvalidValue);
    if (device != 0) return set_error(cudaErrorInvalidDevice);
    snprintf(pciBusId, len, "0000:00:00.0");
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* leastPriority, int* greatestPriority) {
    if (leastPriority) *leastPriority = 0;
    if (greatestPriority) *greatestPriority = -5;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    if (!version) return set_error(cudaErrorInvalidValue);
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
