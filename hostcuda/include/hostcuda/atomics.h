// Integer atomics. There are none for floating point: their order, and so their result, would change from run to run.
#pragma once
#include "hostcuda/types.h"

#define HOSTCUDA_ATOMICS(T)                                                                                                   \
    inline T atomicAdd(T* address, T value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }                  \
    inline T atomicSub(T* address, T value) { return __atomic_fetch_sub(address, value, __ATOMIC_RELAXED); }                  \
    inline T atomicExch(T* address, T value) { return __atomic_exchange_n(address, value, __ATOMIC_RELAXED); }                \
    inline T atomicAnd(T* address, T value) { return __atomic_fetch_and(address, value, __ATOMIC_RELAXED); }                  \
    inline T atomicOr(T* address, T value) { return __atomic_fetch_or(address, value, __ATOMIC_RELAXED); }                    \
    inline T atomicXor(T* address, T value) { return __atomic_fetch_xor(address, value, __ATOMIC_RELAXED); }                  \
    inline T atomicCAS(T* address, T compare, T value) {                                                                      \
        __atomic_compare_exchange_n(address, &compare, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                     \
        return compare;                                                                                                       \
    }                                                                                                                         \
    inline T atomicMax(T* address, T value) {                                                                                 \
        T old = __atomic_load_n(address, __ATOMIC_RELAXED);                                                                   \
        while (old < value && !__atomic_compare_exchange_n(address, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
        }                                                                                                                     \
        return old;                                                                                                           \
    }                                                                                                                         \
    inline T atomicMin(T* address, T value) {                                                                                 \
        T old = __atomic_load_n(address, __ATOMIC_RELAXED);                                                                   \
        while (value < old && !__atomic_compare_exchange_n(address, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
        }                                                                                                                     \
        return old;                                                                                                           \
    }
HOSTCUDA_ATOMICS(int)
HOSTCUDA_ATOMICS(unsigned int)
HOSTCUDA_ATOMICS(unsigned long long)
#undef HOSTCUDA_ATOMICS
