// A 64-bit checksum of a buffer's bits, to tell whether the ranks' copies of the weights are the same.
//
// checksum: *out (=) sum over the 16-byte pieces p of x, modulo 2^64, of mix(mix((p + 1) * golden + low half of p) + high half of p); 0 for no piece.
//
// mix is one to one, so a change within one half of one piece always changes the sum; any other change goes unseen with a probability of about 2^-64. The
// position is part of what is mixed, so pieces in another order, or zeros behind the end, are another sum. Bits count, not numbers: +0 and -0 differ, and so
// do two NaN. Whole numbers add up alike in any order, so the result depends on neither the device nor the number of threads.
// Reads 2 (bf16) or 4 (fp32) bytes an element.
#pragma once

#include "llmc/device.cuh"

// A warp takes a chunk of 32 KiB, so that its one warp sum and one atomic addition cost little, on a CPU too.
inline constexpr size_t kChecksumPieceBytes = 16;
inline constexpr int kChecksumLoads = 8;                  // in flight, a lane
inline constexpr size_t kChecksumChunk = 64 * kWarpSize;  // pieces of a warp
inline constexpr int kChecksumWarps = 4;

// The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), with Stafford's constants; golden is its increment.
inline constexpr unsigned long long kChecksumGolden = 0x9E3779B97F4A7C15ull;

__device__ __forceinline__ unsigned long long checksum_mix(unsigned long long x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

__global__ void __launch_bounds__(kChecksumWarps* kWarpSize) checksum_kernel(unsigned long long* out, const unsigned char* bytes, size_t num_pieces) {
    const size_t chunk = static_cast<size_t>(blockIdx.x) * kChecksumWarps + threadIdx.x / kWarpSize;
    if (chunk * kChecksumChunk >= num_pieces) return;  // the whole warp
    const size_t end = chunk * kChecksumChunk + kChecksumChunk < num_pieces ? chunk * kChecksumChunk + kChecksumChunk : num_pieces;
    unsigned long long sum = 0;
    for (size_t first = chunk * kChecksumChunk + threadIdx.x % kWarpSize; first < end; first += kChecksumLoads * kWarpSize) {
        unsigned long long halves[kChecksumLoads][2];
        UNROLL
        for (int j = 0; j < kChecksumLoads; j++) {
            const size_t piece = first + j * kWarpSize;
            if (piece < end) memcpy(halves[j], __builtin_assume_aligned(bytes + piece * kChecksumPieceBytes, kChecksumPieceBytes), kChecksumPieceBytes);
        }
        // Branches, not selects: without them nvcc moves each load down to its use, and one or two are in flight instead of eight.
        UNROLL
        for (int j = 0; j < kChecksumLoads; j++) {
            const size_t piece = first + j * kWarpSize;
            if (piece < end) sum += checksum_mix(checksum_mix((piece + 1) * kChecksumGolden + halves[j][0]) + halves[j][1]);
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % kWarpSize == 0) atomicAdd(out, sum);
}

// *out = the checksum of x (count).
template <typename T>
inline void checksum(unsigned long long* out, const T* x, size_t count, cudaStream_t stream) {
    NvtxRange range(__func__);
    static_assert(kVector * sizeof(T) % kChecksumPieceBytes == 0, "checksum: a vector of eight elements must be whole 16-byte pieces");
    CHECK(count % kVector == 0, "checksum: %zu elements, not a multiple of %d", count, kVector);
    CHECK(reinterpret_cast<uintptr_t>(x) % kChecksumPieceBytes == 0, "checksum: address %p is not a multiple of %zu", static_cast<const void*>(x), kChecksumPieceBytes);
    CUDA_CHECK(cudaMemsetAsync(out, 0, sizeof(*out), stream));
    if (count == 0) return;
    const size_t num_pieces = count * sizeof(T) / kChecksumPieceBytes;
    launch(checksum_kernel, grid_for(num_pieces, kChecksumWarps * kChecksumChunk), kChecksumWarps * kWarpSize, 0, stream, out,
           reinterpret_cast<const unsigned char*>(x), num_pieces);
}
