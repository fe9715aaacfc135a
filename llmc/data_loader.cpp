#include "llmc/data_loader.h"

#include <algorithm>
#include <chrono>

#include <xxhash.h>

#include "llmc/error.h"

WindowIndex::WindowIndex(const ShardSet& shards, int seq_len) : shards_(shards), seq_len_(seq_len) {
    CHECK(seq_len >= 1, "the sequence length is %d; it must be at least 1", seq_len);
    first_.push_back(0);
    for (const TokenShard& shard : shards.shards) {
        const long long count = static_cast<long long>(shard.count());
        const long long windows = count > 0 ? (count - 1) / seq_len : 0;
        // Windows share their end token with the next one's start, so n windows cover n * T + 1 tokens.
        dropped_tokens_ += windows > 0 ? count - (windows * seq_len + 1) : count;
        first_.push_back(first_.back() + windows);
    }
}

WindowIndex::Place WindowIndex::place(long long window) const {
    CHECK(window >= 0 && window < count(), "window %lld is outside the data's %lld windows", window, count());
    const size_t shard = std::upper_bound(first_.begin(), first_.end(), window) - first_.begin() - 1;
    const long long local = window - first_[shard];
    return {shard, local, static_cast<size_t>(local) * seq_len_};
}

int WindowIndex::read(long long window, int vocab_size, int* inputs, int* targets) const {
    const Place where = place(window);
    const TokenShard& shard = shards_.shards[where.shard];
    int valid = 0;
    for (int t = 0; t <= seq_len_; ++t) {
        const size_t i = where.first_token + t;
        const uint32_t token = shard.token(i);
        if (token >= static_cast<uint32_t>(vocab_size))
            fail("%s: the token at offset %zu is %u, outside the vocabulary of %d; make the data with the model's tokenizer, or set --vocab-size",
                 shard.path().c_str(), shard.offset_bytes(i), token, vocab_size);
        if (t < seq_len_) inputs[t] = static_cast<int>(token);
        if (t > 0) {
            const bool counts = shard.counts_as_target(i);
            targets[t - 1] = counts ? static_cast<int>(token) : -1;
            valid += counts;
        }
    }
    return valid;
}

std::string data_fingerprint(const ShardSet& set) {
    XXH64_state_t* state = XXH64_createState();
    XXH64_reset(state, 0);
    for (const TokenShard& shard : set.shards) {
        const std::string name = shard.path().substr(shard.path().rfind('/') + 1);  // rfind's npos + 1 is 0: a bare name
        const uint64_t numbers[] = {name.size(), shard.count(), shard.has_mask()};
        XXH64_update(state, numbers, sizeof numbers);
        XXH64_update(state, name.data(), name.size());
        XXH64_update(state, shard.header(), TokenShard::kHeaderBytes);
    }
    const unsigned long long hash = XXH64_digest(state);
    XXH64_freeState(state);
    return format("%016llx", hash);
}

void sort_positions(int* sorted_positions, const int* tokens, int count, int vocab_size, std::vector<uint64_t>& scratch) {
    if (vocab_size > 16ll * count) {
        // Few tokens of a large vocabulary: clearing and summing one count an id would cost more than the sort itself.
        scratch.resize(count);
        for (int i = 0; i < count; ++i) scratch[i] = static_cast<uint64_t>(tokens[i]) << 32 | static_cast<uint32_t>(i);
        std::sort(scratch.begin(), scratch.end());
        for (int i = 0; i < count; ++i) sorted_positions[i] = static_cast<int>(scratch[i] & 0xffffffffu);
        return;
    }
    scratch.assign(static_cast<size_t>(vocab_size) + 1, 0);
    for (int i = 0; i < count; ++i) ++scratch[tokens[i] + 1];
    for (int v = 0; v < vocab_size; ++v) scratch[v + 1] += scratch[v];
    for (int i = 0; i < count; ++i) sorted_positions[scratch[tokens[i]]++] = i;
}

namespace {

void check_settings(const LoaderSettings& s) {
    CHECK(s.micro_batch >= 1 && s.seq_len >= 1 && s.grad_accum >= 1, "micro-batch %d, sequence length %d and micro-steps %d must be at least 1", s.micro_batch,
          s.seq_len, s.grad_accum);
    CHECK(s.ranks >= 1 && s.rank >= 0 && s.rank < s.ranks, "rank %d of %d does not exist", s.rank, s.ranks);
    CHECK(s.vocab_size >= 1, "the vocabulary size is %d; it must be at least 1", s.vocab_size);
    CHECK(s.windows_consumed >= 0, "windows consumed is %lld; it must not be negative", s.windows_consumed);
}

double milliseconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

DataLoader::DataLoader(const std::string& pattern, const LoaderSettings& settings, std::vector<BatchBuffers> buffers)
    : settings_(settings), shards_(open_shards(pattern)), index_(shards_, settings.seq_len) {
    check_settings(settings_);
    windows_per_step_ = static_cast<long long>(settings_.grad_accum) * settings_.ranks * settings_.micro_batch;
    CHECK(windows() >= windows_per_step_,
          "`%s` holds %lld windows of %d + 1 tokens (%zu tokens in %zu shards), fewer than the %lld of one global batch (%d micro-steps x %d ranks x micro-batch %d); use a "
          "smaller --total-batch, --micro-batch or --seq-len, or more data",
          pattern.c_str(), windows(), settings_.seq_len, shards_.count, shards_.shards.size(), windows_per_step_, settings_.grad_accum, settings_.ranks, settings_.micro_batch);
    if (buffers.empty()) {
        const size_t count = static_cast<size_t>(settings_.grad_accum) * settings_.micro_batch * settings_.seq_len;
        for (int slot = 0; slot < 2; ++slot) {
            for (int part = 0; part < 3; ++part) own_memory_.emplace_back(count);
            const size_t at = own_memory_.size() - 3;
            buffers.push_back({own_memory_[at].data(), own_memory_[at + 1].data(), own_memory_[at + 2].data()});
        }
    }
    CHECK(buffers.size() >= 2, "the loader has buffers for %zu steps; it needs at least 2, one in use and one to read ahead into", buffers.size());
    for (const BatchBuffers& b : buffers) {
        slots_.emplace_back();
        slots_.back().buffers = b;
    }
    thread_ = std::thread(&DataLoader::read_ahead, this);
}

DataLoader::~DataLoader() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

long long DataLoader::window_at(long long position, Permutation& order, long long& order_epoch) const {
    const long long epoch = position / windows();
    if (epoch != order_epoch) {
        order = Permutation(windows(), settings_.seed, epoch);
        order_epoch = epoch;
    }
    return static_cast<long long>(order(position % windows()));
}

void DataLoader::fill(long long batch, StepBatch& out) {
    const LoaderSettings& s = settings_;
    const long long start = s.windows_consumed + batch * windows_per_step_;
    const size_t micro_count = static_cast<size_t>(s.micro_batch) * s.seq_len;
    out.index = batch;
    out.windows_consumed = start + windows_per_step_;
    out.epoch = static_cast<double>(out.windows_consumed) / static_cast<double>(windows());
    out.valid_targets = 0;
    for (int m = 0; m < s.grad_accum; ++m) {
        int* inputs = out.buffers.inputs + m * micro_count;
        int* targets = out.buffers.targets + m * micro_count;
        for (int b = 0; b < s.micro_batch; ++b) {
            const long long position = start + (static_cast<long long>(m) * s.ranks + s.rank) * s.micro_batch + b;
            const size_t row = static_cast<size_t>(b) * s.seq_len;
            out.valid_targets += index_.read(window_at(position, order_, order_epoch_), s.vocab_size, inputs + row, targets + row);
        }
        sort_positions(out.buffers.sorted_positions + m * micro_count, inputs, narrow_int(micro_count, "micro-batch x seq-len"), s.vocab_size, sort_scratch_);
    }
}

// The reading thread: fills slots round robin, never the one the caller holds.
void DataLoader::read_ahead() {
    const long long num_slots = static_cast<long long>(slots_.size());
    for (long long batch = 0;; ++batch) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            // Batch taken_ - 1 is in the caller's hands; this slot is free when it is new or what it held is older than that.
            changed_.wait(lock, [&] { return stop_ || batch < num_slots || batch - num_slots < taken_ - 1; });
            if (stop_) return;
        }
        std::exception_ptr error;
        try {
            fill(batch, slots_[batch % num_slots]);
        } catch (...) {
            error = std::current_exception();
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (error) error_ = error;
            else filled_ = batch + 1;
        }
        changed_.notify_all();
        if (error) return;
    }
}

const StepBatch& DataLoader::next() {
    const auto start = std::chrono::steady_clock::now();
    std::unique_lock<std::mutex> lock(mutex_);
    // The batch in hand is given back only when its successor is certain, so that with an error the caller's buffers stay valid.
    const long long batch = taken_;
    changed_.wait(lock, [&] { return filled_ > batch || error_; });
    if (filled_ <= batch) std::rethrow_exception(error_);
    ++taken_;
    lock.unlock();
    changed_.notify_all();
    StepBatch& out = slots_[batch % static_cast<long long>(slots_.size())];
    out.wait_ms = milliseconds_since(start);
    return out;
}

std::vector<WindowOrigin> DataLoader::describe(long long step) const {
    CHECK(step >= 0 && step <= (1ll << 62) / windows_per_step_ - 1, "step %lld does not exist; give a step of at least 0", step);
    Permutation order;
    long long order_epoch = -1;
    std::vector<WindowOrigin> rows;
    rows.reserve(windows_per_step_);
    for (long long i = 0; i < windows_per_step_; ++i) {
        const long long position = step * windows_per_step_ + i;
        const WindowIndex::Place where = index_.place(window_at(position, order, order_epoch));
        const long long block = i / settings_.micro_batch;
        rows.push_back({position, position / windows(), static_cast<int>(block % settings_.ranks), static_cast<int>(block / settings_.ranks),
                        static_cast<int>(i % settings_.micro_batch), shards_.shards[where.shard].path(), where.first_token});
    }
    return rows;
}

ValLoader::ValLoader(const std::string& pattern, const LoaderSettings& settings, long long num_windows)
    : settings_(settings), shards_(open_shards(pattern)), index_(shards_, settings.seq_len) {
    check_settings(settings_);
    CHECK(windows() >= 1, "`%s` holds no window of %d + 1 tokens (%zu tokens in %zu shards); use a smaller --seq-len, or more data", pattern.c_str(), settings_.seq_len,
          shards_.count, shards_.shards.size());
    CHECK(num_windows >= 0 && num_windows <= windows(), "%lld validation sequences are asked for, but `%s` holds %lld; use --val-batches %lld at most, or 0 for all", num_windows,
          pattern.c_str(), windows(), windows() / settings_.micro_batch);
    num_windows_ = num_windows == 0 ? windows() : num_windows;
    const long long per_step = static_cast<long long>(settings_.ranks) * settings_.micro_batch;
    num_steps_ = (num_windows_ + per_step - 1) / per_step;
}

long long ValLoader::fill(long long step, int* inputs, int* targets) const {
    CHECK(step >= 0 && step < num_steps_, "validation step %lld is outside the %lld there are", step, num_steps_);
    long long valid = 0;
    for (int b = 0; b < settings_.micro_batch; ++b) {
        const long long window = (step * settings_.ranks + settings_.rank) * settings_.micro_batch + b;
        int* row_inputs = inputs + static_cast<size_t>(b) * settings_.seq_len;
        int* row_targets = targets + static_cast<size_t>(b) * settings_.seq_len;
        if (window < num_windows_) {
            valid += index_.read(window, settings_.vocab_size, row_inputs, row_targets);
        } else {
            std::fill(row_inputs, row_inputs + settings_.seq_len, 0);
            std::fill(row_targets, row_targets + settings_.seq_len, -1);
        }
    }
    return valid;
}
