// Rounding of the storage types, for the bounds of tests and benchmarks.
#pragma once

#include <type_traits>

// Half the distance from 1 to the next number: the largest relative error of rounding to nearest. Stochastic rounding may be off by twice that.
template <typename T>
inline constexpr double kRoundoff = std::is_same_v<T, float> ? 0x1p-24 : 0x1p-8;
inline constexpr double kRoundoff32 = 0x1p-24;
// Half the distance of subnormal numbers, the largest absolute error below the normal ones.
template <typename T>
inline constexpr double kTiny = std::is_same_v<T, float> ? 0x1p-150 : 0x1p-134;
