// Choosing the next token from logits: temperature, top-k, top-p, with a counter-based random number, so that every rank draws the same.
#pragma once

#include <cstdint>
#include <vector>

struct SamplerConfig {
    double temperature = 0.8;  // 0 = always the most likely token
    int top_k = 0;             // keep the k most likely; 0 = all
    double top_p = 1.0;        // keep the most likely ones until their probabilities reach this; 1 = all
};

// A uniform number in [0, 1) that depends on the three keys alone (SplitMix64's finaliser, applied in turn).
double uniform_from_keys(uint64_t seed, uint64_t stream, uint64_t index);

// The token drawn with `uniform` in [0, 1) from `logits`. Ties are broken by the lower id. Throws Error if no logit is a finite number.
int sample_token(const std::vector<float>& logits, const SamplerConfig& config, double uniform);
