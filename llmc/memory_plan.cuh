// The device memory of a run that nobody started: the trainer's own allocations, counted. Needs no device.
#pragma once

#include "llmc/device_memory.cuh"
#include "llmc/plan.h"
#include "llmc/trainer.cuh"

// Stage, buckets and micro-steps as the engine wants them; the optimizer's numbers stay at their defaults.
inline ZeroConfig zero_config(const RunShape& shape) {
    ZeroConfig config;
    config.stage = shape.stage;
    config.bucket_mb = shape.bucket_mb;
    config.overlap = shape.overlap;
    config.sync_every_micro_step = shape.sync_every_micro_step;
    config.micro_steps = shape.micro_steps;
    config.lmhead_chunks = shape.lmhead_chunks;
    config.fp32_gradients = shape.fp32_gradients;
    return config;
}

// A CountRun (plan.h).
inline CountedRun count_run(const RunShape& shape, const ParamTable& table, int schedule_micro_steps) {
    ZeroConfig config = zero_config(shape);
    CountedRun run;
    run.layout = run_layout(table, shape.ranks, config);
    config.micro_steps = schedule_micro_steps;
    run.schedule = run_schedule(table, run.layout, config);
    config.micro_steps = shape.micro_steps;
    DeviceMemory memory{DeviceMemory::OnlyCount{}};
    TrainerMemory(shape.config, table, run.layout, run.schedule, config, recompute_from_name(shape.recompute), shape.micro_batch, shape.seq_len, memory);
    run.memory = memory.bill();
    return run;
}
