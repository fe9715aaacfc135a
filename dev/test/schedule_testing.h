// Shared by the tests of schedules and of the time they take: small models of either kind of embedding, and a schedule with all it was made from.
#pragma once

#include "dev/test/host_test.h"
#include "llmc/param_table.h"
#include "llmc/schedule.h"

// Of small_config(). Small: two slots that any bucket fits in are smaller than two of a layer and one of the embedding. Large: the other way round, and with two layers or
// more a bucket of the embedding or of an untied head has a gradient buffer apart.
constexpr int kSmallVocab = 300, kLargeVocab = 600;

template <int kLayers>
struct ScheduleCase {
    int stage = 3, layers = kLayers, ranks = 2, micro_steps = 1;
    bool tied = false, sync_every_micro_step = false;
    double bucket_mb = 0;
    int vocab_size = kSmallVocab;
    size_t parameter_bytes = 2, gradient_bytes = 2;
};

// A schedule, and what it was made from.
template <class Case>
struct MadeSchedule {
    Case c;
    ParamTable table;
    FlatLayout layout;
    Schedule schedule;
};

template <int kLayers>
MadeSchedule<ScheduleCase<kLayers>> make_case(const ScheduleCase<kLayers>& c, const ModelConfig& config) {
    MadeSchedule<ScheduleCase<kLayers>> made{c, make_param_table(config), {}, {}};
    made.layout = make_flat_layout(made.table, c.ranks, c.bucket_mb, 2);
    made.schedule = make_schedule(made.table, made.layout, {c.stage, c.micro_steps, c.sync_every_micro_step, c.parameter_bytes, c.gradient_bytes});
    return made;
}

// In bytes of bf16 an embedding of 18432 (30720 if large), layers of 11008, a head of 256 more than the embedding or, tied, of 256.
template <int kLayers>
MadeSchedule<ScheduleCase<kLayers>> make_case(const ScheduleCase<kLayers>& c) {
    ModelConfig config = small_config(c.tied);
    config.num_layers = c.layers;
    config.vocab_size = c.vocab_size;
    return make_case(c, config);
}
