// The order of one optimizer step, as data: what is gathered, computed, dropped, reduced and stepped, and what each of these sends.
//
// The stages of ZeRO differ in what is sharded (sharding_of_stage) and in nothing else. make_schedule() turns that into a list of operations, and whoever
// wants to know about a step walks the list: the trainer queues it, the engine takes its buffers from it, accounts of bytes add it up.
//
//   stage  whole on every rank              sharded               sent by each rank a step (N ranks, x = (N-1)/N, G micro-steps)
//   0      parameters, gradients, optimizer nothing               2x gradients (reduce-scatter + all-gather)
//   1      parameters, gradients            optimizer             x gradients + x parameters
//   2      parameters                       gradients, optimizer  G x gradients + x parameters
//   3      nothing                          all                   G (2x parameters + x gradients), less what is reused
//
// Sharded parameters are gathered a bucket at a time into slots, so that one is computed with while the next one arrives. In every preset but tiny embedding and head
// are 2 to 9 times as large as a layer, so they stay out of the layers' slots:
//
//   0, 1  the layers, and a tied model's final norm: one in use, one arriving
//   2     untied: embedding and head in turn, as layers lie between them in either direction; tied: the embedding for good, which the head reads too
//
// Two slots that any bucket fits in (tied, and one for the final norm, as the head needs two buckets at once and the last layer should stay) would be larger, and what
// is pushed out of them is gathered again. From those to these, in bf16 on 8 ranks with G = 8:
//
//   0.5B        tied     525 ->  326 MB of slots   21.0 ->  17.3 GB sent by each rank a step
//   qwen2.5-7B  untied  2180 -> 2022 MB           298.5 -> 292.4 GB
//
// Where the two are smaller, they are taken: the embedding is below two layers, or a bucket holds many. Two layer buckets or fewer have a slot each, of their size.
//
// A bucket is gathered into the slot whose content is needed again last (Belady: the list is known, so that is exact); what is still in a slot is used again.
// Nothing stays over an update.
#pragma once

#include <cstddef>
#include <vector>

#include "llmc/param_table.h"

// What each rank gives to the decision of a step (kDecide), doubles: sum of squares, sum of losses, requests (step_state.cuh).
inline constexpr size_t kDecisionNumbers = 3;

// What a stage shards over the ranks.
struct Sharding {
    bool optimizer = false, gradients = false, parameters = false;
};

// stage 0 to 3; throws Error otherwise.
Sharding sharding_of_stage(int stage);

enum class OpKind {
    kCountTargets,     // number of valid targets of the step: all-gather of one count of each rank
    kGather,           // a bucket's parameters: all-gather, into a slot or (slot -1) in place
    kDrop,             // a slot's parameters have been used: it may be overwritten
    kForward,          // the embedding or a layer
    kHead,             // final norm, head and loss; in a step their backward too
    kBackward,         // a layer or the embedding
    kReduce,           // a bucket's gradients of this micro-step are complete: reduce-scatter
    kGatherGradients,  // a bucket's reduced gradients: all-gather
    kDecide,           // norm and loss over all ranks, clip or skip: all-gather of two doubles of each rank
    kStep,             // AdamW on this rank's part of a bucket
};

struct ScheduleOp {
    OpKind kind;
    int index = 0;          // unit of forward, head and backward; bucket of gather, drop, reduce and step
    int micro_step = 0;
    int slot = -1;          // of gather and drop
    size_t sent_bytes = 0;  // by each rank
};

struct ScheduleConfig {
    int stage = 1;
    int micro_steps = 1;                 // G
    bool sync_every_micro_step = false;  // reduce (and in stage 0 gather) gradients on every micro-step
    size_t parameter_bytes = 2, gradient_bytes = 2;  // of an element on the wire
};

struct Schedule {
    Sharding sharding;
    bool reduce_every_micro_step = false;
    std::vector<ScheduleOp> step;     // one optimizer step
    std::vector<ScheduleOp> forward;  // a forward pass alone, as far as the head
    std::vector<size_t> slot_counts;  // elements of each slot; none while parameters are whole
    std::vector<int> home_slot;       // of each bucket: the first slot it may lie in; empty while parameters are whole

    size_t step_sent_bytes() const;
    size_t forward_sent_bytes() const;
};

// Where gradients lie between backward and reduction, where every micro-step is reduced: buffers that buckets take in turn, one being written while the other is reduced.
// Tied: the embedding's gradient lives from the head to the end of backward, so it has one of its own. Untied: the head's is reduced long before the embedding's begins, so
// the two can take turns in one, which is smaller than two buffers that fit any bucket where embedding and head are larger than two layers.
struct BucketsInFlight {
    size_t in_turn = 0;        // buffers for the buckets that are not apart
    size_t count = 0;          // elements of each
    size_t apart_count = 0;    // elements of the one for the buckets of embedding and (untied) head; 0 = there is none
    std::vector<bool> apart;   // of each bucket: it lies there
};
BucketsInFlight buckets_in_flight(const ParamTable& table, const FlatLayout& layout);

// Pure arithmetic: needs no device, and as many ranks as the layout was made for.
Schedule make_schedule(const ParamTable& table, const FlatLayout& layout, const ScheduleConfig& config);
