// CUDA's words and small types: function qualifiers, dim3, vector types, launch configuration.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "hostcuda/runtime_api.h"

// ---- qualifiers: a kernel is a function -------------------------------------------------------------------------------------
#define __host__
#define __device__
#define __global__
#define __constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__
// A plain variable would be one per fiber, or one for all blocks; neither is shared memory. The name below is the error message.
#define __shared__ hostcuda_has_no___shared__keyword_use_the_SHARED_macro_or_dynamic_shared

// ---- dim3 and vectors, with CUDA's alignments --------------------------------------------------------------------------------
#define HOSTCUDA_VECTOR(type, name, align2, align4)                                                                           \
    struct name##1 { type x; };                                                                                               \
    struct alignas(align2) name##2 { type x, y; };                                                                            \
    struct name##3 { type x, y, z; };                                                                                         \
    struct alignas(align4) name##4 { type x, y, z, w; };                                                                      \
    constexpr name##1 make_##name##1(type x) { return name##1{x}; }                                                           \
    constexpr name##2 make_##name##2(type x, type y) { return name##2{x, y}; }                                                \
    constexpr name##3 make_##name##3(type x, type y, type z) { return name##3{x, y, z}; }                                     \
    constexpr name##4 make_##name##4(type x, type y, type z, type w) { return name##4{x, y, z, w}; }

HOSTCUDA_VECTOR(signed char, char, 2, 4)
HOSTCUDA_VECTOR(unsigned char, uchar, 2, 4)
HOSTCUDA_VECTOR(short, short, 4, 8)
HOSTCUDA_VECTOR(unsigned short, ushort, 4, 8)
HOSTCUDA_VECTOR(int, int, 8, 16)
HOSTCUDA_VECTOR(unsigned int, uint, 8, 16)
HOSTCUDA_VECTOR(long long, longlong, 16, 16)
HOSTCUDA_VECTOR(unsigned long long, ulonglong, 16, 16)
HOSTCUDA_VECTOR(float, float, 8, 16)
HOSTCUDA_VECTOR(double, double, 16, 16)
#undef HOSTCUDA_VECTOR

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return uint3{x, y, z}; }
};

// ---- launches ----------------------------------------------------------------------------------------------------------------
// Launch attributes (clusters, programmatic dependent launch, priorities) are not served: numAttrs must be 0.
struct cudaLaunchAttribute;

struct cudaLaunchConfig_st {
    dim3 gridDim;
    dim3 blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned int numAttrs;
};
typedef cudaLaunchConfig_st cudaLaunchConfig_t;

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};

struct cudaFuncAttributes {
    size_t sharedSizeBytes;  // static shared memory, as far as it is known: a kernel's arrays show when it runs
    size_t constSizeBytes;
    size_t localSizeBytes;
    int maxThreadsPerBlock;
    int numRegs;
    int ptxVersion;
    int binaryVersion;
    int cacheModeCA;
    int maxDynamicSharedSizeBytes;
    int preferredShmemCarveout;
};
