// The learning rate of a step: warm-up, then cosine, linear, constant or WSD. One inline function, so that tests, the trainer and
// any plot of a run compute the very same number.
#pragma once

#include <cmath>

struct LrSchedule {
    enum class Kind { Cosine, Linear, Constant, Wsd };
    Kind kind = Kind::Cosine;
    double lr = 0.0;              // the peak
    long long steps = 0;          // steps of the whole run
    long long warmup = 0;         // 0 .. steps
    double final_lr_frac = 0.0;   // the last step has exactly final_lr_frac * lr (constant: does not decay)

    // Share of the run that WSD (warm-up, stable, decay) spends decaying, linearly.
    static constexpr double kWsdDecayShare = 0.2;

    // Steps WSD decays over: a fifth of the run, rounded up, but never into the warm-up.
    long long wsd_decay_steps() const {
        const long long wanted = static_cast<long long>(std::ceil(kWsdDecayShare * static_cast<double>(steps)));
        return wanted < steps - warmup ? wanted : steps - warmup;
    }

    // The rate of step s, 0 <= s < steps.
    double at(long long s) const {
        // The warm-up rule holds for every step below warmup, so with warmup = steps the last step has the peak, not the final rate.
        if (s < warmup) return lr * static_cast<double>(s + 1) / static_cast<double>(warmup);
        if (kind == Kind::Constant) return lr;
        const double final_lr = final_lr_frac * lr;
        if (s >= steps - 1) return final_lr;  // exactly, whatever the rounding of the formulas below
        if (kind == Kind::Wsd) {
            const long long decay = wsd_decay_steps(), start = steps - decay;
            if (s < start) return lr;
            return lr + (final_lr - lr) * static_cast<double>(s - start + 1) / static_cast<double>(decay);
        }
        // From the peak at s = warmup to the final rate at s = steps - 1. The denominator is positive: s < steps - 1 here.
        const double progress = static_cast<double>(s - warmup) / static_cast<double>(steps - 1 - warmup);
        const double share = kind == Kind::Cosine ? 0.5 * (1.0 + std::cos(M_PI * progress)) : 1.0 - progress;
        return final_lr + (lr - final_lr) * share;
    }
};
