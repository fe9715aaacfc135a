// bfloat16: the upper half of a float, with CUDA's names and CUDA's rounding (to nearest even; any NaN becomes 0x7fff).
// Everything is branch-free, so that loops over it vectorise.
#pragma once
#include "hostcuda/device_math.h"

struct alignas(2) __nv_bfloat16_raw {
    unsigned short x;
};

struct alignas(2) __nv_bfloat16 {
    unsigned short __x;

    __nv_bfloat16() = default;
    __forceinline__ __nv_bfloat16(__nv_bfloat16_raw raw) : __x(raw.x) {}
    __forceinline__ __nv_bfloat16(float value) : __x(round(value)) {}
    __forceinline__ __nv_bfloat16(double value) : __x(round_double(value)) {}
    __forceinline__ __nv_bfloat16(int value) : __x(round_double(value)) {}
    __forceinline__ __nv_bfloat16(unsigned value) : __x(round_double(value)) {}
    __forceinline__ operator float() const { return __uint_as_float(static_cast<unsigned>(__x) << 16); }
    __forceinline__ operator __nv_bfloat16_raw() const { return __nv_bfloat16_raw{__x}; }

    static __forceinline__ unsigned short round(float value) {
        const unsigned bits = __float_as_uint(value);
        const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        return static_cast<unsigned short>(is_nan ? 0x7fffu : rounded);
    }
    // Rounding twice, to float and then to bfloat16, could land on the wrong side of a tie; round to odd in between.
    static __forceinline__ unsigned short round_double(double value) {
        float nearest = static_cast<float>(value);
        unsigned bits = __float_as_uint(nearest);
        const double back = static_cast<double>(nearest);
        if (back != value && value == value) {
            const bool too_far = (back > value) == (value > 0.0) && back != 0.0;  // away from zero: step back, then make odd
            bits = (too_far ? bits - 1 : bits) | 1u;
            if (back == 0.0) bits = (value < 0.0 ? 0x80000000u : 0u) | 1u;
            nearest = __uint_as_float(bits);
        }
        return round(nearest);
    }
};
typedef __nv_bfloat16 nv_bfloat16;
static_assert(sizeof(__nv_bfloat16) == 2);

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __forceinline__ __nv_bfloat162(__nv_bfloat16 x_, __nv_bfloat16 y_) : x(x_), y(y_) {}
};
typedef __nv_bfloat162 nv_bfloat162;

// ---- conversions ---------------------------------------------------------------------------------------------------------------
__forceinline__ __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
__forceinline__ __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
__forceinline__ __nv_bfloat16 __double2bfloat16(double value) { return __nv_bfloat16(value); }
__forceinline__ float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }
__forceinline__ __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16(__nv_bfloat16_raw{bits}); }
__forceinline__ __nv_bfloat16 __short_as_bfloat16(short bits) { return __ushort_as_bfloat16(static_cast<unsigned short>(bits)); }
__forceinline__ unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.__x; }
__forceinline__ short __bfloat16_as_short(__nv_bfloat16 value) { return static_cast<short>(value.__x); }
// Toward zero: the upper half as it is.
__forceinline__ __nv_bfloat16 __float2bfloat16_rz(float value) {
    return value != value ? __ushort_as_bfloat16(0x7fff) : __ushort_as_bfloat16(static_cast<unsigned short>(__float_as_uint(value) >> 16));
}

__forceinline__ __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return __nv_bfloat162(__nv_bfloat16(x), __nv_bfloat16(y)); }
__forceinline__ __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
__forceinline__ __nv_bfloat162 __float2bfloat162_rn(float v) { return __floats2bfloat162_rn(v, v); }
__forceinline__ __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 v) { return __nv_bfloat162(v, v); }
__forceinline__ __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
__forceinline__ float2 __bfloat1622float2(__nv_bfloat162 v) { return make_float2(v.x, v.y); }
__forceinline__ __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
__forceinline__ __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
__forceinline__ float __low2float(__nv_bfloat162 v) { return v.x; }
__forceinline__ float __high2float(__nv_bfloat162 v) { return v.y; }

// ---- arithmetic: in float, rounded once, which is what the device's instructions give ------------------------------------------
__forceinline__ __nv_bfloat16 __hadd(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat16(float(a) + float(b)); }
__forceinline__ __nv_bfloat16 __hsub(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat16(float(a) - float(b)); }
__forceinline__ __nv_bfloat16 __hmul(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat16(float(a) * float(b)); }
__forceinline__ __nv_bfloat16 __hdiv(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat16(float(a) / float(b)); }
__forceinline__ __nv_bfloat16 __hneg(__nv_bfloat16 a) { return __ushort_as_bfloat16(a.__x ^ 0x8000u); }
__forceinline__ __nv_bfloat16 __habs(__nv_bfloat16 a) { return __ushort_as_bfloat16(a.__x & 0x7fffu); }
__forceinline__ __nv_bfloat16 __hmax(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat16(fmaxf(float(a), float(b))); }
__forceinline__ __nv_bfloat16 __hmin(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat16(fminf(float(a), float(b))); }
__forceinline__ bool __hisnan(__nv_bfloat16 a) { return (a.__x & 0x7fffu) > 0x7f80u; }
__forceinline__ __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return __nv_bfloat162(__hadd(a.x, b.x), __hadd(a.y, b.y)); }
__forceinline__ __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return __nv_bfloat162(__hmul(a.x, b.x), __hmul(a.y, b.y)); }

__forceinline__ __nv_bfloat16 operator+(__nv_bfloat16 a, __nv_bfloat16 b) { return __hadd(a, b); }
__forceinline__ __nv_bfloat16 operator-(__nv_bfloat16 a, __nv_bfloat16 b) { return __hsub(a, b); }
__forceinline__ __nv_bfloat16 operator*(__nv_bfloat16 a, __nv_bfloat16 b) { return __hmul(a, b); }
__forceinline__ __nv_bfloat16 operator/(__nv_bfloat16 a, __nv_bfloat16 b) { return __hdiv(a, b); }
__forceinline__ __nv_bfloat16 operator-(__nv_bfloat16 a) { return __hneg(a); }
