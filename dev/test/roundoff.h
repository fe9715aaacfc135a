// Rounding of the storage types, for the bounds of tests and benchmarks.
#pragma once

#include <cmath>
#include <type_traits>

// Half the distance from 1 to the next number: the largest relative error of rounding to nearest. Stochastic rounding may be off by twice that.
template <typename T>
inline constexpr double kRoundoff = std::is_same_v<T, float> ? 0x1p-24 : 0x1p-8;
inline constexpr double kRoundoff32 = 0x1p-24;
// Half the distance of subnormal numbers, the largest absolute error below the normal ones.
template <typename T>
inline constexpr double kTiny = std::is_same_v<T, float> ? 0x1p-150 : 0x1p-134;

// Bound of the error of `value`, a sum of `terms` products whose magnitudes add up to `size`.
// A sum of n exact products in fp32, in any order: n - 1 additions, each off by at most u of a partial sum, which is at most the sum of magnitudes
// (1 + n u); fp32 products round too: n u sum in all, and n + 2 covers the second order for the n here. A bias adds one more term. Then one rounding
// to the stored type, and half a subnormal step.
template <typename Out>
inline double product_bound(double value, double size, int terms) {
    const double sum_error = (terms + 2) * kRoundoff32 * size;
    return sum_error + kRoundoff<Out> * (std::abs(value) + sum_error) + kTiny<Out>;
}
