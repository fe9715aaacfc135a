#include "llmc/step_time.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "llmc/error.h"

namespace {

// Floating-point operations of one token in a layer's forward pass.
struct LayerFlops {
    double qkv, attention, attention_out, gate_up, down;

    LayerFlops(const ModelConfig& config, int seq_len) {
        const double C = config.channels, F = config.ffn_dim, width = static_cast<double>(config.num_heads) * config.head_dim;
        const double kv_width = static_cast<double>(config.num_kv_heads) * config.head_dim;
        qkv = 2 * C * (width + 2 * kv_width);
        attention = 2 * width * seq_len;
        attention_out = 2 * width * C;
        gate_up = 2 * C * 2 * F;
        down = 2 * F * C;
    }

    double total() const { return qkv + attention + attention_out + gate_up + down; }
};

// When a bucket's gradients may be written to their buffer (schedule.h), as Gradients::place_of (gradients.cuh) waits for it.
class BufferTimes {
public:
    BufferTimes(const ParamTable& table, const FlatLayout& layout)
        : buffers_(buckets_in_flight(table, layout)), buffer_of_(layout.buckets.size(), -1), free_at_(buffers_.in_turn + 1) {}

    // Always, if it holds a part of the bucket's gradients already.
    double ready(int bucket) {
        int& buffer = buffer_of_[bucket];
        if (buffer >= 0) return 0;
        buffer = static_cast<int>(buffers_.apart[bucket] ? buffers_.in_turn : next_++ % buffers_.in_turn);
        return free_at_[buffer];
    }

    void reduced(int bucket, double time) {
        free_at_[buffer_of_[bucket]] = time;
        buffer_of_[bucket] = -1;
    }

private:
    const BucketsInFlight buffers_;
    std::vector<int> buffer_of_;   // of a bucket that is written; else -1
    std::vector<double> free_at_;  // of a buffer; the one apart is the last
    size_t next_ = 0;
};

// The clocks of both streams, and when what they wait for has happened. Time 0 is a decision.
class Walk {
public:
    Walk(const Schedule& schedule, const ParamTable& table, const FlatLayout& layout, const ComputeCosts& costs, const std::function<double(size_t)>& collective, bool overlap)
        : reduce_every_micro_step_(schedule.reduce_every_micro_step), table_(table), layout_(layout), costs_(costs), collective_(collective), in_flight_(table, layout),
          communicate_(overlap ? own_clock_ : compute_), gathered_(layout.buckets.size()), stepped_(layout.buckets.size()), dropped_(schedule.slot_counts.size()) {}

    void queue(const ScheduleOp& op) {
        switch (op.kind) {
            case OpKind::kCountTargets:
                wait(communicate_, compute_);
                communicate(op);
                counted_ = communicate_;
                break;
            case OpKind::kGather:
                wait(communicate_, stepped_[op.index]);
                if (op.slot >= 0) wait(communicate_, dropped_[op.slot]);
                communicate(op);
                gathered_[op.index] = communicate_;
                break;
            case OpKind::kDrop: dropped_[op.slot] = compute_; break;
            case OpKind::kForward:
                read(op.index);
                compute(costs_.forward[op.index]);
                break;
            case OpKind::kHead:
                if (op.micro_step == 0) wait(compute_, counted_);
                if (table_.tied) {  // its weight is the embedding's
                    read(table_.embedding_unit());
                    write(table_.embedding_unit());
                }
                read(op.index);
                write(op.index);
                compute(costs_.head);
                break;
            case OpKind::kBackward:
                if (op.index != table_.embedding_unit()) read(op.index);  // the embedding's backward reads no parameter
                write(op.index);
                compute(costs_.backward[op.index]);
                break;
            case OpKind::kReduce:
                wait(communicate_, compute_);
                communicate(op);
                if (reduce_every_micro_step_) in_flight_.reduced(op.index, communicate_);
                break;
            case OpKind::kGatherGradients: communicate(op); break;
            case OpKind::kDecide:
                wait(communicate_, compute_);
                communicate(op);
                wait(compute_, communicate_);
                break;
            case OpKind::kStep: stepped_[op.index] = compute_; break;
        }
    }

    StepTime time() const { return {compute_, compute_seconds_, comm_seconds_}; }

private:
    static void wait(double& clock, double until) { clock = std::max(clock, until); }

    void compute(double seconds) {
        compute_ += seconds;
        compute_seconds_ += seconds;
    }

    void communicate(const ScheduleOp& op) {
        const double seconds = op.sent_bytes > 0 ? collective_(op.sent_bytes) : 0;
        communicate_ += seconds;
        comm_seconds_ += seconds;
    }

    // The computation that comes next reads the unit's parameters.
    void read(int unit) { wait(compute_, gathered_[layout_.bucket_of_unit[unit]]); }

    // The computation that comes next writes the unit's gradients.
    void write(int unit) {
        if (reduce_every_micro_step_) wait(compute_, in_flight_.ready(layout_.bucket_of_unit[unit]));
    }

    const bool reduce_every_micro_step_;
    const ParamTable& table_;
    const FlatLayout& layout_;
    const ComputeCosts& costs_;
    const std::function<double(size_t)>& collective_;
    BufferTimes in_flight_;

    double compute_ = 0, own_clock_ = 0;
    double& communicate_;                      // own_clock_, or the one of both
    std::vector<double> gathered_, stepped_;   // of a bucket
    std::vector<double> dropped_;              // of a slot
    double counted_ = 0;
    double compute_seconds_ = 0, comm_seconds_ = 0;
};

}  // namespace

std::vector<double> forward_flops(const ModelConfig& config, int seq_len) {
    std::vector<double> flops(config.num_layers + 2, LayerFlops(config, seq_len).total());
    flops.front() = 0;  // the embedding is looked up
    flops.back() = 2.0 * config.channels * config.vocab_size;
    return flops;
}

double flops_per_token(const ModelConfig& config, int seq_len) {
    const std::vector<double> forward = forward_flops(config, seq_len);
    return 3 * std::accumulate(forward.begin(), forward.end(), 0.0);
}

double recompute_flops(const ModelConfig& config, int seq_len, const std::string& recompute) {
    const LayerFlops layer(config, seq_len);
    if (recompute == "none" || recompute == "norm") return 0;
    if (recompute == "ffn") return layer.gate_up;
    if (recompute == "block") return layer.total() - layer.down;  // nobody needs the layer's output again
    fail("recompute '%s' is not one of none, norm, ffn, block", recompute.c_str());
}

ComputeCosts compute_costs(const ModelConfig& config, int seq_len, double tokens, double flops_per_s, const std::string& recompute) {
    CHECK(tokens > 0 && flops_per_s > 0, "the time of %g tokens at %g operations a second; both must be above 0", tokens, flops_per_s);
    const double seconds_per_flop = tokens / flops_per_s, again = recompute_flops(config, seq_len, recompute);
    ComputeCosts costs;
    costs.forward = forward_flops(config, seq_len);
    costs.head = 3 * costs.forward.back() * seconds_per_flop;
    costs.forward.back() = 0;
    costs.backward = costs.forward;
    const size_t last_layer = costs.forward.size() - 2;
    for (size_t unit = 0; unit < costs.forward.size(); ++unit) {
        costs.forward[unit] *= seconds_per_flop;
        const bool recomputed = unit > 0 && unit < last_layer;
        costs.backward[unit] = (2 * costs.backward[unit] + (recomputed ? again : 0)) * seconds_per_flop;
    }
    return costs;
}

StepTime simulate_step(const Schedule& schedule, const ParamTable& table, const FlatLayout& layout, const ComputeCosts& costs,
                       const std::function<double(size_t sent_bytes)>& collective, bool overlap) {
    CHECK(costs.forward.size() == table.units.size() && costs.backward.size() == table.units.size(), "costs of %zu and %zu units for a model of %zu", costs.forward.size(),
          costs.backward.size(), table.units.size());
    const auto decide = std::find_if(schedule.step.begin(), schedule.step.end(), [](const ScheduleOp& op) { return op.kind == OpKind::kDecide; });
    CHECK(decide != schedule.step.end(), "a schedule of %zu operations without a decision is not a step's", schedule.step.size());
    Walk walk(schedule, table, layout, costs, collective, overlap);
    std::for_each(std::next(decide), schedule.step.end(), [&](const ScheduleOp& op) { walk.queue(op); });
    std::for_each(schedule.step.begin(), std::next(decide), [&](const ScheduleOp& op) { walk.queue(op); });
    return walk.time();
}
