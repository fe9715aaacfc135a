// Sums of squares of a layer's gradients, in the storage type and in fp32.
#include "dev/cuda/bench.cuh"
#include "llmc/global_norm.cuh"

namespace global_norm_bench {

template <typename T>
void squares(bench::Case& c, size_t n) {
    const auto x = c.normal<T>(n);
    const auto partials = c.output<double>("partials", sum_of_squares_count(n));
    c.run([&](cudaStream_t stream) { sum_of_squares(partials.get(), x.get(), n, stream); });
    // Partial i is of elements i * kNormChunk on: that is the interface, how many threads add them is not.
    for (const size_t chunk : bench::sample(partials.count(), 16)) {
        double want = 0;
        for (const double value : x.fetch(chunk * kNormChunk, std::min(kNormChunk, n - chunk * kNormChunk))) want += value * value;
        // In fp32 for eight fused additions and three over the vector; the rest is double.
        c.expect("partials", chunk, partials.at(chunk), want, (11 * kRoundoff32 + 1e-12) * want);
    }
    c.time(bench::bytes(x, partials), 2.0 * n);
}

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const size_t n = bench::layer_parameters(model);
        bench::add(format("sum_of_squares/n=%zu", n), [=](bench::Case& c) { squares<floatX>(c, n); });
        if (!std::is_same_v<floatX, float>) bench::add(format("sum_of_squares_fp32/n=%zu", n), [=](bench::Case& c) { squares<float>(c, n); });
    }
});

}  // namespace global_norm_bench
