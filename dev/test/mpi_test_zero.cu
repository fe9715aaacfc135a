// The ZeRO engine on real ranks, driven by the trainer's own step:   mpirun -np N mpi_test_zero
//
// 1. Oracle. Each rank computes the gradients of each of its micro-batches alone, on a one-rank engine, scaled by the global number of valid
//    targets; their sum over ranks and micro-steps in double is what every stage's reduced gradient must equal, up to the roundings of the
//    accumulation and of the ring, which are counted.
// 2. Bits. Stages, overlap and (with one micro-step) everything else must not change a bit of losses, norms, parameters and optimizer state.
//
// Cases: tied and untied, merged buckets and one unit a bucket, 1 and 4 micro-steps, ranks and micro-steps with unequal numbers of valid targets
// (one micro-step of rank 0 has none), signal only in the first or only in the last micro-step. Prints `N passed, N failed`.
#include "dev/test/zero_testing.cuh"

namespace {

constexpr int kB = 2, kT = 12, kSteps = 3;

enum class Signal { kAll, kFirst, kLast };  // which micro-steps have valid targets

struct Case {
    bool tied;
    double bucket_mb;
    int micro_steps;
    Signal signal;
};

ModelConfig small_model(bool tied) {
    ModelConfig config;
    config.name = "test";
    config.num_layers = 2;
    config.channels = 40;
    config.num_heads = 4;
    config.num_kv_heads = 2;
    config.head_dim = 8;
    config.ffn_dim = 56;
    config.vocab_size = 130;
    config.max_seq_len = 32;
    config.tied = tied;
    config.qkv_bias = tied;
    config.qk_norm = !tied;
    config.validate();
    return config;
}

// The micro-batch of (step, rank, micro_step): the same whatever the engine does with it.
void fill_micro_batch(const BatchBuffers& out, size_t first, const Case& c, const ModelConfig& config, int step, const Process& process, int micro_step) {
    const int rank = process.rank;
    const int count = kB * kT;
    for (int i = 0; i < count; ++i) {
        const uint64_t key = static_cast<uint64_t>(step) * 1000 + rank * 100 + micro_step;
        out.inputs[first + i] = static_cast<int>(uniform_from_keys(11, key, i) * config.vocab_size);
        out.targets[first + i] = static_cast<int>(uniform_from_keys(12, key, i) * config.vocab_size);
        // Unequal counts: rank 0 has nothing to learn in its first micro-step (where it is not the only one), others lose a growing share.
        const double masked_share = rank == 0 && micro_step == 0 && process.ranks > 1 ? 1.0 : 0.1 * ((rank + micro_step) % 5);
        const bool silent = (c.signal == Signal::kFirst && micro_step != 0) || (c.signal == Signal::kLast && micro_step != c.micro_steps - 1);
        if (silent || uniform_from_keys(13, key, i) < masked_share) out.targets[first + i] = -1;
    }
    std::vector<size_t> scratch;
    sort_positions(out.sorted_positions + first, out.inputs + first, count, config.vocab_size, scratch);
}

// What a run of a few steps leaves: everything that must be equal to the bit.
struct Outcome {
    std::vector<float> losses, norms;
    std::vector<uint32_t> params, master, m, v;
    bool operator==(const Outcome&) const = default;
    std::string hash() const {
        Hash64 all;
        for (const auto* values : {&losses, &norms}) all.add(values->data(), values->size() * sizeof(float));
        for (const auto* values : {&params, &master, &m, &v}) all.add(values->data(), values->size() * sizeof(uint32_t));
        return all.hex();
    }
};

std::string text(const Case& c) {
    return format("%s, bucket-mb %g, %d micro-steps%s", c.tied ? "tied" : "untied", c.bucket_mb, c.micro_steps,
                  c.signal == Signal::kAll ? "" : c.signal == Signal::kFirst ? ", signal in the first only" : ", signal in the last only");
}

std::unique_ptr<Trainer> make_trainer(const Process& process, const Communicator& comm, const Case& c, int stage, bool overlap, bool sync_every, int micro_steps) {
    ZeroConfig config;
    config.stage = stage;
    config.bucket_mb = c.bucket_mb;
    config.overlap = overlap;
    config.sync_every_micro_step = sync_every;
    config.micro_steps = micro_steps;
    auto trainer = std::make_unique<Trainer>(comm, small_model(c.tied), config, kB, kT, 0);
    trainer->choose_products(process);
    trainer->zero.init_params(5, trainer->config.num_layers);
    trainer->zero.start_optimizer();
    return trainer;
}

// What the first step must give, from every micro-batch alone.
struct Oracle {
    std::vector<double> sum, magnitude;  // over ranks and micro-steps, of gradients and of their magnitudes, by logical position
    double loss = 0;                     // mean over the valid targets of all
};

Oracle make_oracle(const Process& process, const Case& c) {
    Process alone;
    const Communicator comm(alone);
    const auto trainer = make_trainer(alone, comm, c, 0, false, false, 1);
    const size_t total = logical_count(trainer->table);
    Oracle oracle;
    oracle.sum.assign(total, 0);
    oracle.magnitude.assign(total, 0);
    HostBatch batch(static_cast<size_t>(c.micro_steps) * kB * kT);
    unsigned long long valid = 0;
    for (int m = 0; m < c.micro_steps; ++m) fill_micro_batch(batch.buffers(), static_cast<size_t>(m) * kB * kT, c, trainer->config, 0, process, m);
    for (size_t i = 0; i < batch.count(); ++i) valid += batch.buffers().targets[i] >= 0;
    MPI_Allreduce(MPI_IN_PLACE, &valid, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    set_valid_tokens(*trainer, valid);
    for (int m = 0; m < c.micro_steps; ++m) {
        BatchBuffers part = batch.buffers();
        part.inputs += static_cast<size_t>(m) * kB * kT;
        part.targets += static_cast<size_t>(m) * kB * kT;
        part.sorted_positions += static_cast<size_t>(m) * kB * kT;
        oracle.loss += add_micro_batch_gradients(*trainer, part, &oracle.sum, &oracle.magnitude);
    }
    MPI_Allreduce(MPI_IN_PLACE, oracle.sum.data(), static_cast<int>(total), MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, oracle.magnitude.data(), static_cast<int>(total), MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &oracle.loss, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    oracle.loss /= static_cast<double>(valid);
    return oracle;
}

void check_first_step(Check& check, const Process& process, const Communicator& comm, const Case& c, int stage, bool overlap, bool sync_every, const Oracle& oracle) {
    const auto trainer = make_trainer(process, comm, c, stage, overlap, sync_every, c.micro_steps);
    HostBatch batch(trainer->tokens_per_step());
    for (int m = 0; m < c.micro_steps; ++m) fill_micro_batch(batch.buffers(), static_cast<size_t>(m) * kB * kT, c, trainer->config, 0, process, m);
    trainer->queue_step({0, 1e-2, 0.5, 77, 0}, batch.buffers());
    const StepState state = trainer->read_state();
    const std::string what = format("%s, stage %d%s%s", text(c).c_str(), stage, overlap ? "" : ", no overlap", sync_every ? ", sync every micro-step" : "");
    check_gradients(check, *trainer, state.grad_norm, oracle.sum, oracle.magnitude, what);
    // The same fp32 losses summed in double in another order, then one rounding to float.
    check.expect(std::fabs(state.loss - oracle.loss) <= 0x1p-23 * oracle.loss, format("%s: loss %.8g, mean over all micro-batches %.8g", what.c_str(), state.loss, oracle.loss));
}

Outcome run_steps(Check& check, const Process& process, const Communicator& comm, const Case& c, int stage, bool overlap, bool sync_every) {
    const auto trainer = make_trainer(process, comm, c, stage, overlap, sync_every, c.micro_steps);
    // All steps are queued before any is read, as the trainer queues ahead: nothing but the engine's own events orders their work.
    static_assert(kSteps <= kStepSlots);
    std::vector<std::unique_ptr<HostBatch>> batches;
    for (int step = 0; step < kSteps; ++step) {
        batches.push_back(std::make_unique<HostBatch>(trainer->tokens_per_step()));
        const BatchBuffers batch = batches.back()->buffers();
        for (int m = 0; m < c.micro_steps; ++m) fill_micro_batch(batch, static_cast<size_t>(m) * kB * kT, c, trainer->config, step, process, m);
        trainer->queue_step({step, 1e-2, 0.5, 77, step}, batch);
    }
    trainer->zero.synchronize();
    Outcome outcome;
    for (int step = 0; step < kSteps; ++step) {
        outcome.losses.push_back(trainer->read_back[step].loss);
        outcome.norms.push_back(trainer->read_back[step].grad_norm);
    }
    outcome.params = gather_bits(*trainer, trainer->zero.params(), false);
    outcome.master = gather_bits(*trainer, trainer->zero.master(), true);
    outcome.m = gather_bits(*trainer, trainer->zero.first_moments(), true);
    outcome.v = gather_bits(*trainer, trainer->zero.second_moments(), true);
    // Every rank's whole parameters, its own slices or not, must be the same.
    std::vector<floatX> mine(trainer->zero.layout().total_count), root;
    CUDA_CHECK(cudaMemcpyAsync(mine.data(), trainer->zero.params(), mine.size() * sizeof(floatX), cudaMemcpyDeviceToHost, trainer->stream));
    CUDA_CHECK(cudaStreamSynchronize(trainer->stream));
    root = mine;
    MPI_Bcast(root.data(), static_cast<int>(root.size() * sizeof(floatX)), MPI_BYTE, 0, MPI_COMM_WORLD);
    check.expect(memcmp(root.data(), mine.data(), mine.size() * sizeof(floatX)) == 0, format("%s, stage %d: all ranks hold the same parameters", text(c).c_str(), stage));
    return outcome;
}

void run_case(Check& check, const Process& process, const Communicator& comm, const Case& c) {
    const Oracle oracle = make_oracle(process, c);
    const auto outcome = [&](int stage, bool overlap, bool sync_every = false) {
        check_first_step(check, process, comm, c, stage, overlap, sync_every, oracle);
        return run_steps(check, process, comm, c, stage, overlap, sync_every);
    };
    const Outcome stage0 = outcome(0, true), stage1 = outcome(1, true), stage2 = outcome(2, true);
    // For comparing runs of this program: with overlap, delayed streams, protected memory, any schedule, the bits must be these.
    if (process.rank == 0) printf("bits   %s: %s %s\n", text(c).c_str(), stage1.hash().c_str(), stage2.hash().c_str());
    bool moved = true;
    for (int step = 0; step < kSteps; ++step) moved = moved && stage0.norms[step] > 0 && std::isfinite(stage0.losses[step]);
    check.expect(moved, text(c) + ": there is something to compare");
    check.expect(stage0 == stage1, text(c) + ": stage 1 equals stage 0 to the bit");
    // With several micro-steps stage 2 adds in another order, even in fp32.
    if (c.micro_steps == 1) check.expect(stage1 == stage2, text(c) + ": stage 2 equals stage 1 to the bit");
    check.expect(outcome(1, true, true) == stage2, text(c) + ": stage 1 with sync every micro-step equals stage 2 to the bit");
    check.expect(outcome(0, true, true) == stage2, text(c) + ": stage 0 with sync every micro-step equals stage 2 to the bit");
    for (const int stage : {0, 1, 2}) {
        check.expect(outcome(stage, false) == (stage == 0 ? stage0 : stage == 1 ? stage1 : stage2), format("%s: stage %d without overlap equals it with overlap", text(c).c_str(), stage));
    }
}

}  // namespace

int main(int argc, char** argv) {
    return run_main(argc, argv, [&](const Process& process) {
        const bool quick = argc > 1 && std::string(argv[1]) == "--quick";
        select_device(process);
        const Communicator comm(process);
        Check check{process};
        for (const bool tied : {false, true}) {
            for (const double bucket_mb : {0.0, 25.0}) {
                run_case(check, process, comm, {tied, bucket_mb, 1, Signal::kAll});
                run_case(check, process, comm, {tied, bucket_mb, 4, Signal::kAll});
                if (quick) continue;
                run_case(check, process, comm, {tied, bucket_mb, 4, Signal::kFirst});
                run_case(check, process, comm, {tied, bucket_mb, 4, Signal::kLast});
            }
        }
        if (process.rank == 0) printf("%d passed, %d failed\n", check.passed, check.failed);
        return check.failed ? 1 : 0;
    });
}
