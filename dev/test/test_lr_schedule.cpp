// The learning rate of every schedule at its corners: warm-up 0 and whole run, first, last and only step.
#include <gtest/gtest.h>

#include "llmc/lr_schedule.h"

namespace {

using Kind = LrSchedule::Kind;
constexpr Kind kKinds[] = {Kind::Cosine, Kind::Linear, Kind::Constant, Kind::Wsd};

LrSchedule make(Kind kind, long long steps, long long warmup, double final_frac = 0.1) {
    LrSchedule s;
    s.kind = kind;
    s.lr = 3e-3;
    s.steps = steps;
    s.warmup = warmup;
    s.final_lr_frac = final_frac;
    return s;
}

TEST(LrSchedule, WarmUpRisesByEqualStepsToThePeak) {
    for (const Kind kind : kKinds)
        for (long long s = 0; s < 10; ++s) EXPECT_DOUBLE_EQ(make(kind, 100, 10).at(s), 3e-3 * (s + 1) / 10.0);
}

TEST(LrSchedule, TheLastStepHasExactlyTheFinalRate) {
    for (const Kind kind : {Kind::Cosine, Kind::Linear, Kind::Wsd})
        for (const long long steps : {1, 2, 3, 5, 7, 300, 12345})
            for (const long long warmup : {0ll, 1ll, steps / 2, steps - 1})
                for (const double frac : {0.0, 0.1, 0.3, 1.0}) {
                    if (warmup >= steps) continue;
                    EXPECT_EQ(make(kind, steps, warmup, frac).at(steps - 1), frac * 3e-3) << "steps " << steps << ", warm-up " << warmup;
                }
}

TEST(LrSchedule, WarmUpOfZeroStartsAtThePeakAndWholeRunEndsThere) {
    for (const Kind kind : kKinds) {
        EXPECT_EQ(make(kind, 100, 0).at(0), 3e-3);
        EXPECT_EQ(make(kind, 50, 50).at(49), 3e-3);
        EXPECT_EQ(make(kind, 1, 1).at(0), 3e-3);
        EXPECT_DOUBLE_EQ(make(kind, 50, 50).at(0), 3e-3 / 50);
    }
}

TEST(LrSchedule, CosineAndLinearPassTheirMiddle) {
    // Steps 20 .. 120 decay: step 70 is the middle, where both are half way between peak and final rate.
    const double middle = 3e-3 * (1.0 + 0.1) / 2.0;
    EXPECT_NEAR(make(Kind::Cosine, 121, 20).at(70), middle, 1e-15);
    EXPECT_NEAR(make(Kind::Linear, 121, 20).at(70), middle, 1e-15);
    // A quarter of the way: linear has lost a quarter, the cosine (1 - cos(pi/4)) / 2 = 0.146447.
    EXPECT_NEAR(make(Kind::Linear, 121, 20, 0.0).at(45), 3e-3 * 0.75, 1e-15);
    EXPECT_NEAR(make(Kind::Cosine, 121, 20, 0.0).at(45), 3e-3 * (1 - 0.14644660940672624), 1e-15);
}

TEST(LrSchedule, ConstantStaysAndWsdFallsOverTheLastFifth) {
    for (long long s = 10; s < 100; ++s) EXPECT_EQ(make(Kind::Constant, 100, 10).at(s), 3e-3);
    const LrSchedule wsd = make(Kind::Wsd, 100, 10, 0.0);
    EXPECT_EQ(wsd.wsd_decay_steps(), 20);
    EXPECT_EQ(wsd.at(79), 3e-3);
    EXPECT_DOUBLE_EQ(wsd.at(80), 3e-3 * 19 / 20);
    EXPECT_DOUBLE_EQ(wsd.at(98), 3e-3 * 1 / 20);
    EXPECT_EQ(make(Kind::Wsd, 100, 95).wsd_decay_steps(), 5);
}

TEST(LrSchedule, NeverRisesAfterTheWarmUpAndNeverLeavesItsRange) {
    for (const Kind kind : kKinds)
        for (const long long warmup : {0, 1, 40, 99, 100}) {
            const LrSchedule schedule = make(kind, 100, warmup);
            for (long long s = 0; s < 100; ++s) {
                EXPECT_GT(schedule.at(s), 0.0);
                EXPECT_LE(schedule.at(s), 3e-3);
                if (s > warmup) { EXPECT_LE(schedule.at(s), schedule.at(s - 1)); }
            }
        }
}

}  // namespace
