// CUDA's arithmetic intrinsics. The approximate ones (__expf, __fdividef, ...) are exact here to the host library's rounding, so they
// are within the error CUDA documents, not equal to it.
#pragma once
#include "hostcuda/types.h"

// ---- bits ----------------------------------------------------------------------------------------------------------------------
namespace hostcuda {
template <class To, class From>
__forceinline__ To bit_copy(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof(result));
    return result;
}
}  // namespace hostcuda

__forceinline__ unsigned __float_as_uint(float x) { return hostcuda::bit_copy<unsigned>(x); }
__forceinline__ int __float_as_int(float x) { return hostcuda::bit_copy<int>(x); }
__forceinline__ float __uint_as_float(unsigned x) { return hostcuda::bit_copy<float>(x); }
__forceinline__ float __int_as_float(int x) { return hostcuda::bit_copy<float>(x); }
__forceinline__ long long __double_as_longlong(double x) { return hostcuda::bit_copy<long long>(x); }
__forceinline__ double __longlong_as_double(long long x) { return hostcuda::bit_copy<double>(x); }

// ---- integers ------------------------------------------------------------------------------------------------------------------
__forceinline__ unsigned __umulhi(unsigned a, unsigned b) { return (static_cast<unsigned long long>(a) * b) >> 32; }
__forceinline__ int __mulhi(int a, int b) { return static_cast<int>((static_cast<long long>(a) * b) >> 32); }
__forceinline__ unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
__forceinline__ int __popc(unsigned x) { return __builtin_popcount(x); }
__forceinline__ int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
__forceinline__ int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
__forceinline__ int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
__forceinline__ int __ffs(int x) { return __builtin_ffs(x); }
__forceinline__ int __ffsll(long long x) { return __builtin_ffsll(x); }
__forceinline__ unsigned __brev(unsigned x) {
    x = ((x >> 1) & 0x55555555u) | ((x & 0x55555555u) << 1);
    x = ((x >> 2) & 0x33333333u) | ((x & 0x33333333u) << 2);
    x = ((x >> 4) & 0x0f0f0f0fu) | ((x & 0x0f0f0f0fu) << 4);
    return __builtin_bswap32(x);
}
__forceinline__ unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>(((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31)) >> 32);
}
__forceinline__ unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}

#define HOSTCUDA_MIN_MAX(T)                                             \
    __forceinline__ constexpr T min(T a, T b) { return b < a ? b : a; } \
    __forceinline__ constexpr T max(T a, T b) { return a < b ? b : a; }
HOSTCUDA_MIN_MAX(int)
HOSTCUDA_MIN_MAX(unsigned int)
HOSTCUDA_MIN_MAX(long)
HOSTCUDA_MIN_MAX(unsigned long)
HOSTCUDA_MIN_MAX(long long)
HOSTCUDA_MIN_MAX(unsigned long long)
#undef HOSTCUDA_MIN_MAX
__forceinline__ float min(float a, float b) { return fminf(a, b); }
__forceinline__ float max(float a, float b) { return fmaxf(a, b); }
__forceinline__ double min(double a, double b) { return fmin(a, b); }
__forceinline__ double max(double a, double b) { return fmax(a, b); }

// ---- floating point ------------------------------------------------------------------------------------------------------------
__forceinline__ float rsqrtf(float x) { return 1.0f / sqrtf(x); }
__forceinline__ double rsqrt(double x) { return 1.0 / sqrt(x); }
__forceinline__ float __expf(float x) { return expf(x); }
__forceinline__ float __exp10f(float x) { return powf(10.0f, x); }
__forceinline__ float __logf(float x) { return logf(x); }
__forceinline__ float __log2f(float x) { return log2f(x); }
__forceinline__ float __log10f(float x) { return log10f(x); }
__forceinline__ float __sinf(float x) { return sinf(x); }
__forceinline__ float __cosf(float x) { return cosf(x); }
__forceinline__ float __tanf(float x) { return tanf(x); }
__forceinline__ void __sincosf(float x, float* sine, float* cosine) {
    *sine = sinf(x);
    *cosine = cosf(x);
}
__forceinline__ float __powf(float x, float y) { return powf(x, y); }
__forceinline__ float __fdividef(float a, float b) { return a / b; }
__forceinline__ float __fadd_rn(float a, float b) { return a + b; }
__forceinline__ float __fsub_rn(float a, float b) { return a - b; }
__forceinline__ float __fmul_rn(float a, float b) { return a * b; }
__forceinline__ float __fdiv_rn(float a, float b) { return a / b; }
__forceinline__ float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__forceinline__ float __frcp_rn(float x) { return 1.0f / x; }
__forceinline__ float __fsqrt_rn(float x) { return sqrtf(x); }
__forceinline__ float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
__forceinline__ double __dadd_rn(double a, double b) { return a + b; }
__forceinline__ double __dmul_rn(double a, double b) { return a * b; }
__forceinline__ double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
__forceinline__ float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN becomes 0, as on the device
__forceinline__ int __float2int_rn(float x) { return static_cast<int>(lrintf(x)); }
__forceinline__ int __float2int_rz(float x) { return static_cast<int>(x); }
__forceinline__ int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
__forceinline__ int __float2int_ru(float x) { return static_cast<int>(ceilf(x)); }
__forceinline__ unsigned __float2uint_rz(float x) { return static_cast<unsigned>(x); }
__forceinline__ float __int2float_rn(int x) { return static_cast<float>(x); }
__forceinline__ float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
__forceinline__ float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
__forceinline__ double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }

// ---- cache hints: plain loads and stores ---------------------------------------------------------------------------------------
#define HOSTCUDA_LOAD(name) \
    template <class T>      \
    __forceinline__ T name(const T* address) { return *address; }
HOSTCUDA_LOAD(__ldg)
HOSTCUDA_LOAD(__ldca)
HOSTCUDA_LOAD(__ldcg)
HOSTCUDA_LOAD(__ldcs)
HOSTCUDA_LOAD(__ldlu)
HOSTCUDA_LOAD(__ldcv)
#undef HOSTCUDA_LOAD
#define HOSTCUDA_STORE(name) \
    template <class T>       \
    __forceinline__ void name(T* address, T value) { *address = value; }
HOSTCUDA_STORE(__stwb)
HOSTCUDA_STORE(__stcg)
HOSTCUDA_STORE(__stcs)
HOSTCUDA_STORE(__stwt)
#undef HOSTCUDA_STORE
