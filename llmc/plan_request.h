// From the options of a run to what the plan of it is asked.
#pragma once

#include "llmc/options.h"
#include "llmc/plan.h"

RunShape run_shape(const Options& options, const ModelConfig& config, int micro_steps, int ranks);

// What memory and time depend on. A --device-memory that was not given is 80 GB here, and the reserve that of a GPU; a run puts its device's own in their place.
// Throws UsageError for links that are none.
PlanRequest plan_request(const Options& options, const RunShape& shape, size_t element_bytes);

// Adds what hours, price and disk depend on, and only --plan asks for: it looks at files. Steps come from --steps, or from --epochs where the training data is there; free disk
// is that of the folder --out, or of the nearest one above it that exists. Throws Error where --epochs or --train-data was given and the data is not there.
void ask_for_cost(PlanRequest* request, const Options& options, const BatchPlan& batch);

// Bytes free for this user on the disk of `folder`, which need not exist yet, and of the nearest folder above that does.
struct FreeDisk { std::string folder; size_t bytes; };
FreeDisk free_disk(const std::string& folder);
