#include "llmc/schedule.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "llmc/error.h"

namespace {

constexpr size_t kNever = std::numeric_limits<size_t>::max();

// A computation and the buckets whose parameters it reads.
struct Compute {
    OpKind kind;
    int unit;
    int micro_step;
    std::vector<int> buckets;

    bool needs(int bucket) const { return std::find(buckets.begin(), buckets.end(), bucket) != buckets.end(); }
};

// Which slots each bucket may lie in, and how large they are: those set apart take turns in the last one, the others share two, or have one each if they are
// no more than two.
struct Slots {
    std::vector<size_t> counts;
    std::vector<std::vector<int>> of_bucket;

    Slots(const FlatLayout& layout, const std::vector<int>& apart) {
        const int num_buckets = static_cast<int>(layout.buckets.size()), num_others = num_buckets - static_cast<int>(apart.size()), last = std::min(2, num_others);
        counts.assign(last + (apart.empty() ? 0 : 1), 0);
        int other = 0;
        for (int b = 0; b < num_buckets; ++b) {
            const bool is_apart = std::find(apart.begin(), apart.end(), b) != apart.end();
            of_bucket.push_back(is_apart ? std::vector<int>{last} : num_others > 2 ? std::vector<int>{0, 1} : std::vector<int>{other++});
            for (const int slot : of_bucket[b]) counts[slot] = std::max(counts[slot], layout.buckets[b].count);
        }
    }

    size_t total_count() const { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }
};

Slots make_slots(const ParamTable& table, const FlatLayout& layout) {
    const int embedding = layout.bucket_of_unit[table.embedding_unit()], head = layout.bucket_of_unit[table.head_unit()];
    const Slots alike(layout, table.tied ? std::vector<int>{head} : std::vector<int>{});
    if (layout.buckets.size() <= 2) return alike;  // no layers between embedding and head, in which one could make room for the other
    const Slots large_apart(layout, table.tied ? std::vector<int>{embedding} : std::vector<int>{embedding, head});
    return large_apart.total_count() <= alike.total_count() ? large_apart : alike;
}

class Builder {
public:
    Builder(const ParamTable& table, const FlatLayout& layout, const ScheduleConfig& config)
        : table_(table), layout_(layout), config_(config), peers_(layout.num_ranks - 1), slots_(make_slots(table, layout)) {
        schedule_.sharding = sharding_of_stage(config.stage);
        schedule_.reduce_every_micro_step = schedule_.sharding.gradients || config.sync_every_micro_step;
        if (schedule_.sharding.parameters) {
            schedule_.slot_counts = slots_.counts;
            for (const std::vector<int>& slots : slots_.of_bucket) schedule_.home_slot.push_back(slots[0]);
        }
    }

    Schedule build() {
        for (int micro_step = 0; micro_step < config_.micro_steps; ++micro_step) {
            add_forward(micro_step);
            for (int unit = table_.head_unit() - 1; unit >= table_.embedding_unit(); --unit) {
                // The embedding's backward reads no parameter.
                add(OpKind::kBackward, unit, micro_step, unit == table_.embedding_unit() ? std::vector<int>{} : buckets_of(unit));
            }
        }
        emit(&schedule_.step);
        update();
        computes_.clear();
        add_forward(0);
        emit(&schedule_.forward);
        // Where a step begins the gathers are queued before anything that waits for its token ids.
        const auto first_compute = std::find_if(schedule_.step.begin(), schedule_.step.end(), [](const ScheduleOp& op) { return op.kind == OpKind::kForward; });
        schedule_.step.insert(first_compute, {OpKind::kCountTargets, 0, 0, -1, peers_ * sizeof(unsigned long long)});
        return schedule_;
    }

private:
    std::vector<int> buckets_of(int unit) const { return {layout_.bucket_of_unit[unit]}; }

    void add(OpKind kind, int unit, int micro_step, const std::vector<int>& buckets) { computes_.push_back({kind, unit, micro_step, buckets}); }

    void add_forward(int micro_step) {
        for (int unit = table_.embedding_unit(); unit < table_.head_unit(); ++unit) add(OpKind::kForward, unit, micro_step, buckets_of(unit));
        std::vector<int> buckets = buckets_of(table_.head_unit());
        const int embedding_bucket = layout_.bucket_of_unit[table_.embedding_unit()];
        if (table_.tied && buckets[0] != embedding_bucket) buckets.push_back(embedding_bucket);
        add(OpKind::kHead, table_.head_unit(), micro_step, buckets);
    }

    // The computations in their order, with gathers, drops and reductions around them.
    void emit(std::vector<ScheduleOp>* ops) {
        ops_ = ops;
        in_slot_.assign(slots_.counts.size(), -1);
        units_left_.assign(layout_.buckets.size(), 0);
        for (size_t i = 0; i < computes_.size(); ++i) {
            const Compute& compute = computes_[i];
            if (schedule_.sharding.parameters) {
                for (const int bucket : compute.buckets) bring(bucket, i, i);
                prefetch(i);
            }
            ops_->push_back({compute.kind, compute.unit, compute.micro_step});
            if (ops_ == &schedule_.step) reduce_what_is_complete(compute);
        }
        for (size_t slot = 0; slot < in_slot_.size(); ++slot) drop(static_cast<int>(slot), computes_.back().micro_step);
    }

    size_t next_use(int bucket, size_t from) const {
        for (size_t i = from; i < computes_.size(); ++i) {
            if (computes_[i].needs(bucket)) return i;
        }
        return kNever;
    }

    // Gathers the bucket that computation `user` needs, unless it is there, before computation `now`. Pushes out only what is needed after `user`:
    // does nothing while there is no such slot.
    void bring(int bucket, size_t now, size_t user) {
        int best = -1;
        size_t best_use = user;
        for (const int slot : slots_.of_bucket[bucket]) {
            if (in_slot_[slot] == bucket) return;
            const size_t use = in_slot_[slot] < 0 ? kNever : next_use(in_slot_[slot], now);
            if (use <= best_use) continue;
            best = slot;
            best_use = use;
        }
        if (best < 0) return;
        const int micro_step = computes_[now].micro_step;
        drop(best, micro_step);
        in_slot_[best] = bucket;
        ops_->push_back({OpKind::kGather, bucket, micro_step, best, peers_ * layout_.buckets[bucket].slice_count * config_.parameter_bytes});
    }

    bool is_there(int bucket) const { return std::find(in_slot_.begin(), in_slot_.end(), bucket) != in_slot_.end(); }

    // While computation `now` runs: what is missing for the next one that misses something.
    void prefetch(size_t now) {
        if (in_slot_.size() == layout_.buckets.size() && !is_there(-1)) return;  // all are there, for good
        for (size_t i = now + 1; i < computes_.size(); ++i) {
            bool missed = false;
            for (const int bucket : computes_[i].buckets) {
                if (is_there(bucket)) continue;
                missed = true;
                bring(bucket, now, i);
            }
            if (missed) return;
        }
    }

    void drop(int slot, int micro_step) {
        if (in_slot_[slot] < 0) return;
        ops_->push_back({OpKind::kDrop, in_slot_[slot], micro_step, slot});
        in_slot_[slot] = -1;
    }

    // After a computation of backward: reduces the bucket if that was the last of its units. A tied embedding is complete at the end only.
    void reduce_what_is_complete(const Compute& compute) {
        if (compute.kind == OpKind::kForward) return;
        const int b = layout_.bucket_of_unit[compute.unit];
        const Bucket& bucket = layout_.buckets[b];
        if (units_left_[b] == 0) units_left_[b] = bucket.end_unit - bucket.first_unit;
        if (--units_left_[b] > 0) return;
        const bool last = compute.micro_step == config_.micro_steps - 1;
        if (!schedule_.reduce_every_micro_step && !last) return;
        const size_t sent_bytes = peers_ * bucket.slice_count * config_.gradient_bytes;
        ops_->push_back({OpKind::kReduce, b, compute.micro_step, -1, sent_bytes});
        if (!schedule_.sharding.optimizer) ops_->push_back({OpKind::kGatherGradients, b, compute.micro_step, -1, sent_bytes});
    }

    void update() {
        const int last = config_.micro_steps - 1;
        schedule_.step.push_back({OpKind::kDecide, 0, last, -1, peers_ * kDecisionNumbers * sizeof(double)});
        for (size_t b = 0; b < layout_.buckets.size(); ++b) {  // in the order the next forward needs them
            const int bucket = static_cast<int>(b);
            schedule_.step.push_back({OpKind::kStep, bucket, last});
            if (schedule_.sharding.optimizer && !schedule_.sharding.parameters) {
                schedule_.step.push_back({OpKind::kGather, bucket, last, -1, peers_ * layout_.buckets[b].slice_count * config_.parameter_bytes});
            }
        }
    }

    const ParamTable& table_;
    const FlatLayout& layout_;
    const ScheduleConfig& config_;
    const size_t peers_;  // a rank sends its slice, or a partial sum of one, to this many in turn round the ring
    Slots slots_;
    Schedule schedule_;
    std::vector<Compute> computes_;
    std::vector<ScheduleOp>* ops_ = nullptr;
    std::vector<int> in_slot_;     // bucket, -1 = empty
    std::vector<int> units_left_;  // of a bucket, in this micro-step's backward
};

size_t sum_of_sent_bytes(const std::vector<ScheduleOp>& ops) {
    size_t sum = 0;
    for (const ScheduleOp& op : ops) sum += op.sent_bytes;
    return sum;
}

}  // namespace

Sharding sharding_of_stage(int stage) {
    CHECK(stage >= 0 && stage <= 3, "ZeRO stage %d does not exist; use 0, 1, 2 or 3", stage);
    Sharding sharding;
    sharding.optimizer = stage >= 1;
    sharding.gradients = stage >= 2;
    sharding.parameters = stage >= 3;
    return sharding;
}

BucketsInFlight buckets_in_flight(const ParamTable& table, const FlatLayout& layout) {
    constexpr size_t kInTurn = 2;
    std::vector<bool> is_end(layout.buckets.size());  // a tied head is a norm and counts as a layer
    is_end[layout.bucket_of_unit[table.embedding_unit()]] = true;
    if (!table.tied) is_end[layout.bucket_of_unit[table.head_unit()]] = true;
    size_t ends = 0, layers = 0, num_layers = 0;  // elements of the largest; buckets
    for (size_t b = 0; b < layout.buckets.size(); ++b) {
        (is_end[b] ? ends : layers) = std::max(is_end[b] ? ends : layers, layout.buckets[b].count);
        num_layers += !is_end[b];
    }
    BucketsInFlight buffers;
    if (table.tied || (num_layers > 0 && ends + std::min(kInTurn, num_layers) * layers < kInTurn * std::max(ends, layers))) {
        buffers = {std::min(kInTurn, num_layers), layers, ends, is_end};
    } else {
        buffers = {std::min(kInTurn, layout.buckets.size()), std::max(ends, layers), 0, std::vector<bool>(layout.buckets.size())};
    }
    return buffers;
}

Schedule make_schedule(const ParamTable& table, const FlatLayout& layout, const ScheduleConfig& config) {
    CHECK(config.micro_steps >= 1, "a step of %d micro-steps; at least one is needed", config.micro_steps);
    return Builder(table, layout, config).build();
}

size_t Schedule::step_sent_bytes() const { return sum_of_sent_bytes(step); }
size_t Schedule::forward_sent_bytes() const { return sum_of_sent_bytes(forward); }
