#include "llmc/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "llmc/error.h"

double uniform_from_keys(uint64_t seed, uint64_t stream, uint64_t index) {
    uint64_t x = seed;
    for (const uint64_t key : {stream, index}) {
        x += 0x9e3779b97f4a7c15ull * (key + 1);
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
        x ^= x >> 31;
    }
    return static_cast<double>(x >> 11) * 0x1p-53;
}

int sample_token(const std::vector<float>& logits, const SamplerConfig& config, double uniform) {
    std::vector<int> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    order.erase(std::remove_if(order.begin(), order.end(), [&](int id) { return !std::isfinite(logits[id]); }), order.end());
    CHECK(!order.empty(), "cannot sample: none of the %zu logits is finite; the weights have diverged", logits.size());
    std::sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
    if (config.temperature <= 0) return order[0];
    if (config.top_k > 0 && static_cast<size_t>(config.top_k) < order.size()) order.resize(config.top_k);

    std::vector<double> weights;
    double total = 0;
    for (const int id : order) {
        weights.push_back(std::exp((static_cast<double>(logits[id]) - logits[order[0]]) / config.temperature));
        total += weights.back();
    }
    size_t kept = 0;
    double kept_total = 0;
    while (kept < weights.size() && (kept == 0 || kept_total < config.top_p * total)) kept_total += weights[kept++];
    double remaining = uniform * kept_total;
    for (size_t i = 0; i < kept; ++i) {
        remaining -= weights[i];
        if (remaining < 0) return order[i];
    }
    return order[kept - 1];
}
