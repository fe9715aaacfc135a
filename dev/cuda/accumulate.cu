// Gradient accumulation in the storage type (stochastically rounded in bf16), and in fp32 with addends of either type, over a layer's gradients.
#include "dev/cuda/bench.cuh"
#include "llmc/accumulate.cuh"

namespace accumulate_bench {

template <typename Acc, typename Addend>
void accumulate(bench::Case& c, size_t n) {
    const auto acc = c.normal<Acc>(n);
    const auto addend = c.normal<Addend>(n);
    StepState host = {};
    host.seed = 3, host.step = 4;
    const auto state = c.upload(std::vector<StepState>{host});
    const std::vector<size_t> indices = bench::sample(n, 512);
    std::vector<double> before;
    for (const size_t i : indices) before.push_back(acc.at(i));
    c.run([&](cudaStream_t stream) { accumulate_gradient(acc.get(), addend.get(), n, 0, 1, state, stream); });
    // The fp32 sum rounds to nearest; stochastic rounding then goes to one of both neighbours, up to two roundoffs away.
    const double relative = kRoundoff32 + (std::is_same_v<Acc, float> ? 0 : 2 * kRoundoff<Acc>);
    for (size_t index = 0; index < indices.size(); index++) {
        const size_t i = indices[index];
        const double want = before[index] + addend.at(i);
        c.expect("acc", i, acc.at(i), want, relative * std::abs(want) + 2 * kTiny<Acc>);
    }
    c.time(2 * bench::bytes(acc) + bench::bytes(addend), 1.0 * n);
}

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const size_t n = bench::layer_parameters(model);
        bench::add(format("accumulate_gradient/n=%zu", n), [=](bench::Case& c) { accumulate<floatX, floatX>(c, n); });
        if (std::is_same_v<floatX, float>) continue;
        bench::add(format("accumulate_gradient_fp32/n=%zu", n), [=](bench::Case& c) { accumulate<float, floatX>(c, n); });
        bench::add(format("accumulate_gradient_fp32_addend/n=%zu", n), [=](bench::Case& c) { accumulate<float, float>(c, n); });
    }
});

}  // namespace accumulate_bench
