// Where a run goes on from: finds the checkpoint that --resume means and makes sure that it is whole. Host only; collective, so that all ranks go on from the same one.
#pragma once

#include <optional>
#include <string>

#include "llmc/checkpoint.h"
#include "llmc/model_config.h"
#include "llmc/process.h"

struct ResumePoint {
    std::string folder;
    CheckpointInfo info;
    ModelConfig model;
};

// `resume`: a checkpoint's folder, which must be whole, or "auto": the newest whole one of the run folder; each newer one that is not is passed over and the reason printed. Every
// byte is read once, by one of the ranks. Nothing if auto finds no checkpoint at all. Throws AgreedError where there are some and none is whole, or where `resume` is none.
std::optional<ResumePoint> find_checkpoint(const Process& process, const std::string& resume, const std::string& run_folder);

// The checkpoint is one of this run folder's own: its run goes on there. False where one that lies elsewhere is continued in a folder of its own.
bool lies_in(const std::string& checkpoint, const std::string& run_folder);

// A new run would bury the unfinished one in this folder: throws Error that says how to go on with it.
void check_no_unfinished_run(const std::string& run_folder);
