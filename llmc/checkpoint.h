// A checkpoint: a folder of the run folder that holds everything a run continues from, and nothing that depends on how many ranks wrote it or in which stage.
//
//   step_00001000/                        steps done
//     trainer.json                        what the run was and where it stood; bytes and XXH3 of every other file; its own checksum
//     config.json, model.safetensors      the weights, as transformers reads them (above 5 GB: model-00001-of-0000N.safetensors and an index)
//     optimizer-00000-of-00004.safetensors  of each rank that wrote: runs of elements of NAME.master, NAME.exp_avg, NAME.exp_avg_sq (fp32), from element `offset:NAME` on
//     product_choices.bin                 the algorithms of the matrix products
//
// It is complete or it is not there: written as .saving-step_00001000, every file on the disk, then renamed. One that goes away is renamed to .removing-step_... first.
// This header knows folders and trainer.json; what is in the tensors is checkpoint_tensors.h's, what is on the device checkpointer.cuh's.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "llmc/durable_file.h"

struct CheckpointInfo {
    long long step = 0;               // steps done: the next one is this, counted from 0
    long long steps = 0;              // of the run
    long long tokens = 0;             // trained on
    long long windows_consumed = 0;   // of the data's order
    std::string data_fingerprint;     // of the training data
    std::string precision;            // of the weights: "bf16" or "fp32"
    unsigned long long applied_steps = 0, skipped_total = 0, skipped_in_row = 0;  // StepState
    int ranks = 0, stage = 0;         // that wrote it
    std::map<std::string, std::string> options;   // name to value, all that kept_options() gives
    std::map<std::string, FileSummary> files;     // every other file of the folder

    bool finished() const { return step >= steps; }
};

// The text of trainer.json.
std::string checkpoint_json(const CheckpointInfo& info);

// Reads and checks folder/trainer.json. Throws Error naming the file and what is wrong: missing, cut off, changed, of something else, of a newer version.
CheckpointInfo read_checkpoint_info(const std::string& folder);

// Throws Error unless the folder's files are those of `info`, of that many bytes. Reads none of them.
void check_checkpoint_sizes(const std::string& folder, const CheckpointInfo& info);

// Reads the share of one rank of the files and throws Error where one is not what was written. Together the ranks read everything once.
void check_checkpoint_bytes(const std::string& folder, const CheckpointInfo& info, int rank, int ranks);

std::string checkpoint_name(long long step);  // "step_00001000"

// Folders of complete checkpoints in a run folder, newest first; the folder may be missing. Links and other files are left out.
std::vector<std::string> list_checkpoints(const std::string& run_folder);

// Makes the empty folder that a checkpoint is written to.
void begin_checkpoint(const std::string& run_folder, long long step);
std::string unfinished_name(long long step);  // its name: ".saving-step_00001000"

// Everything else is on the disk: writes trainer.json, makes the checkpoint complete and returns its folder.
std::string complete_checkpoint(const std::string& run_folder, const CheckpointInfo& info);

// What a save that failed, or a killed run, left behind: folders under temporary names.
void remove_unfinished(const std::string& run_folder);

// Removes all but the `keep` newest. Returns those removed.
std::vector<std::string> remove_old_checkpoints(const std::string& run_folder, int keep);

// Moves checkpoints newer than `step` out of the way of a run that goes on from there, to earlier.<n>/ in the same folder; returns that folder, "" if there were none.
std::string set_newer_checkpoints_aside(const std::string& run_folder, long long step);

// Throws Error where the file system of `folder` has not that many bytes free, with what would help.
void check_free_disk(const std::string& folder, size_t bytes);
