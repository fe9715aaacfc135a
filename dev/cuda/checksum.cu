// Checksums of a layer's parameters, in the storage type and in fp32.
#include "dev/cuda/bench.cuh"
#include "llmc/checksum.cuh"

namespace checksum_bench {

uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

template <typename T>
void bits(bench::Case& c, size_t n) {
    const auto x = c.normal<T>(n);
    const auto out = c.output<unsigned long long>("out", 1);
    c.run([&](cudaStream_t stream) { checksum(out, x.get(), n, stream); });
    const std::vector<T> values = x.download();
    uint64_t want = 0, halves[2];
    for (size_t piece = 0; piece < x.bytes() / sizeof(halves); piece++) {
        memcpy(halves, reinterpret_cast<const unsigned char*>(values.data()) + piece * sizeof(halves), sizeof(halves));
        want += mix(mix((piece + 1) * 0x9E3779B97F4A7C15u + halves[0]) + halves[1]);
    }
    // A double does not hold all bits of either: exactly, or not.
    const unsigned long long got = out.download()[0];
    if (got != want) c.fail_check(format("out[0] is %016llx, expected %016llx", got, static_cast<unsigned long long>(want)));
    c.time(bench::bytes(x, out), 0);
}

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const size_t n = bench::layer_parameters(model);
        bench::add(format("checksum/n=%zu", n), [=](bench::Case& c) { bits<floatX>(c, n); });
        if (!std::is_same_v<floatX, float>) bench::add(format("checksum_fp32/n=%zu", n), [=](bench::Case& c) { bits<float>(c, n); });
    }
});

}  // namespace checksum_bench
