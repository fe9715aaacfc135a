// What every kernel stands on: the storage type, launches, shared memory, 8-element vectors, warp and block reductions.
//
// Names: floatX, kFloatXType, kDeviceIsCpu, CUDA_CHECK, device_count, NvtxRange, ceil_div, launch, with_bool, SHARED, dynamic_shared, to_float, from_float,
//        UNROLL, Float8 (load8, store8, pack_bf16 (GPU), bf16_bits (CPU), store8_stochastic, set8, zero8, first8, one_hot8, fma8, max8, sqrt8,
//        exp8, sum8, largest8), warp_sum, group_sum, row_lanes, warp_max, block_sum, block_max.
//
// Besides ptx.cuh this is the only file that looks at __CUDACC__: below it a GPU and hostcuda are the same machine. Where the two differ
// is speed, and the helpers here are chosen so that a kernel written with them is good on both: 16-byte loads that become SIMD
// on a CPU, and reductions that cost a CPU one meeting of the warp instead of five.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <library_types.h>
#include <nvtx3/nvToolsExt.h>

#include "llmc/error.h"

// ---- storage type ------------------------------------------------------------------------------------------------------------
// Parameters, gradients and activations are floatX; all arithmetic is float, rounded once when stored.
#ifdef PRECISION_FP32
using floatX = float;
inline constexpr cudaDataType_t kFloatXType = CUDA_R_32F;
#else
using floatX = __nv_bfloat16;
inline constexpr cudaDataType_t kFloatXType = CUDA_R_16BF;
#endif

// Whether the device is the processor itself, by way of hostcuda.
#ifdef __CUDACC__
inline constexpr bool kDeviceIsCpu = false;
#else
inline constexpr bool kDeviceIsCpu = true;
#endif

// Elements of one vector access. Every row length (C, F, HD, Vp, ...) is a multiple of it, so rows need no ragged tails.
inline constexpr int kVector = 8;
inline constexpr int kWarpSize = 32;

// std::numeric_limits has host functions only; these are values, so kernels may use them.
inline constexpr float kFloatMax = std::numeric_limits<float>::max();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- host side: errors, ranges, launches -------------------------------------------------------------------------------------
#define CUDA_CHECK(call)                                                                                                      \
    do {                                                                                                                      \
        const cudaError_t cuda_check_status = (call);                                                                         \
        if (cuda_check_status != cudaSuccess) {                                                                               \
            fail("%s:%d: %s: %s (%s)", __FILE__, __LINE__, #call, cudaGetErrorString(cuda_check_status),                      \
                 cudaGetErrorName(cuda_check_status));                                                                        \
        }                                                                                                                     \
    } while (0)

// CUDA devices of this machine. Throws Error when there is none.
inline int device_count() {
    int devices = 0;
    const cudaError_t status = cudaGetDeviceCount(&devices);
    CHECK(status == cudaSuccess && devices > 0, "no CUDA device was found (%s): run on a machine with an NVIDIA GPU and its driver, or build for the CPU with make DEVICE=cpu",
          status == cudaSuccess ? "the driver reports none" : cudaGetErrorString(status));
    return devices;
}

// Names a stretch of host code in a profile, for as long as it lives.
struct NvtxRange {
    explicit NvtxRange(const char* name) { nvtxRangePushA(name); }
    ~NvtxRange() { nvtxRangePop(); }
    NvtxRange(const NvtxRange&) = delete;
    NvtxRange& operator=(const NvtxRange&) = delete;
};

template <typename T, typename U>
__host__ __device__ constexpr std::common_type_t<T, U> ceil_div(T dividend, U divisor) {
    using Common = std::common_type_t<T, U>;
    return (static_cast<Common>(dividend) + static_cast<Common>(divisor) - 1) / static_cast<Common>(divisor);
}

// Blocks of a one-dimensional grid that covers `count` items, `per_block` each.
inline unsigned grid_for(size_t count, size_t per_block) {
    const size_t blocks = ceil_div(count, per_block);
    CHECK(blocks <= static_cast<size_t>(std::numeric_limits<int>::max()),
          "%zu items at %zu a block need %zu blocks, more than a grid holds; use a smaller batch or bucket", count, per_block, blocks);
    return static_cast<unsigned>(blocks);
}

// Starts a kernel. An empty grid is an error here as it is in CUDA: launchers with nothing to do return before they come here.
template <typename... Params, typename... Args>
inline void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes, cudaStream_t stream, Args&&... args) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = smem_bytes;
    config.stream = stream;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

// Turns a run-time flag into a compile-time one: with_bool(flag, [&](auto constant) { launch(kernel<constant.value>, ...); });
template <typename Function>
inline void with_bool(bool flag, Function&& function) {
    if (flag) {
        function(std::true_type{});
    } else {
        function(std::false_type{});
    }
}

// UNROLL before a loop of constant length keeps the arrays it walks in registers. On a CPU g++ leaves loops of 8 vectors rolled otherwise, and the
// vectors in memory (attention forward: 1.6 times slower).
#if defined(__CUDACC__) || defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// ---- shared memory -----------------------------------------------------------------------------------------------------------
// SHARED(float, buffer, 32) declares a static shared array; dynamic_shared<float>() is the array whose bytes the launch gave.
#ifdef __CUDACC__
#define SHARED(type, name, count) __shared__ type name[count]

template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
    extern __shared__ __align__(16) unsigned char dynamic_shared_base[];
    return reinterpret_cast<T*>(dynamic_shared_base);
}
#else
#define SHARED(type, name, count)          \
    static const char name##_shared_key{}; \
    type* const name = static_cast<type*>(::hostcuda::shared_array(&name##_shared_key, sizeof(type) * (count), alignof(type)))

template <typename T>
inline T* dynamic_shared() {
    return static_cast<T*>(::hostcuda::dynamic_shared());
}
#endif

// ---- one element -------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x) {
    if constexpr (std::is_same_v<T, float>) {
        return x;
    } else {
        return __float2bfloat16_rn(x);
    }
}

// ---- eight elements ----------------------------------------------------------------------------------------------------------
// Float8 is eight floats in registers. Element-wise + - * / and unary -, also with a float on either side; x[i] reads and writes.
#ifdef __CUDACC__

struct alignas(16) Float8 {
    float value[8];
    __device__ __forceinline__ float& operator[](int i) { return value[i]; }
    __device__ __forceinline__ float operator[](int i) const { return value[i]; }
};

#define LLMC_FLOAT8_OPERATOR(op)                                                       \
    __device__ __forceinline__ Float8 operator op(const Float8& a, const Float8& b) { \
        Float8 result;                                                                 \
        _Pragma("unroll") for (int i = 0; i < 8; i++) result[i] = a[i] op b[i];        \
        return result;                                                                 \
    }                                                                                  \
    __device__ __forceinline__ Float8 operator op(const Float8& a, float b) {          \
        Float8 result;                                                                 \
        _Pragma("unroll") for (int i = 0; i < 8; i++) result[i] = a[i] op b;           \
        return result;                                                                 \
    }                                                                                  \
    __device__ __forceinline__ Float8 operator op(float a, const Float8& b) {          \
        Float8 result;                                                                 \
        _Pragma("unroll") for (int i = 0; i < 8; i++) result[i] = a op b[i];           \
        return result;                                                                 \
    }                                                                                  \
    template <typename B>                                                              \
    __device__ __forceinline__ Float8& operator op##=(Float8& a, const B& b) {         \
        return a = a op b;                                                             \
    }
LLMC_FLOAT8_OPERATOR(+)
LLMC_FLOAT8_OPERATOR(-)
LLMC_FLOAT8_OPERATOR(*)
LLMC_FLOAT8_OPERATOR(/)
#undef LLMC_FLOAT8_OPERATOR

__device__ __forceinline__ Float8 set8(float x) {
    Float8 result;
#pragma unroll
    for (int i = 0; i < 8; i++) result[i] = x;
    return result;
}

__device__ __forceinline__ Float8 operator-(const Float8& a) {
    Float8 result;
#pragma unroll
    for (int i = 0; i < 8; i++) result[i] = -a[i];
    return result;
}

// 16-byte (bf16) or twice 16-byte (float) access; the address must be a multiple of 16.
__device__ __forceinline__ Float8 load8(const float* address) {
    const float4 low = reinterpret_cast<const float4*>(address)[0];
    const float4 high = reinterpret_cast<const float4*>(address)[1];
    return Float8{{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

__device__ __forceinline__ Float8 load8(const __nv_bfloat16* address) {
    const uint4 raw = *reinterpret_cast<const uint4*>(address);
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
    Float8 result;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // A bfloat16 is the upper half of a float.
        result[2 * i] = __uint_as_float(words[i] << 16);
        result[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
    return result;
}

__device__ __forceinline__ void store8(float* address, const Float8& x) {
    reinterpret_cast<float4*>(address)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(address)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Eight elements rounded to bfloat16, two to a word, the first in its low half.
__device__ __forceinline__ void pack_bf16(unsigned (&words)[4], const Float8& x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&words[i], &pair, sizeof(pair));
    }
}

__device__ __forceinline__ void store8(__nv_bfloat16* address, const Float8& x) {
    unsigned words[4];
    pack_bf16(words, x);
    *reinterpret_cast<uint4*>(address) = make_uint4(words[0], words[1], words[2], words[3]);
}

// The bfloat16 bits of x, rounded up with a probability equal to the part that does not fit: noise is uniform in [0, 65536). A value that
// is a bfloat16 stays what it is, whatever the noise; the mean over the noise is x exactly. Infinities stay, a NaN becomes 0x7fff, and a
// finite value beyond the largest bfloat16 becomes that one rather than an infinity: there alone the mean is off.
__device__ __forceinline__ unsigned stochastic_round_bits(unsigned float_bits, unsigned noise) {
    const unsigned magnitude = float_bits & 0x7fffffffu;
    const unsigned sum = magnitude + noise;
    // Carried into infinity: back to the largest finite one.
    const unsigned rounded = sum >= 0x7f800000u && magnitude < 0x7f800000u ? 0x7f7fu : sum >> 16;
    return magnitude > 0x7f800000u ? 0x7fffu : (float_bits >> 31 << 15 | rounded);
}

// Stores eight elements rounded so, with 128 random bits: sixteen each, the first element's in the low half of the first word.
__device__ __forceinline__ void store8_stochastic(__nv_bfloat16* address, const Float8& x, uint4 random) {
    const unsigned words[4] = {random.x, random.y, random.z, random.w};
    unsigned packed[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned low = stochastic_round_bits(__float_as_uint(x[2 * i]), words[i] & 0xffffu);
        const unsigned high = stochastic_round_bits(__float_as_uint(x[2 * i + 1]), words[i] >> 16);
        packed[i] = low | high << 16;
    }
    *reinterpret_cast<uint4*>(address) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

__device__ __forceinline__ Float8 fma8(const Float8& a, const Float8& b, const Float8& c) {
    Float8 result;
#pragma unroll
    for (int i = 0; i < 8; i++) result[i] = fmaf(a[i], b[i], c[i]);
    return result;
}

__device__ __forceinline__ Float8 max8(const Float8& a, const Float8& b) {
    Float8 result;
#pragma unroll
    for (int i = 0; i < 8; i++) result[i] = fmaxf(a[i], b[i]);
    return result;
}

__device__ __forceinline__ Float8 sqrt8(const Float8& x) {
    Float8 result;
#pragma unroll
    for (int i = 0; i < 8; i++) result[i] = sqrtf(x[i]);
    return result;
}

__device__ __forceinline__ Float8 exp8(const Float8& x) {
    Float8 result;
#pragma unroll
    for (int i = 0; i < 8; i++) result[i] = expf(x[i]);
    return result;
}

// The first `count` elements of x, then `rest`.
__device__ __forceinline__ Float8 first8(const Float8& x, int count, float rest) {
    Float8 result;
#pragma unroll
    for (int i = 0; i < 8; i++) result[i] = i < count ? x[i] : rest;
    return result;
}

// 1 at the index, 0 elsewhere (everywhere, if the index is outside).
__device__ __forceinline__ Float8 one_hot8(int index) {
    Float8 result;
#pragma unroll
    for (int i = 0; i < 8; i++) result[i] = i == index ? 1.0f : 0.0f;
    return result;
}

#else  // a CPU: the same with the compiler's vectors

// Float8 crosses no library boundary, so its calling convention without AVX is nobody's concern.
#pragma GCC diagnostic ignored "-Wpsabi"

typedef float Float8 __attribute__((vector_size(32)));
typedef int32_t Int8 __attribute__((vector_size(32)));
typedef uint32_t Uint8 __attribute__((vector_size(32)));
typedef uint16_t Ushort8 __attribute__((vector_size(16)));

inline Float8 set8(float x) { return Float8{x, x, x, x, x, x, x, x}; }

inline Float8 load8(const float* address) {
    ::hostcuda::check_aligned(address, 16);
    Float8 result;
    memcpy(&result, address, sizeof(result));
    return result;
}

inline Float8 load8(const __nv_bfloat16* address) {
    ::hostcuda::check_aligned(address, 16);
    Ushort8 raw;
    memcpy(&raw, address, sizeof(raw));
    return reinterpret_cast<Float8>(__builtin_convertvector(raw, Uint8) << 16);
}

inline void store8(float* address, Float8 x) {
    ::hostcuda::check_aligned(address, 16);
    memcpy(address, &x, sizeof(x));
}

// The bfloat16 bits of floats, given and returned as vectors of uint32_t: to nearest even as the device does; a NaN becomes the device's NaN, 0x7fff.
template <class Bits>
inline Bits bf16_bits(Bits bits) {
    typedef decltype(bits < bits) Signed;  // comparisons of signed numbers, which every CPU has
    const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Bits nan = reinterpret_cast<Bits>(reinterpret_cast<Signed>(bits & 0x7fffffffu) > 0x7f800000);
    return (rounded & ~nan) | (nan & 0x7fffu);
}

inline void store8(__nv_bfloat16* address, Float8 x) {
    ::hostcuda::check_aligned(address, 16);
    const Ushort8 raw = __builtin_convertvector(bf16_bits(reinterpret_cast<Uint8>(x)), Ushort8);
    memcpy(address, &raw, sizeof(raw));
}

// As the device's, whose comment says what it does.
inline void store8_stochastic(__nv_bfloat16* address, Float8 x, uint4 random) {
    ::hostcuda::check_aligned(address, 16);
    Ushort8 noise;
    memcpy(&noise, &random, sizeof(noise));
    // All values stay below 2^31 until the sign is put back, so signed comparisons serve, which every CPU has.
    const Int8 bits = reinterpret_cast<Int8>(x), magnitude = bits & 0x7fffffff;
    const Int8 sum = reinterpret_cast<Int8>(reinterpret_cast<Uint8>(magnitude) + __builtin_convertvector(noise, Uint8));
    const Int8 carried = (sum >= 0x7f800000) & (magnitude < 0x7f800000), nan = magnitude > 0x7f800000;
    Int8 rounded = (carried & 0x7f7f) | (~carried & (sum >> 16));
    rounded = (nan & 0x7fff) | (~nan & (rounded | (reinterpret_cast<Int8>(reinterpret_cast<Uint8>(bits) >> 31) << 15)));
    const Ushort8 raw = __builtin_convertvector(reinterpret_cast<Uint8>(rounded), Ushort8);
    memcpy(address, &raw, sizeof(raw));
}

// a where the mask is all ones, b where it is zero.
inline Float8 select8(Int8 mask, Float8 a, Float8 b) {
    return reinterpret_cast<Float8>((mask & reinterpret_cast<Int8>(a)) | (~mask & reinterpret_cast<Int8>(b)));
}

inline Float8 fma8(Float8 a, Float8 b, Float8 c) {
    Float8 result;
    for (int i = 0; i < 8; i++) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return result;
}

// Like fmaxf: of a number and a NaN, the number.
inline Float8 max8(Float8 a, Float8 b) { return select8((a > b) | (b != b), a, b); }

inline Float8 sqrt8(Float8 x) {
    Float8 result;
    for (int i = 0; i < 8; i++) result[i] = __builtin_sqrtf(x[i]);
    return result;
}

// exp within 2 ulp over the whole range, with infinities, NaN, underflow through the subnormals: x = n ln 2 + r, |r| <= ln(2)/2,
// exp(r) by its Taylor polynomial of degree 7 (remainder r^8/8! < 5.2e-9 of the value, a twelfth of an ulp), then times 2^n in two
// factors, since 2^n alone leaves the float's range at both ends.
inline Float8 exp8(Float8 x) {
    // Beyond these the result is infinity or zero, and n would no longer fit; comparisons leave NaN alone.
    x = select8(x > set8(89.0f), set8(89.0f), x);
    x = select8(x < set8(-105.0f), set8(-105.0f), x);
    const Float8 shifter = set8(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer that sits in the low bits
    const Float8 shifted = fma8(x, set8(1.44269504f), shifter);
    const Int8 n = reinterpret_cast<Int8>(shifted) - reinterpret_cast<Int8>(shifter);
    const Float8 whole = shifted - shifter;
    Float8 r = fma8(whole, set8(-0.693359375f), x);  // ln 2 = 0.693359375 - 2.12194440e-4; the first has 10 bits, so this is exact
    r = fma8(whole, set8(2.12194440e-4f), r);
    Float8 p = set8(1.0f / 5040);
    p = fma8(p, r, set8(1.0f / 720));
    p = fma8(p, r, set8(1.0f / 120));
    p = fma8(p, r, set8(1.0f / 24));
    p = fma8(p, r, set8(1.0f / 6));
    p = fma8(p, r, set8(0.5f));
    p = fma8(p, r * r, r) + 1.0f;
    const Int8 half = n >> 1;
    const Float8 scale_a = reinterpret_cast<Float8>((half + 127) << 23);
    const Float8 scale_b = reinterpret_cast<Float8>((n - half + 127) << 23);
    return p * scale_a * scale_b;
}

inline Float8 first8(Float8 x, int count, float rest) { return select8(Int8{0, 1, 2, 3, 4, 5, 6, 7} < count, x, set8(rest)); }

inline Float8 one_hot8(int index) { return select8(Int8{0, 1, 2, 3, 4, 5, 6, 7} == index, set8(1.0f), set8(0.0f)); }

#endif

__device__ __forceinline__ Float8 zero8() { return set8(0.0f); }

// The tree's order, the same on both devices.
__device__ __forceinline__ float sum8(const Float8& x) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

__device__ __forceinline__ float largest8(const Float8& x) {
    return fmaxf(fmaxf(fmaxf(x[0], x[4]), fmaxf(x[2], x[6])), fmaxf(fmaxf(x[1], x[5]), fmaxf(x[3], x[7])));
}

// ---- reductions --------------------------------------------------------------------------------------------------------------
// All 32 lanes call; all get the result, in every lane the same bits: lanes 16 apart are added first, neighbours last.
// group_sum adds each aligned group of `lanes` lanes, a power of two.
#ifdef __CUDACC__

template <typename T>
__device__ __forceinline__ T group_sum(T x, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

#else  // a CPU: the lanes meet once, the last one does all the additions of the five shuffles in their order

template <typename T>
struct WarpFoldArgs {
    T value;
    int lanes;
};

template <typename T, bool Max>
inline void warp_fold(void** lane_args, unsigned) {
    T values[kWarpSize], next[kWarpSize];
    for (int lane = 0; lane < kWarpSize; lane++) values[lane] = static_cast<WarpFoldArgs<T>*>(lane_args[lane])->value;
    for (int offset = static_cast<WarpFoldArgs<T>*>(lane_args[0])->lanes / 2; offset > 0; offset /= 2) {
        for (int lane = 0; lane < kWarpSize; lane++) {
            const T mine = values[lane], other = values[lane ^ offset];
            if constexpr (Max) {
                next[lane] = fmaxf(mine, other);
            } else {
                next[lane] = mine + other;
            }
        }
        memcpy(values, next, sizeof(values));
    }
    for (int lane = 0; lane < kWarpSize; lane++) static_cast<WarpFoldArgs<T>*>(lane_args[lane])->value = values[lane];
}

template <typename T>
inline T group_sum(T x, int lanes) {
    if (lanes == 1) return x;
    WarpFoldArgs<T> args{x, lanes};
    ::hostcuda::warp_collective(0xffffffffu, &args, warp_fold<T, false>, "group_sum");
    return args.value;
}

template <typename T>
inline T warp_sum(T x) {
    return group_sum(x, kWarpSize);
}

inline float warp_max(float x) {
    WarpFoldArgs<float> args{x, kWarpSize};
    ::hostcuda::warp_collective(0xffffffffu, &args, warp_fold<float, true>, "warp_max");
    return args.value;
}

#endif

// Lanes that take a row together: the smallest power of two that leaves each at most `vectors` vectors, at most a warp. Several vectors a lane
// keep a GPU's loads in flight and let a warp take several rows for the price of one meeting; beyond a dozen, too few warps are left.
inline int row_lanes(int row_length, int vectors) {
    int lanes = 1;
    while (lanes < kWarpSize && lanes * vectors * kVector < row_length) lanes *= 2;
    return lanes;
}

// All threads of a one-dimensional block (a multiple of 32 threads) call; all get the result. Warps are added in their order. Two
// barriers: one before the partials are read, one so that the next call may overwrite them. A block of one warp needs neither.
template <typename T>
__device__ __forceinline__ T block_sum(T x) {
    SHARED(T, partials, 32);
    x = warp_sum(x);
    if (blockDim.x == kWarpSize) return x;
    if (threadIdx.x % kWarpSize == 0) partials[threadIdx.x / kWarpSize] = x;
    __syncthreads();
    T total = partials[0];
    for (unsigned warp = 1; warp < blockDim.x / kWarpSize; warp++) total += partials[warp];
    __syncthreads();
    return total;
}

__device__ __forceinline__ float block_max(float x) {
    SHARED(float, partials, 32);
    x = warp_max(x);
    if (blockDim.x == kWarpSize) return x;
    if (threadIdx.x % kWarpSize == 0) partials[threadIdx.x / kWarpSize] = x;
    __syncthreads();
    float largest = partials[0];
    for (unsigned warp = 1; warp < blockDim.x / kWarpSize; warp++) largest = fmaxf(largest, partials[warp]);
    __syncthreads();
    return largest;
}
