// Initial values and copies of flat buffers as long as a layer's parameters.
#include "dev/cuda/bench.cuh"
#include "llmc/init.cuh"

namespace init_bench {

// Philox4x32-10 from its paper, one counter at a time.
void philox_reference(uint64_t key, uint32_t (&counter)[4]) {
    uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; round++, low += 0x9E3779B9u, high += 0xBB67AE85u) {
        const uint64_t a = uint64_t{0xD2511F53u} * counter[0], b = uint64_t{0xCD9E8D57u} * counter[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ low, static_cast<uint32_t>(b), static_cast<uint32_t>(a >> 32) ^ counter[3] ^ high,
                                  static_cast<uint32_t>(a)};
        std::copy_n(next, 4, counter);
    }
}

void normal(bench::Case& c, size_t n) {
    const uint64_t seed = 0x123456789ABCDEFull;
    const uint32_t parameter = 7;
    const float std = 0.02f;
    const auto p = c.output<floatX>("p", n);
    c.run([&](cudaStream_t stream) { init_normal(p.get(), n, seed, parameter, std, stream); });
    for (const size_t i : bench::sample(n, 256)) {
        // Four elements a draw; two words make two of them (Box-Muller).
        const uint64_t draw = i / 4;
        uint32_t words[4] = {static_cast<uint32_t>(draw), static_cast<uint32_t>(draw >> 32), parameter, 2u << 28};
        philox_reference(seed, words);
        const uint32_t* const pair = words + i % 4 / 2 * 2;
        const double u = ((pair[0] >> 8) + 1.0) * 0x1p-24, angle = 2 * M_PI * (pair[1] >> 8) * 0x1p-24, radius = std::sqrt(-2 * std::log(u));
        const double z = radius * (i % 2 == 0 ? std::cos(angle) : std::sin(angle));
        // The radius is within 4 roundoffs of the logarithm, halved, and the root's; the angle rounds three times (2 pi, the factor, the product), cosine and sine
        // are within 4; two more products.
        const double error = radius * kRoundoff32 * (3 * angle + 4 + 3 + 2) * std;
        c.expect("p", i, p.at(i), z * std, bench::stored<floatX>(z * std, error));
    }
    // Philox is integer work, not counted: logarithm, root, cosine or sine and product, a pair each.
    c.time(bench::bytes(p), 6.0 * n);
}

void constant(bench::Case& c, size_t n) {
    const auto p = c.output<floatX>("p", n);
    c.run([&](cudaStream_t stream) { fill(p.get(), n, 1.5f, stream); });
    for (const size_t i : bench::sample(n, 256)) c.expect("p", i, p.at(i), 1.5, 0);
    c.time(bench::bytes(p), 0);
}

void copy(bench::Case& c, size_t n) {
    const auto in = c.normal<floatX>(n);
    const auto out = c.output<float>("out", n);
    c.run([&](cudaStream_t stream) { copy_to_float(out, in.get(), n, stream); });
    for (const size_t i : bench::sample(n, 256)) c.expect("out", i, out.at(i), in.at(i), 0);
    c.time(bench::bytes(in, out), 0);
}

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const size_t n = bench::layer_parameters(model);
        bench::add(format("init_normal/n=%zu", n), [=](bench::Case& c) { normal(c, n); });
        bench::add(format("fill/n=%zu", n), [=](bench::Case& c) { constant(c, n); });
        bench::add(format("copy_to_float/n=%zu", n), [=](bench::Case& c) { copy(c, n); });
    }
});

}  // namespace init_bench
