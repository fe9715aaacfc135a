// The ZeRO engine on real ranks, driven by the trainer's own step:   mpirun -np N mpi_test_zero
//
// 1. Oracle. Each rank computes the gradients of each of its micro-batches alone, on a one-rank engine, scaled by the global number of valid
//    targets; their sum over ranks and micro-steps in double is what every stage's reduced gradient must equal, up to the roundings of the
//    accumulation and of the ring, which are counted.
// 2. The head, whole and in chunks, against a loop in double.
// 3. Bits. Stages, overlap, recomputation and (with one micro-step) everything else must not change a bit of losses, norms, parameters and optimizer state.
// 4. A NaN on one rank in one micro-step: all skip that step, nothing changes, and the next step is what it would have been without.
// 5. A bit flipped in one rank's replica is found and named.
//
// Cases: tied and untied, merged buckets and one unit a bucket, 1 and 4 micro-steps, ranks and micro-steps with unequal numbers of valid targets
// (one micro-step of rank 0 has none), signal only in the first or only in the last micro-step, the head in chunks, gradients in fp32. --quick runs a covering
// part of them. Prints `N passed, N failed`.
#include "dev/test/zero_testing.cuh"

namespace {

constexpr int kB = 2, kT = 12, kSteps = 3;

enum class Signal { kAll, kFirst, kLast };  // which micro-steps have valid targets

struct Case {
    bool tied;
    double bucket_mb;
    int micro_steps;
    Signal signal = Signal::kAll;
    int chunks = 1;             // of the head
    bool fp32_gradients = false;
    bool large_embedding = false;  // more than two layers' worth, and three layers: stage 3 keeps embedding and layers apart
};

ModelConfig model_of(const Case& c) { return c.large_embedding ? small_model(c.tied, 3, 600) : small_model(c.tied, 2, 130); }

// How a case is run: none of it changes what it computes.
struct Run {
    int stage;
    bool overlap = true;
    bool sync_every = false;
    Recompute recompute = Recompute::kNone;
};

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
    return format("%s%s, bucket-mb %g, %d micro-steps%s%s%s", c.tied ? "tied" : "untied", c.large_embedding ? " large embedding" : "", c.bucket_mb, c.micro_steps,
                  c.signal == Signal::kAll ? "" : c.signal == Signal::kFirst ? ", signal in the first only" : ", signal in the last only",
                  c.chunks == 1 ? "" : format(", head in %d chunks", c.chunks).c_str(), c.fp32_gradients ? ", fp32 gradients" : "");
}

std::string text(const Case& c, const Run& run) {
    static const char* const kRecompute[] = {"", ", recompute norm", ", recompute ffn", ", recompute block"};
    return format("%s, stage %d%s%s%s", text(c).c_str(), run.stage, run.overlap ? "" : ", no overlap", run.sync_every ? ", sync every micro-step" : "",
                  kRecompute[static_cast<int>(run.recompute)]);
}

std::unique_ptr<Trainer> make_trainer(const Process& process, const Communicator& comm, const Case& c, const Run& run) {
    ZeroConfig config;
    config.stage = run.stage;
    config.bucket_mb = c.bucket_mb;
    config.overlap = run.overlap;
    config.sync_every_micro_step = run.sync_every;
    config.micro_steps = c.micro_steps;
    config.lmhead_chunks = c.chunks;
    config.fp32_gradients = c.fp32_gradients;
    auto trainer = std::make_unique<Trainer>(comm, model_of(c), config, run.recompute, kB, kT, 0);
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
    Case one_micro_step = c;
    one_micro_step.micro_steps = 1;
    one_micro_step.fp32_gradients = true;
    const auto trainer = make_trainer(alone, comm, one_micro_step, {.stage = 0, .overlap = false});
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

// The micro-batches of a step, in one batch.
std::unique_ptr<HostBatch> make_batch(const Trainer& trainer, const Process& process, const Case& c, int step) {
    auto batch = std::make_unique<HostBatch>(trainer.tokens_per_step());
    for (int m = 0; m < c.micro_steps; ++m) fill_micro_batch(batch->buffers(), static_cast<size_t>(m) * kB * kT, c, trainer.config, step, process, m);
    return batch;
}

StepInputs inputs_of(int step, int slot) { return {step, 1e-2, 0.5, 77, slot}; }

void check_first_step(Check& check, const Process& process, const Communicator& comm, const Case& c, const Run& run, const Oracle& oracle) {
    const auto trainer = make_trainer(process, comm, c, run);
    trainer->queue_step(inputs_of(0, 0), make_batch(*trainer, process, c, 0)->buffers());
    const StepState state = trainer->read_state();
    const std::string what = text(c, run);
    check_gradients(check, *trainer, state.grad_norm, oracle.sum, oracle.magnitude, what);
    // The same fp32 losses summed in double in another order, then one rounding to float.
    const double allowed = 0x1p-23 * oracle.loss;
    check.expect(std::fabs(state.loss - oracle.loss) <= allowed, format("%s: loss %.8g, mean over all micro-batches %.8g", what.c_str(), state.loss, oracle.loss));
}

// Losses, the gradient that leaves the head and the gradient of its weight, against a loop in double that starts from the same rows and weight.
void check_head(Check& check, const Process& process, const Case& c) {
    Process alone;
    const Communicator comm(alone);
    const auto trainer = make_trainer(alone, comm, c, {.stage = 0, .overlap = false});
    const ModelConfig& config = trainer->config;
    const int N = kB * kT, C = config.channels, V = config.vocab_size, Vp = config.padded_vocab(), rows = N / c.chunks;
    HostBatch batch(N);
    fill_micro_batch(batch.buffers(), 0, c, config, process.rank, process, 1);
    set_valid_tokens(*trainer, N);
    const double inv_valid = static_cast<float>(1.0 / N);
    queue_forward_and_head(*trainer, batch.buffers());
    const auto read = [&](const auto* values, size_t count) { return read_floats(values, count, trainer->stream); };
    const std::vector<float> losses = read(trainer->model.losses(), N), x = read(trainer->model.norm_final(), static_cast<size_t>(N) * C);
    const std::vector<float> d_x = read(trainer->model.d_norm(), static_cast<size_t>(N) * C);
    const Parameter& parameter = head_weight(*trainer);
    const std::vector<float> w = read(trainer->zero.params(parameter.unit) + parameter.offset, static_cast<size_t>(Vp) * C);
    // A tied weight's last addend is still open: the embedding's part goes into it.
    std::vector<double> d_w(w.size(), 0);
    const auto add = [&](const std::vector<float>& values) { for (size_t i = 0; i < d_w.size(); ++i) d_w[i] += values[i]; };
    if (!c.tied || c.chunks > 1) add(read_head_weight_gradient(*trainer));
    if (c.tied) add(read(trainer->zero.gradients().open(parameter.unit) + parameter.offset, w.size()));

    const double u = kRoundoff<floatX>;
    std::vector<double> want_w(w.size(), 0), allowed_w(w.size(), 0), addend(w.size()), addend_size(w.size()), addend_error(w.size()), weight_size(w.size(), 0);
    std::vector<double> z(V), d_z(V), d_z_error(V);
    double loss_ratio = 0, x_ratio = 0, w_ratio = 0;
    const auto worse = [](double* ratio, double error, double allowed) { *ratio = std::max(*ratio, error <= allowed ? (allowed > 0 ? error / allowed : 0.0) : std::max(2.0, error / allowed)); };
    for (int n = 0; n < N; ++n) {
        const int target = batch.buffers().targets[n];
        double z_error = 0, largest = -INFINITY, exponentials = 0, want_loss = 0;
        for (int v = 0; v < V; ++v) {
            double size = 0;
            z[v] = 0;
            for (int i = 0; i < C; ++i) {
                const double product = static_cast<double>(x[n * C + i]) * w[v * C + i];
                z[v] += product;
                size += std::fabs(product);
            }
            z_error = std::max(z_error, product_bound<floatX>(z[v], size, C));
            largest = std::max(largest, z[v]);
        }
        for (int v = 0; v < V; ++v) exponentials += std::exp(z[v] - largest);
        if (target >= 0) want_loss = largest + std::log(exponentials) - z[target];
        // test_cross_entropy.cu counts the roundings of a row: in one this short, of logits this small, fewer than 64. Every logit off by at most z_error moves the
        // loss by twice that, and a probability by a factor of exp of it.
        const double arithmetic = 64 * kRoundoff32;
        worse(&loss_ratio, std::fabs(losses[n] - want_loss), target < 0 ? 0 : 2 * z_error + arithmetic * (1 + want_loss));
        for (int v = 0; v < V; ++v) {
            const double p = std::exp(z[v] - largest) / exponentials, hit = v == target;
            d_z[v] = target < 0 ? 0 : (p - hit) * inv_valid;
            const double before_storage = (p * (std::expm1(2 * z_error) + arithmetic) + hit * kRoundoff32) * inv_valid;
            d_z_error[v] = target < 0 ? 0 : before_storage + u * (std::fabs(d_z[v]) + before_storage) + kTiny<floatX>;
        }
        for (int i = 0; i < C; ++i) {
            double value = 0, size = 0, error = 0;
            for (int v = 0; v < V; ++v) {
                value += d_z[v] * w[v * C + i];
                size += (std::fabs(d_z[v]) + d_z_error[v]) * std::fabs(w[v * C + i]);
                error += d_z_error[v] * std::fabs(w[v * C + i]);
                addend[v * C + i] += d_z[v] * x[n * C + i];
                addend_size[v * C + i] += (std::fabs(d_z[v]) + d_z_error[v]) * std::fabs(x[n * C + i]);
                addend_error[v * C + i] += d_z_error[v] * std::fabs(x[n * C + i]);
            }
            worse(&x_ratio, std::fabs(d_x[n * C + i] - value), error + product_bound<floatX>(std::fabs(value) + error, size, Vp));
        }
        if ((n + 1) % rows != 0) continue;
        for (size_t i = 0; i < want_w.size(); ++i) {  // the chunk's product
            const double error = addend_size[i] == 0 ? 0 : addend_error[i] + product_bound<floatX>(std::fabs(addend[i]) + addend_error[i], addend_size[i], rows);
            want_w[i] += addend[i];
            allowed_w[i] += error;
            weight_size[i] += std::fabs(addend[i]) + error;
            addend[i] = addend_size[i] = addend_error[i] = 0;
        }
    }
    // Chunks are added to nearest in fp32, stochastically in storage: up to twice the roundoff.
    const double additions = std::expm1((c.chunks - 1) * std::log1p(c.fp32_gradients ? kRoundoff32 : 2 * u));
    for (size_t i = 0; i < want_w.size(); ++i) worse(&w_ratio, std::fabs(d_w[i] - want_w[i]), allowed_w[i] + additions * weight_size[i]);
    check.expect(loss_ratio <= 1 && x_ratio <= 1 && w_ratio <= 1,
                 format("%s: the head against a loop in double: losses %.2f, gradient of its input %.2f, of its weight %.2f of the bound", text(c).c_str(), loss_ratio, x_ratio, w_ratio));
}

// Everything that must be equal to the bit, after steps whose results lie in slots [0, steps).
Outcome outcome_of(Check& check, const Process& process, Trainer& trainer, int steps, const std::string& what) {
    trainer.zero.synchronize();
    Outcome outcome;
    for (int slot = 0; slot < steps; ++slot) {
        outcome.losses.push_back(trainer.read_back[slot].loss);
        outcome.norms.push_back(trainer.read_back[slot].grad_norm);
    }
    outcome.params = gather_bits(trainer, [](const ZeroEngine::Owned& owned) { return owned.params; });
    outcome.master = gather_bits(trainer, [&](const ZeroEngine::Owned& owned) { return trainer.zero.master() + owned.state_begin; });
    outcome.m = gather_bits(trainer, [&](const ZeroEngine::Owned& owned) { return trainer.zero.first_moments() + owned.state_begin; });
    outcome.v = gather_bits(trainer, [&](const ZeroEngine::Owned& owned) { return trainer.zero.second_moments() + owned.state_begin; });
    // Every rank's whole parameters, its own slices or not, must be the same.
    const std::string mine = hash_parameters(trainer.zero, trainer.stream);
    check.expect(mine == gather_texts(process, mine)[0], what + ": all ranks read the same parameters");
    return outcome;
}

Outcome run_steps(Check& check, const Process& process, const Communicator& comm, const Case& c, const Run& run) {
    const auto trainer = make_trainer(process, comm, c, run);
    // All steps are queued before any is read, as the trainer queues ahead: nothing but the engine's own events orders their work.
    static_assert(kSteps <= kStepSlots);
    std::vector<std::unique_ptr<HostBatch>> batches;
    for (int step = 0; step < kSteps; ++step) {
        batches.push_back(make_batch(*trainer, process, c, step));
        trainer->queue_step(inputs_of(step, step), batches.back()->buffers());
    }
    return outcome_of(check, process, *trainer, kSteps, text(c, run));
}

void run_case(Check& check, const Process& process, const Communicator& comm, const Case& c) {
    const Oracle oracle = make_oracle(process, c);
    const auto steps = [&](const Run& run) { return run_steps(check, process, comm, c, run); };
    Outcome stages[4];
    for (int stage = 0; stage < 4; ++stage) {
        check_first_step(check, process, comm, c, {.stage = stage}, oracle);
        stages[stage] = steps({.stage = stage});
    }
    // For comparing runs of this program: with overlap, delayed streams, protected memory, any schedule, the bits must be these.
    if (process.rank == 0) printf("bits   %s: %s %s\n", text(c).c_str(), stages[1].hash().c_str(), stages[3].hash().c_str());
    bool moved = true;
    for (int step = 0; step < kSteps; ++step) moved = moved && stages[0].norms[step] > 0 && std::isfinite(stages[0].losses[step]);
    check.expect(moved, text(c) + ": there is something to compare");
    check.expect(stages[0] == stages[1], text(c) + ": stage 1 equals stage 0 to the bit");
    check.expect(stages[2] == stages[3], text(c) + ": stage 3 equals stage 2 to the bit");
    // With several micro-steps stages 2 and 3 add in another order, even in fp32.
    if (c.micro_steps == 1) check.expect(stages[1] == stages[2], text(c) + ": stage 2 equals stage 1 to the bit");
    for (int stage = 0; stage < 4; ++stage) {
        check.expect(steps({.stage = stage, .overlap = false}) == stages[stage], text(c, {.stage = stage}) + ": without overlap equal to the bit");
    }
    for (const int stage : {0, 1}) {
        check.expect(steps({.stage = stage, .sync_every = true}) == stages[2], text(c, {.stage = stage, .sync_every = true}) + ": equals stage 2 to the bit");
    }
}

void check_recompute(Check& check, const Process& process, const Communicator& comm, const Case& c) {
    const Outcome kept = run_steps(check, process, comm, c, {.stage = 1});
    for (const Recompute level : {Recompute::kNorm, Recompute::kFfn, Recompute::kBlock}) {
        for (const int stage : {1, 3}) {
            const Run run = {.stage = stage, .recompute = level};
            check.expect(run_steps(check, process, comm, c, run) == kept, text(c, run) + ": equals everything kept to the bit");
        }
    }
}

// Step 1 of three meets a NaN in the gradients of one micro-step of the last rank. The others must not notice more than a step that is left out.
void check_skip(Check& check, const Process& process, const Communicator& comm, const Case& c, int stage, int bad_micro_step) {
    const Run run = {.stage = stage};
    const std::string what = format("%s, NaN on one rank in micro-step %d", text(c, run).c_str(), bad_micro_step);
    const auto expected = make_trainer(process, comm, c, run), trainer = make_trainer(process, comm, c, run);
    std::vector<std::unique_ptr<HostBatch>> batches;
    for (int step = 0; step < 3; ++step) batches.push_back(make_batch(*trainer, process, c, step));
    expected->queue_step(inputs_of(0, 0), batches[0]->buffers());
    expected->queue_step(inputs_of(2, 1), batches[2]->buffers());
    trainer->queue_step(inputs_of(0, 0), batches[0]->buffers());
    const bool poisons = process.rank == process.ranks - 1;
    trainer->begin_step(inputs_of(1, 1), batches[1]->buffers());
    for (const ScheduleOp& op : trainer->zero.schedule().step) {
        trainer->queue(op);
        if (op.kind != OpKind::kHead || op.micro_step != bad_micro_step || !poisons) continue;
        // The gradient that leaves the head: a float's NaN pattern is one of two bf16 numbers as well.
        CUDA_CHECK(cudaMemsetAsync(trainer->model.d_residual(), 0xff, 16, trainer->stream));
    }
    trainer->end_step(1);
    trainer->queue_step(inputs_of(2, 2), batches[2]->buffers());
    for (const auto& either : {&trainer, &expected}) (*either)->zero.synchronize();
    const StepState skipped = trainer->read_back[1], after = trainer->read_back[2], other = expected->read_back[1];
    check.expect(skipped.skip == 1 && !std::isfinite(skipped.grad_norm) && skipped.skipped_total == 1 && skipped.skipped_in_row == 1 && skipped.applied_steps == 1, what + ": every rank skips the step and counts it");
    check.expect(after.skip == 0 && after.skipped_in_row == 0 && after.skipped_total == 1 && after.applied_steps == 2, what + ": the next step is made");
    check.expect(after.loss == other.loss && after.grad_norm == other.grad_norm, what + ": the next step sees the weights as they were");
    Outcome got = outcome_of(check, process, *trainer, 0, what), want = outcome_of(check, process, *expected, 0, what);
    check.expect(got == want, what + ": weights, master weights and moments are those of a run without that step");
}

void flip_bit(void* address, cudaStream_t stream) {
    unsigned char byte = 0;
    CUDA_CHECK(cudaMemcpyAsync(&byte, address, 1, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    byte ^= 1;
    CUDA_CHECK(cudaMemcpyAsync(address, &byte, 1, cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

// A bit flipped in the last rank's copy of what every rank holds, then flipped back.
void check_flip(Check& check, const Process& process, const Communicator& comm, const Case& c, int stage) {
    const auto trainer = make_trainer(process, comm, c, {.stage = stage});
    const size_t b = trainer->zero.layout().buckets.size() - 1;
    const ZeroEngine::Owned owned = trainer->zero.owned_by_this_rank(b);
    const std::string what = format("%s, stage %d", text(c).c_str(), stage);
    check.expect(check_replicas(*trainer, /*timeout_seconds=*/60).empty(), what + ": replicas are equal at the start");
    const struct { const char* name; void* address; bool replicated; } arrays[] = {
        {"weights", owned.params, stage < 3}, {"fp32 master weights", const_cast<float*>(trainer->zero.master()) + owned.state_begin, stage == 0},
        {"second moments", const_cast<float*>(trainer->zero.second_moments()) + owned.state_begin, stage == 0}};
    for (const auto& array : arrays) {
        if (process.rank == process.ranks - 1) flip_bit(array.address, trainer->stream);
        const std::string message = check_replicas(*trainer, /*timeout_seconds=*/60);
        if (process.rank == process.ranks - 1) flip_bit(array.address, trainer->stream);
        if (process.ranks == 1 || !array.replicated) {
            check.expect(message.empty(), format("%s: there is one copy of the %s only", what.c_str(), array.name));
            continue;
        }
        const std::string where = format("%s in bucket %zu (%s", array.name, b, trainer->table.units[trainer->zero.layout().buckets[b].first_unit].name.c_str());
        const std::string who = process.ranks == 2 ? "no majority" : format("rank %d does not", process.ranks - 1);
        check.expect(message.find(where) != std::string::npos && message.find(who) != std::string::npos, format("%s: a flipped bit is found: %s", what.c_str(), message.substr(0, 90).c_str()));
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
                run_case(check, process, comm, {tied, bucket_mb, 1});
                run_case(check, process, comm, {tied, bucket_mb, 4});
                if (quick) continue;
                run_case(check, process, comm, {tied, bucket_mb, 4, Signal::kFirst});
                run_case(check, process, comm, {tied, bucket_mb, 4, Signal::kLast});
            }
            for (const int chunks : {1, 2, 3, 8}) {
                for (const bool fp32_gradients : {false, true}) check_head(check, process, {.tied = tied, .bucket_mb = 0, .micro_steps = 1, .chunks = chunks, .fp32_gradients = fp32_gradients});
            }
            for (const int micro_steps : {1, 4}) {
                if (quick && micro_steps == 1) continue;
                run_case(check, process, comm, {.tied = tied, .bucket_mb = 0, .micro_steps = micro_steps, .chunks = 3, .fp32_gradients = micro_steps == 1, .large_embedding = true});
                if (quick) continue;
                run_case(check, process, comm, {.tied = tied, .bucket_mb = 0, .micro_steps = micro_steps, .chunks = 2});
                run_case(check, process, comm, {.tied = tied, .bucket_mb = 0.02, .micro_steps = micro_steps, .fp32_gradients = true});
            }
            if (!quick || tied) check_recompute(check, process, comm, {tied, 0.0, 1});
            for (const int stage : {0, 1, 2, 3}) {
                if (quick && (stage % 2 == 0) == tied) continue;
                check_skip(check, process, comm, {tied, 0.0, 4}, stage, tied ? 3 : 1);
                if (!quick) check_skip(check, process, comm, {tied, 0.0, 1}, stage, 0);
                check_flip(check, process, comm, {tied, 0.0, 1}, stage);
            }
        }
        if (process.rank == 0) printf("%d passed, %d failed\n", check.passed, check.failed);
        return check.failed ? 1 : 0;
    });
}
