// --plan --params: what ZeRO shards and sends, for people who have a number of parameters and no model yet. Pure arithmetic, without activations, buffers or padding.
//
// P parameters, N ranks, x = (N-1)/N, G micro-steps a step; w = 2 bytes of a parameter in bf16, g = 2 of its gradient (4 with --grad-dtype fp32), 12 of its optimizer
// state (master, m and v in fp32):
//
//   stage   bytes a parameter    sent by each rank a step
//   0       w + g + 12           2x g P             (reduce-scatter and all-gather of the gradients)
//   1       w + g + 12/N         x g P + x w P      (reduce-scatter of the gradients, all-gather of the parameters)
//   2       w + (g + 12)/N       G x g P + x w P    (gradients are reduced on every micro-step: nobody holds them whole)
//   3       (w + g + 12)/N       G (2x w P + x g P) (parameters are gathered for forward and for backward; where a gather is reused, less)
//   0 with --sync-every-micro-step: G 2x g P, for comparison
//
// Over a link that takes at least sent / speed: all of it over that one link, without latency, as how many collectives there are depends on the model.
// The largest model leaves 30 % of a device: P = 0.7 M / (bytes a parameter). A checkpoint is w + 12 bytes a parameter; the next one is written before the oldest goes.
#pragma once

#include <string>

#include "llmc/options.h"

// `ranks` are those to plan for. Both throw UsageError where --link is wrong.
std::string params_plan_text(const Options& options, int ranks);  // tables of at most 120 columns
std::string params_plan_json(const Options& options, int ranks);  // one object
