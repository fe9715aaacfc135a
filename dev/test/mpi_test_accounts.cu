// The accounts of a run against what it really does:   mpirun -np N mpi_test_accounts
//
// 1. Bytes sent. A step's bytes are known four times over: counted by the communicator, added up from the schedule, from the sizes of the layout and the
//    design's formula, and by MPI, whose sends this program counts under the collectives. All four are the same number.
// 2. Memory of parameters, gradients and optimizer: exactly so many bytes an element as the stage says.
// 3. Stage 3 holds one rank's share and two units, in a deep model on 4 ranks.
//    Stage 2 holds two buckets of gradients in flight, and those of embedding and head.
// 4. Recompute and chunks of the head save exactly what they say; --device-memory is a limit to the byte; the device knows of no memory that the table lacks.
// 5. The plan of a run, made without a device, is the run's memory to the byte: every preset, stage and level of recomputation.
//
// Prints `N passed, N failed`.
#include <atomic>

#include "dev/test/zero_testing.cuh"
#include "llmc/memory_plan.cuh"
#include "llmc/plan_request.h"

namespace {
std::atomic<unsigned long long> mpi_bytes{0}, mpi_messages{0};
}

// Under the collectives (hostcuda/nccl_mpi) lie MPI messages. All of them pass here, whichever thread sends.
extern "C" int MPI_Isend(const void* buffer, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm, MPI_Request* request) {
    int type_bytes = 0;
    PMPI_Type_size(type, &type_bytes);
    mpi_bytes += static_cast<unsigned long long>(count) * type_bytes;
    ++mpi_messages;
    return PMPI_Isend(buffer, count, type, peer, tag, comm, request);
}

namespace {

constexpr int kB = 1, kT = 8;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Many layers, and an embedding no larger than one of them.
ModelConfig deep_model(bool tied, int vocab_size) {
    ModelConfig config;
    config.name = "deep";
    config.num_layers = 24;
    config.channels = 64;
    config.num_heads = 4;
    config.num_kv_heads = 2;
    config.head_dim = 16;
    config.ffn_dim = 176;
    config.vocab_size = vocab_size;
    config.max_seq_len = 32;
    config.tied = tied;
    config.validate();
    return config;
}

// Random ids, some targets masked: how many bytes are sent depends on neither.
void fill_batch(const BatchBuffers& out, int micro_steps, const ModelConfig& config, int rank) {
    std::vector<size_t> scratch;
    for (int i = 0; i < micro_steps * kB * kT; ++i) {
        out.inputs[i] = static_cast<int>(uniform_from_keys(21, rank, i) * config.vocab_size);
        out.targets[i] = i % 7 == 3 ? -1 : static_cast<int>(uniform_from_keys(22, rank, i) * config.vocab_size);
    }
    for (int m = 0; m < micro_steps; ++m) sort_positions(out.sorted_positions + m * kB * kT, out.inputs + m * kB * kT, kB * kT, config.vocab_size, scratch);
}

std::unique_ptr<Trainer> make_trainer(const Process& process, const Communicator& comm, const ModelConfig& config, const ZeroConfig& zero_config) {
    auto trainer = std::make_unique<Trainer>(comm, config, zero_config, Recompute::kNone, kB, kT, 0);
    trainer->choose_products(process);
    trainer->zero.init_params(5, trainer->config.num_layers);
    trainer->zero.start_optimizer();
    return trainer;
}

// ---- 1. bytes sent ----------------------------------------------------------------------------------------------------------------

// What this rank has sent through MPI, without what the collectives put before each message; that is measured, not read from their source.
class MpiMeter {
public:
    MpiMeter(Check& check, const Communicator& comm) {
        if (comm.size() == 1) return;
        if (!kRanksMayShareDevice) {
            if (check.process.rank == 0) printf("skip   collectives are not over MPI: what really goes over the wire is not counted\n");
            return;
        }
        counts_ = true;
        const size_t peers = comm.size() - 1, count = 1000;
        const auto [bytes, messages] = count_collective([&](double* buffer, cudaStream_t stream) { comm.all_gather_in_place(buffer, count, stream); }, comm.size() * count);
        const size_t payload = peers * count * sizeof(double);
        if (messages > 0 && bytes > payload) header_bytes_ = (bytes - payload) / messages;
        check.expect(messages == peers && header_bytes_ > 0 && payload + messages * header_bytes_ == bytes,
                     format("an all-gather of %zu bytes a rank sends %llu messages of %zu + %llu bytes", count * sizeof(double), messages, count * sizeof(double), header_bytes_));
        // Another kind of collective of another size must agree with it.
        const size_t other = 77;
        const auto reduced = count_collective([&](double* buffer, cudaStream_t stream) { comm.reduce_scatter_in_place(buffer, other, stream); }, comm.size() * other);
        check.expect(reduced.second == peers && reduced.first == peers * (other * sizeof(double) + header_bytes_),
                     format("a reduce-scatter of %zu bytes a rank sends %llu messages, %llu bytes", other * sizeof(double), reduced.second, reduced.first));
    }

    bool counts() const { return counts_; }
    // Nothing may be under way on this rank.
    unsigned long long sent_bytes() const { return mpi_bytes - mpi_messages * header_bytes_; }

private:
    template <class Collective>
    static std::pair<unsigned long long, unsigned long long> count_collective(Collective&& collective, size_t elements) {
        DeviceMemory memory;
        double* buffer = memory.allocate<double>("other", "collective", elements);
        cudaStream_t stream;
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA_CHECK(cudaMemsetAsync(buffer, 0, elements * sizeof(double), stream));
        const unsigned long long bytes = mpi_bytes, messages = mpi_messages;
        collective(buffer, stream);
        CUDA_CHECK(cudaStreamSynchronize(stream));
        CUDA_CHECK(cudaStreamDestroy(stream));
        return {mpi_bytes - bytes, mpi_messages - messages};
    }

    bool counts_ = false;
    unsigned long long header_bytes_ = 0;
};

enum class Merging { kNone, kSome, kAll };  // units a bucket: one; two where there are two; all

struct SentCase {
    bool tied;
    Merging merging;
    int stage, micro_steps;
    bool sync_every_micro_step = false, fp32_gradients = false;
    bool large_embedding = false;  // more than twice a layer: it does not share the layers' slots
};

std::string text(const SentCase& c) {
    return format("stage %d, %s%s, %s, %d micro-step%s%s%s", c.stage, c.tied ? "tied" : "untied", c.large_embedding ? " large embedding" : "",
                  c.merging == Merging::kNone ? "one unit a bucket" : c.merging == Merging::kSome ? "two units a bucket" : "one bucket", c.micro_steps, c.micro_steps == 1 ? "" : "s",
                  c.sync_every_micro_step ? ", sync every micro-step" : "", c.fp32_gradients ? ", fp32 gradients" : "");
}

double bucket_mb(Merging merging, const ModelConfig& config) {
    if (merging == Merging::kNone) return 0;
    if (merging == Merging::kAll) return 25;
    const ParamTable table = make_param_table(config);
    return static_cast<double>((table.units[2].count + table.units[3].count) * sizeof(floatX) + 1) / 1e6;  // layers 1 and 2 fit, as embedding and layer 0; no third unit
}

ModelConfig model_of(const SentCase& c) { return small_model(c.tied, 3, c.large_embedding ? 600 : 130); }

// How often stage 3 gathers each bucket in a step of G micro-steps, by hand: nothing is there when the step begins, and what is needed last goes first. With a small
// embedding there are two slots, and one for a tied model's final norm; with a large one two for the layers (and a tied model's norm), and one for embedding and head.
std::vector<size_t> gathers_of_step(const SentCase& c) {
    const bool tied = c.tied;
    const Merging merging = c.merging;
    const size_t G = c.micro_steps;
    if (merging == Merging::kAll) return {1};
    // Untied: layers 1 and 2 stay from forward to backward, layers 0 and 1 from backward to the next micro-step. Tied: the embedding stays; the final norm pushes out
    // layer 1, and in the next micro-step layer 2 is gathered beside it.
    if (c.large_embedding) return tied ? std::vector<size_t>{1, G + 1, G + 1, G, G} : std::vector<size_t>{G, G + 1, 1, G, G};
    // [embedding, layer 0] [layer 1, layer 2] [head]. Untied: the head pushes out the first, which comes back for backward and is still there when the next micro-step
    // begins. Tied: three buckets, three slots.
    if (merging == Merging::kSome) return tied ? std::vector<size_t>{1, 1, 1} : std::vector<size_t>{G + 1, 1, G};
    // Layer 2 stays from forward to backward (untied: beside the head; tied: beside the embedding, which the head needs too, so it comes twice), layer 0 from
    // backward to the next micro-step's forward. Layer 1 comes twice.
    return tied ? std::vector<size_t>{2 * G, G + 1, 2 * G, G, 1} : std::vector<size_t>{G, G + 1, 2 * G, G, G};
}

std::vector<size_t> gathers_of_forward(const SentCase& c) {
    std::vector<size_t> gathers(c.merging == Merging::kAll ? 1 : c.merging == Merging::kSome ? 3 : 5, 1);
    if (c.tied && c.merging == Merging::kNone && !c.large_embedding) gathers[0] = 2;
    return gathers;
}

// Bytes of parameters that a rank sends when bucket b is gathered gathers[b] times.
unsigned long long gathered_bytes(const FlatLayout& layout, const std::vector<size_t>& gathers) {
    unsigned long long slices = 0;
    for (size_t b = 0; b < layout.buckets.size() && b < gathers.size(); ++b) slices += gathers[b] * layout.buckets[b].count / layout.num_ranks;
    return slices * (layout.num_ranks - 1) * sizeof(floatX);
}

// Two more all-gathers a step, whatever the stage: a count of targets, and two sums and the requests.
unsigned long long small_collective_bytes(const FlatLayout& layout) { return (layout.num_ranks - 1) * (sizeof(unsigned long long) + 3 * sizeof(double)); }

// The design's table. All that is "sharded" or "whole" there is seen in these factors alone.
unsigned long long expected_step_bytes(const SentCase& c, const FlatLayout& layout) {
    size_t elements = 0;
    for (const Bucket& bucket : layout.buckets) elements += bucket.count;
    const unsigned long long x_elements = elements / layout.num_ranks * (layout.num_ranks - 1);  // x = (N-1)/N
    const unsigned long long x_gradients = x_elements * (c.fp32_gradients ? sizeof(float) : sizeof(floatX)), x_params = x_elements * sizeof(floatX), G = c.micro_steps;
    unsigned long long bytes = 0;
    switch (c.stage) {
        case 0: bytes = (c.sync_every_micro_step ? G : 1) * 2 * x_gradients; break;
        case 1: bytes = (c.sync_every_micro_step ? G : 1) * x_gradients + x_params; break;
        case 2: bytes = G * x_gradients + x_params; break;
        case 3: bytes = G * x_gradients + gathered_bytes(layout, gathers_of_step(c)); break;
    }
    return bytes + small_collective_bytes(layout);
}

// Bytes of a step or of a forward pass, from four sides.
struct Figures {
    unsigned long long counted, schedule, formula, mpi;
    bool agree() const { return counted == schedule && counted == formula && counted == mpi; }
    std::string text() const { return format("%llu bytes counted, %llu in the schedule, %llu by formula, %llu over MPI", counted, schedule, formula, mpi); }
};

ZeroConfig zero_config(const SentCase& c, const ModelConfig& config) {
    ZeroConfig zero;
    zero.stage = c.stage;
    zero.bucket_mb = bucket_mb(c.merging, config);
    zero.micro_steps = c.micro_steps;
    zero.sync_every_micro_step = c.sync_every_micro_step;
    zero.fp32_gradients = c.fp32_gradients;
    return zero;
}

// Returns a step's bytes as counted.
unsigned long long check_sent(Check& check, const Communicator& comm, const MpiMeter& meter, const SentCase& c) {
    const ModelConfig config = model_of(c);
    const auto trainer = make_trainer(check.process, comm, config, zero_config(c, config));
    const FlatLayout& layout = trainer->zero.layout();
    HostBatch batch(trainer->tokens_per_step());
    fill_batch(batch.buffers(), c.micro_steps, config, check.process.rank);
    trainer->zero.synchronize();
    bool agree = layout.buckets.size() == gathers_of_forward(c).size();
    Figures figures{};
    for (int step = 0; step < 2 && agree; ++step) {
        const unsigned long long mpi_before = meter.sent_bytes();
        trainer->queue_step({step, 1e-3, 1.0, 77, step}, batch.buffers());
        trainer->zero.synchronize();  // the sends are this process's own: none is left when its streams are empty
        figures = {trainer->sent_bytes[step], trainer->zero.schedule().step_sent_bytes(), expected_step_bytes(c, layout), 0};
        figures.mpi = meter.counts() ? meter.sent_bytes() - mpi_before : figures.counted;
        agree = figures.agree();
    }
    check.expect(agree, format("%s: a step sends %s", text(c).c_str(), figures.text().c_str()));
    if (c.stage == 3) {
        const unsigned long long x_params = (layout.num_ranks - 1) * layout.shard_count * sizeof(floatX);
        const unsigned long long x_gradients = (layout.num_ranks - 1) * layout.shard_count * (c.fp32_gradients ? sizeof(float) : sizeof(floatX));
        const unsigned long long limit = c.micro_steps * (2 * x_params + x_gradients) + small_collective_bytes(layout);
        check.expect(figures.counted <= limit, format("%s: %llu bytes are at most G (2x parameters + x gradients), %llu", text(c).c_str(), figures.counted, limit));
    }
    if (c.micro_steps == 1 && !c.sync_every_micro_step) {
        const unsigned long long mpi_before = meter.sent_bytes(), counted_before = comm.sent_bytes();
        trainer->queue_forward(kB, [&] { trainer->model.head_losses(trainer->zero, trainer->targets); });
        trainer->zero.synchronize();
        Figures forward = {comm.sent_bytes() - counted_before, trainer->zero.schedule().forward_sent_bytes(), 0, 0};
        if (c.stage == 3) forward.formula = gathered_bytes(layout, gathers_of_forward(c));
        forward.mpi = meter.counts() ? meter.sent_bytes() - mpi_before : forward.counted;
        check.expect(forward.agree(), format("%s: a forward pass sends %s", text(c).c_str(), forward.text().c_str()));
    }
    return figures.counted - small_collective_bytes(layout);
}

void check_bytes_sent(Check& check, const Communicator& comm) {
    const MpiMeter meter(check, comm);
    for (const bool tied : {false, true}) {
        for (const Merging merging : {Merging::kNone, Merging::kSome, Merging::kAll}) {
            for (const int stage : {0, 1, 2, 3}) {
                for (const int micro_steps : {1, 4}) check_sent(check, comm, meter, {tied, merging, stage, micro_steps});
                if (stage <= 1 && merging != Merging::kSome) check_sent(check, comm, meter, {tied, merging, stage, 4, true});
            }
        }
        for (const int micro_steps : {1, 4}) check_sent(check, comm, meter, {.tied = tied, .merging = Merging::kNone, .stage = 3, .micro_steps = micro_steps, .large_embedding = true});
    }
    for (const int stage : {0, 1, 2, 3}) check_sent(check, comm, meter, {false, Merging::kNone, stage, 4, false, true});
    // Reducing once a step instead of on every micro-step saves the factor G.
    const unsigned long long every = check_sent(check, comm, meter, {false, Merging::kNone, 0, 16, true}), once = check_sent(check, comm, meter, {false, Merging::kNone, 0, 16, false});
    const double ratio = once > 0 ? static_cast<double>(every) / static_cast<double>(once) : 1;  // one rank sends nothing
    check.expect(every == 16 * once && (once > 0) == (comm.size() > 1),
                 format("stage 0, 16 micro-steps: gradients synchronised on every one send %llu bytes, at the end %llu bytes: %.6g times as many", every, once, ratio));
}

// ---- 2. memory of the state -------------------------------------------------------------------------------------------------------

size_t bytes_in(const DeviceMemory& memory, const std::vector<std::string>& categories) {
    size_t bytes = 0;
    for (const auto& [category, category_bytes] : memory.bill().categories) {
        if (std::find(categories.begin(), categories.end(), category) != categories.end()) bytes += category_bytes;
    }
    return bytes;
}

const std::vector<std::string> kState = {"parameters", "gradients", "optimizer"};

// Bytes of state where `whole` elements are held of what is whole and `shard` of what is sharded.
template <class Number>
Number state_bytes(int stage, bool sync_every_micro_step, size_t gradient_bytes, Number whole, Number shard) {
    const size_t p = sizeof(floatX), g = gradient_bytes, optimizer = 3 * sizeof(float);  // master weights, two moments
    switch (stage) {
        case 0: return (p + g + optimizer) * whole + (sync_every_micro_step ? g * shard : 0);  // beside the whole gradients the sum so far of a rank's slices
        case 1: return sync_every_micro_step ? p * whole + (g + optimizer) * shard : (p + g) * whole + optimizer * shard;
        case 2: return p * whole + (g + optimizer) * shard;
        default: return (p + g + optimizer) * shard;
    }
}

void check_state_memory(Check& check, const Communicator& comm, bool tied, int stage, bool sync_every_micro_step, bool fp32_gradients) {
    const ModelConfig config = deep_model(tied, 384);  // no padding of the vocabulary, which is not what is asked here
    ZeroConfig zero;
    zero.stage = stage;
    zero.bucket_mb = 0;
    zero.micro_steps = 2;
    zero.sync_every_micro_step = sync_every_micro_step;
    zero.fp32_gradients = fp32_gradients;
    const Trainer trainer(comm, config, zero, Recompute::kNone, kB, kT, 0);
    // The flat buffer by hand: units padded to slices of 64 elements a rank, each beginning on 128.
    const size_t ranks = comm.size();
    size_t whole = 0, shard = 0, unpadded = 0;
    for (const Unit& unit : trainer.table.units) {
        whole = round_up(whole, 128) + round_up(unit.count, 64 * ranks);
        shard += round_up(unit.count, 64 * ranks) / ranks;
        unpadded += unit.count;
    }
    const size_t gradient_bytes = fp32_gradients ? sizeof(float) : sizeof(floatX);
    const size_t held = bytes_in(trainer.memory, kState), expected = state_bytes(stage, sync_every_micro_step, gradient_bytes, whole, shard);
    // In bytes a parameter: the design's figure, and what alignment and padding may add to it.
    const double params = static_cast<double>(trainer.table.parameter_count());
    const double exact = state_bytes<double>(stage, sync_every_micro_step, gradient_bytes, 1.0, 1.0 / ranks);
    const double most = exact * (unpadded + trainer.table.units.size() * (64 * ranks + 128.0)) / params;
    const bool fine = held == expected && whole == trainer.zero.layout().total_count && shard == trainer.zero.layout().shard_count && held / params >= exact && held / params <= most;
    check.expect(fine, format("state of stage %d%s%s, %s: %zu bytes, expected %zu; %.3f a parameter, %.3f without padding", stage, sync_every_micro_step ? ", sync every micro-step" : "",
                              fp32_gradients ? ", fp32 gradients" : "", tied ? "tied" : "untied", held, expected, held / params, exact));
}

// What stage 2 holds beside stage 1's buffers: gradients between backward and reduction. One unit a bucket: 0 the embedding, 1 to 3 layers, 4 the head.
void check_buckets_in_flight(Check& check, const Communicator& comm, bool tied, bool large_embedding) {
    const SentCase c = {.tied = tied, .merging = Merging::kNone, .stage = 1, .micro_steps = 1, .large_embedding = large_embedding};
    const ModelConfig config = model_of(c);
    size_t buffers[2];
    std::vector<size_t> counts;
    for (const int stage : {1, 2}) {
        ZeroConfig zero = zero_config(c, config);
        zero.stage = stage;
        const Trainer trainer(comm, config, zero, Recompute::kNone, kB, kT, 0);
        buffers[stage - 1] = bytes_in(trainer.memory, {"buffers", "staging"});
        counts.clear();
        for (const Bucket& bucket : trainer.zero.layout().buckets) counts.push_back(bucket.count);
    }
    // Tied: the embedding and two layers. Untied and large: embedding or head, and two layers; small: two of the largest.
    const size_t ends = std::max(counts[0], counts[4]), layer = counts[1];
    const size_t expected = (tied ? counts[0] + 2 * layer : large_embedding ? ends + 2 * layer : 2 * std::max(ends, layer)) * sizeof(floatX), held = buffers[1] - buffers[0];
    check.expect(held == expected, format("gradients in flight in stage 2, %s, %s embedding: %zu bytes, expected %zu", tied ? "tied" : "untied", large_embedding ? "large" : "small", held, expected));
}

// ---- 3. stage 3 in a deep model ---------------------------------------------------------------------------------------------------

void check_deep_memory(Check& check, const Communicator& comm, bool tied, int micro_steps) {
    const ModelConfig config = deep_model(tied, 257);
    ZeroConfig zero;
    zero.bucket_mb = 0;
    zero.micro_steps = micro_steps;
    zero.stage = 0;
    const size_t whole = bytes_in(Trainer(comm, config, zero, Recompute::kNone, kB, kT, 0).memory, kState);
    zero.stage = 3;
    const auto trainer = make_trainer(check.process, comm, config, zero);
    const size_t before = trainer->memory.total_bytes(), sharded = bytes_in(trainer->memory, {"parameters", "gradients", "optimizer", "buffers", "staging"});
    HostBatch batch(trainer->tokens_per_step());
    fill_batch(batch.buffers(), micro_steps, config, check.process.rank);
    trainer->queue_step({0, 1e-3, 1.0, 77, 0}, batch.buffers());
    trainer->zero.synchronize();
    const std::string what = format("stage 3, %d layers, %s, %d micro-step%s", config.num_layers, tied ? "tied" : "untied", micro_steps, micro_steps == 1 ? "" : "s");
    const double share = static_cast<double>(sharded) / static_cast<double>(whole);
    check.expect(share < 0.35 && trainer->memory.total_bytes() == before,
                 format("%s: state and buffers take %.1f %% of stage 0's state (%zu of %zu bytes), also in a step", what.c_str(), 100 * share, sharded, whole));
    // Two units, whichever; a tied model's final norm is a third.
    const auto padded = [&](const Unit& unit) { return round_up(unit.count, 64 * comm.size()); };
    size_t largest = 0, slots = 0;
    for (const Unit& unit : trainer->table.units) largest = std::max(largest, padded(unit));
    for (const size_t count : trainer->zero.schedule().slot_counts) slots += count;
    const size_t expected = 2 * largest + (tied ? padded(trainer->table.units.back()) : 0);
    check.expect(slots == expected && trainer->zero.schedule().slot_counts.size() == (tied ? 3u : 2u),
                 format("%s: gathered parameters take %zu elements in %zu slots, the largest unit twice%s %zu", what.c_str(), slots, trainer->zero.schedule().slot_counts.size(),
                        tied ? " and the final norm" : "", expected));
}

// ---- 4. levers and the limit ------------------------------------------------------------------------------------------------------

// Bytes of one layer's activations that are kept for one layer only.
size_t shared_layer_bytes(const ModelConfig& config, Recompute recompute) {
    const size_t N = static_cast<size_t>(kB) * kT, C = config.channels, F = config.ffn_dim, NH = config.num_heads, NKV = config.num_kv_heads, HD = config.head_dim;
    const size_t norms = 2 * N * C, feed_forward = 3 * N * F, qkv = N * (NH + 2 * NKV) * HD, attention = N * NH * HD, residual_mid = N * C;
    const size_t qk = config.qk_norm ? N * (NH + NKV) * HD : 0, qk_rstd = config.qk_norm ? N * (NH + NKV) : 0;
    const size_t rstd = 2 * N, lse = N * NH;
    switch (recompute) {
        case Recompute::kNone: return 0;
        case Recompute::kNorm: return norms * sizeof(floatX);
        case Recompute::kFfn: return (norms + feed_forward) * sizeof(floatX);
        case Recompute::kBlock: return (norms + feed_forward + qkv + qk + attention + residual_mid) * sizeof(floatX) + (rstd + lse + qk_rstd) * sizeof(float);
    }
    return 0;
}

void check_levers(Check& check, const Communicator& comm, bool tied) {
    const ModelConfig config = small_model(tied, 3, 130);
    ZeroConfig zero;
    zero.stage = 1;
    const auto measure = [&](Recompute recompute, int chunks) {
        ZeroConfig chunked = zero;
        chunked.lmhead_chunks = chunks;
        const Trainer trainer(comm, config, chunked, recompute, kB, kT, 0);
        return std::pair{bytes_in(trainer.memory, {"activations"}), trainer.memory.total_bytes()};
    };
    const char* kind = config.qk_norm ? "with QK-norm" : "without QK-norm";
    const auto [activations, total] = measure(Recompute::kNone, 1);
    for (const char* name : {"norm", "ffn", "block"}) {
        const auto [left, left_total] = measure(recompute_from_name(name), 1);
        const size_t saved = (config.num_layers - 1) * shared_layer_bytes(config, recompute_from_name(name));
        check.expect(activations - left == saved && total - left_total == saved,
                     format("recompute %s, %s: %zu bytes of activations less, of all memory %zu, expected %zu", name, kind, activations - left, total - left_total, saved));
    }
    for (const int chunks : {2, 8}) {
        const auto [left, left_total] = measure(Recompute::kNone, chunks);
        const size_t saved = static_cast<size_t>(kB * kT / chunks) * (chunks - 1) * config.padded_vocab() * sizeof(floatX);
        // With one micro-step only the chunks' addends need a place to be added from: the unit with the weight, and at most the other one of the head's two.
        const ParamTable table = make_param_table(config);
        const size_t staging = left_total + saved - total, least = table.units[tied ? table.embedding_unit() : table.head_unit()].count * sizeof(floatX);
        const size_t most = least + (tied ? table.units[table.head_unit()].count * sizeof(floatX) : 0);
        check.expect(activations - left == saved && staging >= least && staging <= most,
                     format("%d chunks of the head, %s: %zu bytes of activations less, expected %zu; staging of %zu bytes more, expected %zu to %zu", chunks, tied ? "tied" : "untied",
                            activations - left, saved, staging, least, most));
    }
}

void check_limit(Check& check, const Communicator& comm, int stage) {
    ZeroConfig zero;
    zero.stage = stage;
    const auto try_with = [&](size_t limit, std::string* error) {
        try {
            return Trainer(comm, small_model(true, 3, 130), zero, Recompute::kNone, kB, kT, limit).memory.total_bytes();
        } catch (const Error& e) {
            *error = e.what();
            return size_t{0};
        }
    };
    std::string unlimited_error, enough_error, short_error;
    const size_t total = try_with(0, &unlimited_error), enough = try_with(total, &enough_error), none = try_with(total - 1, &short_error);
    check.expect(total > 0 && unlimited_error.empty() && enough == total && enough_error.empty(), format("stage %d fits a --device-memory of the %zu bytes it takes", stage, total));
    check.expect(none == 0 && short_error.find("out of device memory") != std::string::npos, format("stage %d in one byte less: %s", stage, short_error.c_str()));
}

size_t free_device_bytes() {
    size_t free_bytes = 0, device_bytes = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &device_bytes));
    return free_bytes;
}

// The pieces that the device gives memory out in; 0 where they are too large to compare anything with.
size_t piece_of_device() {
    constexpr size_t kFinePiece = 4096;
    const size_t before = free_device_bytes();
    void* probe = nullptr;
    CUDA_CHECK(cudaMalloc(&probe, 1));
    const size_t piece = before - free_device_bytes();
    CUDA_CHECK(cudaFree(probe));
    return piece >= 1 && piece <= kFinePiece ? piece : 0;
}

// The table of memory against the device's own figure, where that is exact and this rank's alone: hostcuda's is, a GPU gives memory out in large pieces.
void check_device_account(Check& check, const Communicator& comm, int stage) {
    constexpr size_t kMostAllocations = 128;
    const size_t piece = piece_of_device();
    if (piece == 0) {
        if (check.process.rank == 0) printf("skip   this device counts memory in pieces that are too coarse to compare with the table\n");
        return;
    }
    ZeroConfig zero;
    zero.stage = stage;
    zero.bucket_mb = 0;
    zero.micro_steps = 2;
    const size_t before = free_device_bytes();
    const auto trainer = make_trainer(check.process, comm, small_model(false, 3, 130), zero);
    HostBatch batch(trainer->tokens_per_step());
    fill_batch(batch.buffers(), zero.micro_steps, trainer->config, check.process.rank);
    trainer->queue_step({0, 1e-3, 1.0, 77, 0}, batch.buffers());
    trainer->zero.synchronize();
    const size_t taken = before - free_device_bytes(), table = trainer->memory.total_bytes();
    check.expect(taken >= table && taken <= table + kMostAllocations * piece,
                 format("stage %d: after a step the device has given out %zu bytes, the table has %zu, rounding is at most %zu", stage, taken, table, kMostAllocations * piece));
}

// ---- 5. planned against allocated -------------------------------------------------------------------------------------------------

std::string categories_text(const MemoryBill& bill) {
    std::string text;
    for (const auto& [category, bytes] : bill.categories) text += format("%s %zu, ", category.c_str(), bytes);
    return text + format("together %zu", bill.total_bytes);
}

// As the trainer starts that preset, with `micro_steps` a step. The device gives memory out in pieces of `piece` bytes.
void check_plan(Check& check, const Communicator& comm, const std::string& preset, int stage, const std::string& recompute, int micro_steps, size_t piece) {
    const std::string stage_text = std::to_string(stage);
    const char* words[] = {"train_gpt", "--preset", preset.c_str(), "--zero-stage", stage_text.c_str(), "--recompute", recompute.c_str(), stage == 1 ? "--bucket-mb=0" : "--bucket-mb=25",
                           "--grad-dtype", stage == 2 ? "fp32" : "bf16"};
    Options options = parse_options(static_cast<int>(std::size(words)), words);
    const RunShape shape = run_shape(options, model_config_from_options(options), micro_steps, comm.size());
    PlanRequest request;
    request.shape = shape;
    const MemoryBill planned = plan_memory(request, count_run).memory;
    const size_t before = free_device_bytes();
    const Trainer trainer(comm, shape.config, zero_config(shape), recompute_from_name(recompute), shape.micro_batch, shape.seq_len, 0);
    const size_t given_out = before - free_device_bytes(), most_rounding = piece * (20 * static_cast<size_t>(shape.config.num_layers) + 64);
    const MemoryBill& taken = trainer.memory.bill();
    const bool device_agrees = piece == 0 || (given_out >= planned.total_bytes && given_out <= planned.total_bytes + most_rounding);
    check.expect(planned.categories == taken.categories && planned.total_bytes == taken.total_bytes && device_agrees,
                 format("%s, stage %d, recompute %s, %d micro-step(s): planned %s; allocated %s; the device gave out %zu", preset.c_str(), stage, recompute.c_str(), micro_steps,
                        categories_text(planned).c_str(), categories_text(taken).c_str(), given_out));
}

void check_plans(Check& check, const Communicator& comm) {
    const size_t piece = piece_of_device();
    for (const std::string& preset : preset_names()) {
        for (const int stage : {0, 1, 2, 3}) {
            for (const char* recompute : {"none", "norm", "ffn", "block"}) check_plan(check, comm, preset, stage, recompute, 1 + stage % 2, piece);
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    setenv("HOSTCUDA_MEMORY", "4000GB", 0);  // a CPU backs only what is touched, and nothing of the large presets is
    return run_main(argc, argv, [&](const Process& process) {
        select_device(process);
        const Communicator comm(process);
        Check check{process};
        check_bytes_sent(check, comm);
        for (const int stage : {0, 1, 2, 3}) {
            for (const bool tied : {false, true}) {
                check_state_memory(check, comm, tied, stage, false, false);
                if (stage <= 1) check_state_memory(check, comm, tied, stage, true, false);
                check_state_memory(check, comm, tied, stage, false, true);
            }
        }
        if (comm.size() == 4) {
            for (const bool tied : {false, true}) {
                for (const int micro_steps : {1, 4}) check_deep_memory(check, comm, tied, micro_steps);
            }
        } else if (process.rank == 0) {
            printf("skip   the share of memory that stage 3 takes is checked with 4 ranks, these are %d\n", comm.size());
        }
        for (const bool tied : {false, true}) {
            for (const bool large_embedding : {false, true}) check_buckets_in_flight(check, comm, tied, large_embedding);
        }
        for (const bool tied : {false, true}) check_levers(check, comm, tied);
        for (const int stage : {1, 3}) check_limit(check, comm, stage);
        for (const int stage : {0, 1, 2, 3}) check_device_account(check, comm, stage);
        check_plans(check, comm);
        if (process.rank == 0) printf("%d passed, %d failed\n", check.passed, check.failed);
        return check.failed ? 1 : 0;
    });
}
