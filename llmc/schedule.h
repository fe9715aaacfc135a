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
// Sharded parameters are gathered a bucket at a time into slots: two that any bucket fits in, so that one is computed with while the next one arrives. A
// tied model's head needs two buckets at once, the embedding's and the final norm's: with more than two buckets the latter has a slot of its own, so
// that the last layer is not pushed out between its forward and its backward. A bucket is gathered into the slot whose content is needed again last (Belady:
// the list is known, so that is exact); what is still in a slot is used again. Nothing stays over an update.
#pragma once

#include <cstddef>
#include <vector>

#include "llmc/param_table.h"

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
    std::vector<int> home_slot;       // of each bucket: a slot it fits in; empty while parameters are whole

    size_t step_sent_bytes() const;
    size_t forward_sent_bytes() const;
};

// Pure arithmetic: needs no device, and as many ranks as the layout was made for.
Schedule make_schedule(const ParamTable& table, const FlatLayout& layout, const ScheduleConfig& config);
