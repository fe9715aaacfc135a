// Are the ranks of a run replicas of each other? What they were started with, and the weights they hold, compared by hash; a difference names who and what.
#pragma once

#include <string>
#include <vector>

#include "llmc/options.h"
#include "llmc/param_table.h"
#include "llmc/process.h"

// Hash of a file's bytes. Throws Error naming it if it cannot be read.
std::string file_hash(const std::string& path);

// Hash of the program file this process runs.
std::string program_hash();

// Collective: throws an AgreedError on all ranks where they run different builds or different options, which are named.
void check_started_alike(const Process& process, const Options& options);

// Collective: the same where they see other files, by a fingerprint or hash. `what` names them in the message: "this rank sees other <what>".
void check_same_files(const Process& process, const std::string& what, const std::string& fingerprint);

// Compares checksums (N, arrays, buckets) of every rank's replicas: of the weights, and where there are four arrays also of the fp32 master weights and the two
// moments. Returns "" if all are equal, else who differs and in which bucket (the first one): from the majority where there is one.
std::string replica_difference(const std::vector<unsigned long long>& checksums, const ParamTable& table, const FlatLayout& layout);
