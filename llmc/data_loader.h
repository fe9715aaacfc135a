// Which tokens a step trains on.
//
// A window is T + 1 tokens inside one shard, windows start every T tokens; what is left at a shard's end is dropped and counted. All
// windows of an epoch are put into one order by a permutation computed from (seed, epoch), epochs follow each other, and global batch
// g is the next windows_per_step windows of that order. Row b of micro-step m on rank r is window (m * ranks + r) * B + b of the batch: ranks
// only choose who computes which, so the content of a batch does not depend on their number. The whole state is one integer, the
// number of windows consumed.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "llmc/permutation.h"
#include "llmc/token_shard.h"

// The windows of a shard set, numbered shard by shard.
class WindowIndex {
public:
    // Keeps a reference to the shards.
    WindowIndex(const ShardSet& shards, int seq_len);

    long long count() const { return first_.back(); }            // windows of all shards
    long long dropped_tokens() const { return dropped_tokens_; }  // at the shards' ends, in no window
    struct Place { size_t shard; long long window; size_t first_token; };
    Place place(long long window) const;

    // Writes T inputs and T targets (-1 where the mask says so). Throws Error naming file and offset when an id is not below vocab_size.
    // Returns the number of targets that count.
    int read(long long window, int vocab_size, int* inputs, int* targets) const;

    const ShardSet& shards() const { return shards_; }
    int seq_len() const { return seq_len_; }

private:
    const ShardSet& shards_;
    int seq_len_;
    std::vector<long long> first_;  // (shards + 1) number of each shard's first window
    long long dropped_tokens_ = 0;
};

// Identifies the data: names, token counts and headers of the shards in order, presence of masks. Not the folder they lie in, and not
// the tokens themselves. 16 hexadecimal digits.
std::string data_fingerprint(const ShardSet& shards);

// Positions 0 .. count-1 stably sorted by tokens[position], each token in [0, vocab_size); what the embedding's backward pass walks.
// `scratch` is kept by the caller so that no step allocates.
void sort_positions(int* sorted_positions, const int* tokens, int count, int vocab_size, std::vector<uint64_t>& scratch);

struct LoaderSettings {
    int micro_batch = 1;  // B
    int seq_len = 1;      // T
    int grad_accum = 1;   // G
    int rank = 0, ranks = 1;
    int vocab_size = 0;
    uint64_t seed = 0;
    long long windows_consumed = 0;  // where to go on
};

// Memory for one step of one rank, given by the caller (pinned, so that copies to the device can be asynchronous).
struct BatchBuffers {
    int* inputs = nullptr;            // (G, B, T)
    int* targets = nullptr;           // (G, B, T), -1 = ignored
    int* sorted_positions = nullptr;  // (G, B * T), positions within the micro-step
};

struct StepBatch {
    long long index = 0;             // batches since this loader began
    long long windows_consumed = 0;  // after this batch; the state to save
    double epoch = 0.0;              // epochs seen after this batch
    long long valid_targets = 0;     // of this rank's rows
    BatchBuffers buffers;
    double wait_ms = 0.0;            // that next() waited for it
};

// Where a row of a global batch comes from.
struct WindowOrigin {
    long long position;  // in the order of all epochs
    long long epoch;
    int rank, micro_step, row;
    std::string shard;
    size_t first_token;  // of the window, within its shard
};

class DataLoader {
public:
    // Opens the shards that match `pattern` and starts reading ahead. `slots` holds buffers for at least two steps; when it is empty the loader
    // allocates its own. Throws Error when there are fewer windows than one global batch takes.
    DataLoader(const std::string& pattern, const LoaderSettings& settings, std::vector<BatchBuffers> slots = {});
    ~DataLoader();
    DataLoader(const DataLoader&) = delete;
    DataLoader& operator=(const DataLoader&) = delete;

    // The next step's batch. Its buffers stay as they are until the next call. An error met while reading ahead is thrown by the call
    // that would have returned that batch.
    const StepBatch& next();

    // Every row of global batch `step`, all ranks, in the order of the batch; steps count from the beginning of the order.
    std::vector<WindowOrigin> describe(long long step) const;

    long long windows() const { return index_.count(); }          // an epoch
    long long windows_per_step() const { return windows_per_step_; }
    long long dropped_tokens() const { return index_.dropped_tokens(); }
    const ShardSet& shards() const { return shards_; }

private:
    void read_ahead();
    void fill(long long batch, StepBatch& out);
    long long window_at(long long position, Permutation& order, long long& order_epoch) const;

    LoaderSettings settings_;
    ShardSet shards_;
    WindowIndex index_;
    long long windows_per_step_ = 0;
    std::vector<std::vector<int>> own_memory_;
    std::vector<StepBatch> slots_;
    std::vector<uint64_t> sort_scratch_;
    Permutation order_;             // of order_epoch_, used by the reading thread only
    long long order_epoch_ = -1;

    std::thread thread_;
    std::mutex mutex_;
    std::condition_variable changed_;
    long long filled_ = 0, taken_ = 0;  // batches read ahead, batches returned
    std::exception_ptr error_;          // of batch filled_
    bool stop_ = false;
};

// The validation windows asked for, once each, in file order. Step s of rank r holds windows (s * ranks + r) * B + b; all ranks make the same
// number of steps, and rows past the end have inputs 0 and targets -1.
class ValLoader {
public:
    // num_windows 0 = all. Throws Error when more are asked for than there are. seed, grad_accum and windows_consumed are not used.
    ValLoader(const std::string& pattern, const LoaderSettings& settings, long long num_windows);
    ValLoader(const ValLoader&) = delete;
    ValLoader& operator=(const ValLoader&) = delete;

    long long num_steps() const { return num_steps_; }
    long long num_windows() const { return num_windows_; }
    // Fills (B, T) inputs and targets; returns the number of targets that count.
    long long fill(long long step, int* inputs, int* targets) const;
    const ShardSet& shards() const { return shards_; }
    long long windows() const { return index_.count(); }
    long long dropped_tokens() const { return index_.dropped_tokens(); }

private:
    LoaderSettings settings_;
    ShardSet shards_;
    WindowIndex index_;
    long long num_windows_ = 0, num_steps_ = 0;
};
