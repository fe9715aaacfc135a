// The small kernels of a step: valid targets, their inverse, and the decision about the update. What they cost is their start.
#include "dev/cuda/bench.cuh"
#include "llmc/step_state.cuh"

namespace step_state_bench {

void count_targets(bench::Case& c, size_t n) {
    const std::vector<int> host = bench::random_ints(n, 4, -1, 9);
    const auto targets = c.upload(host);
    const auto count = c.output<unsigned long long>("count", 1);
    c.run([&](cudaStream_t stream) { count_valid_targets(count, targets, n, stream); });
    const auto valid = std::count_if(host.begin(), host.end(), [](int target) { return target >= 0; });
    c.expect("count", 0, static_cast<double>(count.download()[0]), static_cast<double>(valid), 0);
    c.time(bench::bytes(targets, count), 0);
}

void inverse(bench::Case& c, int ranks) {
    StepState host = {};
    host.valid_tokens = ~0ull, host.inv_valid_tokens = NAN;
    std::vector<unsigned long long> counts;
    unsigned long long valid = 0;
    for (int rank = 0; rank < ranks; rank++) {
        counts.push_back(12345 + rank);
        valid += counts.back();
    }
    const auto state = c.upload(std::vector<StepState>{host});
    const auto rank_counts = c.upload(counts);
    c.run([&](cudaStream_t stream) { set_inv_valid(state, rank_counts, ranks, stream); });
    const StepState got = state.download()[0];
    c.expect("valid_tokens", 0, static_cast<double>(got.valid_tokens), static_cast<double>(valid), 0);
    c.expect("inv_valid_tokens", 0, got.inv_valid_tokens, 1.0 / valid, kRoundoff32 / valid);
    c.time(bench::bytes(rank_counts) + sizeof(host.valid_tokens) + sizeof(host.inv_valid_tokens), ranks);
}

void decide(bench::Case& c, int ranks) {
    const double beta1 = 0.9, beta2 = 0.95;
    StepState host = {};
    host.valid_tokens = 1000, host.max_norm = 1.0f, host.applied_steps = 9;
    host.loss = host.grad_norm = host.clip_factor = host.bias_correction1 = host.bias_correction2 = NAN;
    host.loss_sum = NAN;
    std::vector<double> sums;
    double squares = 0, loss = 0;
    for (int rank = 0; rank < ranks; rank++) {
        sums.insert(sums.end(), {1.0 + rank, 100.0 * rank, rank % 2 ? 3.0 : 1.0});
        squares += 1.0 + rank;
        loss += 100.0 * rank;
    }
    const auto state = c.upload(std::vector<StepState>{host});
    const auto rank_sums = c.upload(sums);
    c.run([&](cudaStream_t stream) { decide_step(state, rank_sums, ranks, beta1, beta2, stream); });
    const StepState got = state.download()[0];
    // All in double, rounded once; pow may be an ulp of double off, which moves a float by one ulp at most.
    const auto close = [&](const char* what, double value, double want) { c.expect(what, 0, value, want, 1.5 * kRoundoff32 * std::abs(want)); };
    close("loss", got.loss, loss / 1000);
    close("grad_norm", got.grad_norm, std::sqrt(squares));
    close("clip_factor", got.clip_factor, std::min(1.0, 1.0 / (std::sqrt(squares) + 1e-6)));
    close("bias_correction1", got.bias_correction1, 1 - std::pow(beta1, 10));
    close("bias_correction2", got.bias_correction2, 1 - std::pow(beta2, 10));
    c.expect("requests_any", 0, got.requests_any, ranks > 1 ? 3 : 1, 0);
    c.expect("requests_all", 0, got.requests_all, 1, 0);
    c.expect("skip", 0, got.skip, 0, 0);
    c.expect("applied_steps", 0, static_cast<double>(got.applied_steps), 10, 0);
    c.time(bench::bytes(rank_sums) + 2.0 * sizeof(StepState), 2.0 * ranks);
}

const bench::Registration registration([](const bench::Settings& s) {
    const size_t n = s.N;
    bench::add(format("count_valid_targets/n=%zu", n), [=](bench::Case& c) { count_targets(c, n); });
    bench::add("set_inv_valid/ranks=8", [](bench::Case& c) { inverse(c, 8); });
    bench::add("decide_step/ranks=8", [](bench::Case& c) { decide(c, 8); });
});

}  // namespace step_state_bench
