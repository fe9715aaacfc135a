// Stops, error codes and the environment.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "runtime.h"

extern char** environ;

namespace hostcuda {

bool (*describe_caller)(char* text, size_t size) = nullptr;

void stop(const char* format, ...) {
    char text[4096];
    const int prefix = snprintf(text, sizeof text, "hostcuda: ");
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + prefix, sizeof text - prefix - 1, format, arguments);
    va_end(arguments);
    char where[1024];
    if (describe_caller && describe_caller(where, sizeof where)) {
        const size_t length = strlen(text);
        snprintf(text + length, sizeof text - length - 1, "; %s", where);
    }
    strcat(text, "\n");
    fflush(stdout);   // what the program said before the stop stays before it
    fputs(text, stderr);
    fflush(stderr);
    abort();
}

// ---- error codes --------------------------------------------------------------------------------------------------

static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t set_error(cudaError_t error) {
    // A success does not clear an earlier error: only cudaGetLastError does.
    if (error != cudaSuccess) last_error = error;
    return error;
}

struct ErrorText {
    cudaError_t error;
    const char* name;
    const char* text;
};
static const ErrorText kErrors[] = {
#define E(name, text) {name, #name, text}
    E(cudaSuccess, "no error"),
    E(cudaErrorInvalidValue, "invalid argument"),
    E(cudaErrorMemoryAllocation, "out of memory"),
    E(cudaErrorInitializationError, "initialization error"),
    E(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    E(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    E(cudaErrorInvalidDevicePointer, "invalid device pointer"),
    E(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    E(cudaErrorInvalidDeviceFunction, "invalid device function"),
    E(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    E(cudaErrorInvalidDevice, "invalid device ordinal"),
    E(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    E(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    E(cudaErrorNotReady, "device not ready"),
    E(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    E(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    E(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped"),
    E(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"),
    E(cudaErrorLaunchFailure, "unspecified launch failure"),
    E(cudaErrorNotPermitted, "operation not permitted"),
    E(cudaErrorNotSupported, "operation not supported"),
    E(cudaErrorUnknown, "unknown error"),
#undef E
};

// ---- environment --------------------------------------------------------------------------------------------------

// A misspelt name would silently test nothing, so it is a stop as well.
static const char* const kVariables[] = {"HOSTCUDA_ARCH",     "HOSTCUDA_ASYNC",  "HOSTCUDA_ASYNC_SEED", "HOSTCUDA_CUBLASLT_CONVERT",
                                         "HOSTCUDA_FAULT",    "HOSTCUDA_MEMORY", "HOSTCUDA_PROFILE",    "HOSTCUDA_PROTECT",
                                         "HOSTCUDA_SCHEDULE", "HOSTCUDA_STACK",  "HOSTCUDA_THREADS"};

const char* env_text(const char* name) {
    static std::once_flag once;
    std::call_once(once, [] {
        for (char** entry = environ; entry && *entry; entry++) {
            if (strncmp(*entry, "HOSTCUDA_", 9) != 0) continue;
            const char* equals = strchr(*entry, '=');
            const std::string variable(*entry, equals ? equals - *entry : strlen(*entry));
            bool known = false;
            std::string all;
            for (const char* candidate : kVariables) {
                known |= variable == candidate;
                all += std::string(all.empty() ? "" : ", ") + candidate;
            }
            if (!known) stop("unknown environment variable %s; hostcuda knows %s", variable.c_str(), all.c_str());
        }
    });
    const char* value = getenv(name);
    return value && *value ? value : nullptr;
}

bool env_flag(const char* name) {
    const char* value = env_text(name);
    if (!value) return false;
    if (strcmp(value, "0") != 0 && strcmp(value, "1") != 0) stop("%s=%s is neither 0 nor 1", name, value);
    return value[0] == '1';
}

long long env_integer(const char* name, long long unset, long long low, long long high) {
    const char* value = env_text(name);
    if (!value) return unset;
    char* end;
    errno = 0;
    const long long number = strtoll(value, &end, 10);
    const bool digits = (value[0] >= '0' && value[0] <= '9') || value[0] == '-';
    if (!digits || *end || errno || number < low || number > high)
        stop("%s=%s is not a whole number from %lld to %lld", name, value, low, high);
    return number;
}

size_t env_bytes(const char* name, size_t unset) {
    const char* value = env_text(name);
    if (!value) return unset;
    static const struct {
        const char* name;
        double bytes;
    } kUnits[] = {{"", 1},     {"B", 1},           {"KB", 1e3},         {"MB", 1e6},         {"GB", 1e9},
                  {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
    char* end = nullptr;
    const double number = value[0] >= '0' && value[0] <= '9' ? strtod(value, &end) : -1;
    if (number > 0)
        for (const auto& unit : kUnits)
            if (strcmp(end, unit.name) == 0 && number * unit.bytes >= 1 && number * unit.bytes < 0x1p50)
                return static_cast<size_t>(number * unit.bytes);
    stop("%s=%s is not a size; write for example 80GB, 24GiB, 512MiB or a number of bytes", name, value);
}

bool async_mode() {
    static const bool on = env_flag("HOSTCUDA_ASYNC");
    return on;
}
uint64_t async_seed() {
    static const uint64_t seed = env_integer("HOSTCUDA_ASYNC_SEED", 1, 0, INT64_MAX);
    return seed;
}
bool protect_mode() {
    static const bool on = env_flag("HOSTCUDA_PROTECT");
    return on;
}
bool profile_mode() {
    static const bool on = env_flag("HOSTCUDA_PROFILE");
    return on;
}
int device_arch() {
    static const int arch = [] {
        const long long value = env_integer("HOSTCUDA_ARCH", 80, 80, 90);
        if (value != 80 && value != 89 && value != 90) stop("HOSTCUDA_ARCH=%lld is not 80, 89 or 90", value);
        return static_cast<int>(value);
    }();
    return arch;
}

std::string describe_size(size_t bytes) {
    char text[64];
    if (bytes < 1u << 20) snprintf(text, sizeof text, "%zu bytes", bytes);
    else snprintf(text, sizeof text, "%zu bytes (%.2f GiB)", bytes, static_cast<double>(bytes) / 0x1p30);
    return text;
}

}  // namespace hostcuda

cudaError_t cudaGetLastError() {
    const cudaError_t error = hostcuda::last_error;
    hostcuda::last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() { return hostcuda::last_error; }

const char* cudaGetErrorName(cudaError_t error) {
    for (const auto& entry : hostcuda::kErrors)
        if (entry.error == error) return entry.name;
    return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
    for (const auto& entry : hostcuda::kErrors)
        if (entry.error == error) return entry.text;
    return "unrecognized error code";
}
