// Are the ranks of a run replicas of each other? What they were started with, and the weights they hold, compared by hash; a difference names who and what.
#pragma once

#include <string>
#include <vector>

#include "llmc/options.h"
#include "llmc/param_table.h"
#include "llmc/process.h"

// Hash of the program file this process runs.
std::string program_hash();

// Collective: throws an AgreedError on all ranks where they run different builds or different options, which are named.
void check_started_alike(const Process& process, const Options& options);

// Collective: the same for the data they see, by its fingerprint.
void check_same_data(const Process& process, const std::string& pattern, const std::string& fingerprint);

// Compares checksums (N, arrays, buckets) of every rank's replicas: of the weights, and where there are four arrays also of the fp32 master weights and the two
// moments. Returns "" if all are equal, else who differs and in which bucket (the first one): from the majority where there is one.
std::string replica_difference(const std::vector<unsigned long long>& checksums, const ParamTable& table, const FlatLayout& layout);
