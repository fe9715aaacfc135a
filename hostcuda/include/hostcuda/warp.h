// Warp collectives: shuffles, votes, reductions, matches. Each is one meeting of the lanes named in its mask.
#pragma once
#include "hostcuda/execution.h"

namespace hostcuda {

HOSTCUDA_UNCHECKED inline unsigned lane_index() { return block_progress.thread & 31u; }

// ---- shuffles ------------------------------------------------------------------------------------------------------------------
template <class T>
struct ShuffleArgs {
    T value;
    T result;
    unsigned source;
};

// Named, so that a stop can say which shuffle it was.
struct ShuffleName { static constexpr const char* value = "__shfl_sync"; };
struct ShuffleUpName { static constexpr const char* value = "__shfl_up_sync"; };
struct ShuffleDownName { static constexpr const char* value = "__shfl_down_sync"; };
struct ShuffleXorName { static constexpr const char* value = "__shfl_xor_sync"; };

template <class T, class Name>
void compute_shuffle(void** lane_args, unsigned mask) {
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
        auto& args = *static_cast<ShuffleArgs<T>*>(lane_args[lane]);
        if (__builtin_expect((mask >> args.source & 1u) == 0, 0)) stop_missing_source(Name::value, mask, lane, args.source);
        args.result = static_cast<ShuffleArgs<T>*>(lane_args[args.source])->value;
    }
}

template <class Name, class T>
inline T shuffle(unsigned mask, T value, unsigned source) {
    ShuffleArgs<T> args{value, value, source};
    warp_collective(mask, &args, compute_shuffle<T, Name>, Name::value);
    return args.result;
}

// The lane read from, in PTX's words (shfl.sync): lanes are grouped in segments of `width`, a power of two; only five bits of the
// argument count; who would read outside its segment gets its own value. `xor` may read from an earlier segment.
inline unsigned shuffle_source_index(unsigned lane, unsigned argument, unsigned width) { return (lane & ~(width - 1)) | (argument & (width - 1)); }
inline unsigned shuffle_source_up(unsigned lane, unsigned argument, unsigned width) {
    argument &= 31u;
    return (lane & (width - 1)) >= argument ? lane - argument : lane;
}
inline unsigned shuffle_source_down(unsigned lane, unsigned argument, unsigned width) {
    argument &= 31u;
    return (lane & (width - 1)) + argument < width ? lane + argument : lane;
}
inline unsigned shuffle_source_xor(unsigned lane, unsigned argument, unsigned width) {
    const unsigned source = lane ^ (argument & 31u);
    return source <= (lane | (width - 1)) ? source : lane;
}

// ---- votes and reductions ------------------------------------------------------------------------------------------------------
// Every lane brings a value and gets the same result: Combine folds the values in lane order.
template <class T>
struct FoldArgs {
    T value;
    T result;
};

template <class T, class Combine>
void compute_fold(void** lane_args, unsigned mask) {
    unsigned rest = mask;
    T result = Combine::first(static_cast<FoldArgs<T>*>(lane_args[__builtin_ctz(rest)])->value, static_cast<unsigned>(__builtin_ctz(rest)));
    for (rest &= rest - 1; rest != 0; rest &= rest - 1) {
        const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
        result = Combine::next(result, static_cast<FoldArgs<T>*>(lane_args[lane])->value, lane);
    }
    for (rest = mask; rest != 0; rest &= rest - 1) static_cast<FoldArgs<T>*>(lane_args[__builtin_ctz(rest)])->result = result;
}

template <class Combine, class T>
inline T fold(unsigned mask, T value, const char* name) {
    FoldArgs<T> args{value, value};
    warp_collective(mask, &args, compute_fold<T, Combine>, name);
    return args.result;
}

struct Ballot {
    static unsigned first(unsigned value, unsigned lane) { return (value != 0) << lane; }
    static unsigned next(unsigned result, unsigned value, unsigned lane) { return result | (value != 0) << lane; }
};
#define HOSTCUDA_FOLD(Name, expression)                              \
    struct Name {                                                    \
        template <class T> static T first(T b, unsigned) { return b; } \
        template <class T> static T next(T a, T b, unsigned) { return expression; } \
    };
HOSTCUDA_FOLD(FoldAdd, static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b)))
HOSTCUDA_FOLD(FoldMin, b < a ? b : a)
HOSTCUDA_FOLD(FoldMax, a < b ? b : a)
HOSTCUDA_FOLD(FoldAnd, a & b)
HOSTCUDA_FOLD(FoldOr, a | b)
HOSTCUDA_FOLD(FoldXor, a ^ b)
#undef HOSTCUDA_FOLD

inline void compute_nothing(void**, unsigned) {}

template <class T>
struct MatchArgs {
    T value;
    unsigned result;
};

template <class T>
void compute_match(void** lane_args, unsigned mask) {
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        auto& args = *static_cast<MatchArgs<T>*>(lane_args[__builtin_ctz(rest)]);
        args.result = 0;
        for (unsigned others = mask; others != 0; others &= others - 1) {
            const unsigned lane = static_cast<unsigned>(__builtin_ctz(others));
            args.result |= static_cast<unsigned>(static_cast<MatchArgs<T>*>(lane_args[lane])->value == args.value) << lane;
        }
    }
}

}  // namespace hostcuda

#define HOSTCUDA_SHUFFLES(T)                                                                                                  \
    inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {                                                \
        return hostcuda::shuffle<hostcuda::ShuffleName>(                                                                      \
            mask, value, hostcuda::shuffle_source_index(hostcuda::lane_index(), static_cast<unsigned>(source), static_cast<unsigned>(width))); \
    }                                                                                                                         \
    inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {                                         \
        return hostcuda::shuffle<hostcuda::ShuffleUpName>(                                                                    \
            mask, value, hostcuda::shuffle_source_up(hostcuda::lane_index(), delta, static_cast<unsigned>(width)));           \
    }                                                                                                                         \
    inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {                                       \
        return hostcuda::shuffle<hostcuda::ShuffleDownName>(                                                                  \
            mask, value, hostcuda::shuffle_source_down(hostcuda::lane_index(), delta, static_cast<unsigned>(width)));         \
    }                                                                                                                         \
    inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {                                         \
        return hostcuda::shuffle<hostcuda::ShuffleXorName>(                                                                   \
            mask, value, hostcuda::shuffle_source_xor(hostcuda::lane_index(), static_cast<unsigned>(lane_mask), static_cast<unsigned>(width))); \
    }
HOSTCUDA_SHUFFLES(int)
HOSTCUDA_SHUFFLES(unsigned int)
HOSTCUDA_SHUFFLES(long)
HOSTCUDA_SHUFFLES(unsigned long)
HOSTCUDA_SHUFFLES(long long)
HOSTCUDA_SHUFFLES(unsigned long long)
HOSTCUDA_SHUFFLES(float)
HOSTCUDA_SHUFFLES(double)

inline void __syncwarp(unsigned mask = 0xffffffffu) { hostcuda::warp_collective(mask, nullptr, hostcuda::compute_nothing, "__syncwarp"); }

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return hostcuda::fold<hostcuda::Ballot>(mask, static_cast<unsigned>(predicate), "__ballot_sync");
}
inline int __any_sync(unsigned mask, int predicate) {
    return static_cast<int>(hostcuda::fold<hostcuda::FoldOr>(mask, static_cast<unsigned>(predicate != 0), "__any_sync"));
}
inline int __all_sync(unsigned mask, int predicate) {
    return static_cast<int>(hostcuda::fold<hostcuda::FoldAnd>(mask, static_cast<unsigned>(predicate != 0), "__all_sync"));
}

#define HOSTCUDA_REDUCE(name, Fold, T) \
    inline T name(unsigned mask, T value) { return hostcuda::fold<hostcuda::Fold>(mask, value, #name); }
HOSTCUDA_REDUCE(__reduce_add_sync, FoldAdd, int)
HOSTCUDA_REDUCE(__reduce_add_sync, FoldAdd, unsigned)
HOSTCUDA_REDUCE(__reduce_min_sync, FoldMin, int)
HOSTCUDA_REDUCE(__reduce_min_sync, FoldMin, unsigned)
HOSTCUDA_REDUCE(__reduce_max_sync, FoldMax, int)
HOSTCUDA_REDUCE(__reduce_max_sync, FoldMax, unsigned)
HOSTCUDA_REDUCE(__reduce_and_sync, FoldAnd, unsigned)
HOSTCUDA_REDUCE(__reduce_or_sync, FoldOr, unsigned)
HOSTCUDA_REDUCE(__reduce_xor_sync, FoldXor, unsigned)
#undef HOSTCUDA_REDUCE

template <class T>
inline unsigned __match_any_sync(unsigned mask, T value) {
    hostcuda::MatchArgs<T> args{value, 0};
    hostcuda::warp_collective(mask, &args, hostcuda::compute_match<T>, "__match_any_sync");
    return args.result;
}

// Lanes that have not returned. On a GPU it is those that happen to run together; nothing may depend on more.
inline unsigned __activemask() { return hostcuda::active_lanes(); }
