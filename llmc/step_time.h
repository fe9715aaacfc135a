// How long a step takes: its schedule walked with a clock for computation and one for communication, as the engine queues it on its two streams.
//
//   operation                  starts when its stream is there, and
//   gather                     the bucket has been stepped, what was in the slot dropped
//   count, reduce, decide      all computations queued before are done
//   forward, head, backward    the buckets they read are gathered (a tied head reads the embedding's too); of a step's first head, the targets counted. Where every
//                              micro-step is reduced: a buffer is free for the bucket they write gradients of (gradients.cuh; two take turns)
//   what follows decide        that is done, on both streams
//
// A decision joins the streams, so what follows one is the same in every step: the time from one to the next is exactly that of a step in a long run, and a single walk
// gives it. Gathers at the end of a step (stages 1 and 2) run beside the next one's forward.
//
// Left out: memory-bound kernels, AdamW among them (they are in flops_per_s); what a collective takes from a computation beside it; the host, which is ahead.
// A computation waits for a buffer before it starts, in the engine only where it first writes to it: after a layer is computed again or the head's logits are made, with
// fp32 gradients at its end. At each such wait the walk is late by that at most.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "llmc/model_config.h"
#include "llmc/param_table.h"
#include "llmc/schedule.h"

// Floating-point operations of one token in the forward pass of each unit (embedding 0, layers, head): 2 a weight of every matrix product, the head included,
// plus causal attention at half of T x T (2 NH HD T a layer). Backward takes twice as many.
std::vector<double> forward_flops(const ModelConfig& config, int seq_len);

// Floating-point operations of one trained token, forward and backward: 6 a weight of every matrix product, the embedding lookup not, plus attention: 6 L NH HD T.
double flops_per_token(const ModelConfig& config, int seq_len);

// Floating-point operations of one token that --recompute (none, norm, ffn, block; see model_memory.cuh) adds to the backward of a layer: those of its matrix products and
// attention. The last layer adds none. Throws Error for another word.
double recompute_flops(const ModelConfig& config, int seq_len, const std::string& recompute);

// Seconds of a micro-batch's computations.
struct ComputeCosts {
    std::vector<double> forward, backward;  // of each unit; 0 for the head, whose two are both in `head`
    double head = 0;
};

// Costs of a micro-batch of `tokens` at `flops_per_s`; `recompute` adds to the backward of every layer but the last.
ComputeCosts compute_costs(const ModelConfig& config, int seq_len, double tokens, double flops_per_s, const std::string& recompute);

struct StepTime {
    double seconds = 0;          // of a step in a long run
    double compute_seconds = 0;  // of them the compute stream works
    double comm_seconds = 0;     // the collectives together, hidden or not
    double exposed_comm_seconds() const { return seconds - compute_seconds; }
};

// collective(sent_bytes) gives the seconds of one of the schedule's collectives, of which a rank sends that many bytes. It is not asked for 0 bytes (one rank), which
// take no time. Without `overlap` there is one stream.
StepTime simulate_step(const Schedule& schedule, const ParamTable& table, const FlatLayout& layout, const ComputeCosts& costs,
                       const std::function<double(size_t sent_bytes)>& collective, bool overlap);
