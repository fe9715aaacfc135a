// Every option of the trainer, parsed and checked before anything is allocated. One table in options.cpp drives the parser, --help,
// --config files and the start-up print.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "llmc/lr_schedule.h"
#include "llmc/model_config.h"

struct Options {
    // model
    std::string preset = "tiny";
    std::string model;        // Hugging Face folder to import
    std::string from_config;  // Hugging Face config.json, random init
    // Single overrides; 0, or -1 for the switches, means "as the preset or file says".
    int num_layers = 0, channels = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0, ffn_dim = 0, vocab_size = 0, max_seq_len = 0;
    double rope_theta = 0.0, norm_eps = 0.0;
    int tied = -1, untied = -1, qkv_bias = -1, qk_norm = -1;

    // data
    std::string train_data, val_data;  // glob patterns
    int seq_len = 0, micro_batch = 0;  // T, B
    long long total_batch = 0;         // tokens a step over all ranks; 0 = one micro-step
    uint64_t seed = 1;
    long long show_batch = -1;         // step to show; -1 = none

    // optimizer
    long long steps = 0;               // exactly one of steps and epochs is set after parsing, the other is 0
    double epochs = 0.0;
    double lr = 0.0;
    long long warmup = 0;              // see resolve_warmup()
    std::string schedule = "cosine";
    double final_lr_frac = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
    double clip = 1.0;                 // 0 = off
    int max_skipped = 10;

    // parallel
    int zero_stage = 1;
    double bucket_mb = 25.0;
    int no_overlap = 0, sync_every_micro_step = 0, check_collectives = 0;
    double comm_timeout = 600.0;       // seconds

    // memory
    long long device_memory = 0;       // bytes; 0 = all
    long long memory_reserve = -1;     // bytes outside the program's own allocations; -1 = not given
    int ignore_plan = 0, allocate_only = 0;
    std::string recompute = "none", grad_dtype = "bf16";
    int lmhead_chunks = 1;

    // evaluation
    long long val_every = 0, val_batches = 0, sample_every = 0;  // steps (0 = only after the last step; sampling: never), micro-batches (0 = all)
    int sample_tokens = 0, top_k = 0;
    std::string prompt;
    double temperature = 0.8, top_p = 1.0;

    // run folder
    std::string out;
    long long save_every = 0;          // steps; 0 = by time and at the end only
    double save_minutes = 30.0;        // 0 = not by time
    std::string save_mode = "stream";
    int keep = 3, no_save = 0;
    std::string resume, allow_change;

    // plan
    int plan = 0, plan_json = 0;
    int ranks = 0, ranks_per_node = 8;               // ranks 0 = those that were started
    std::string link = "nvlink=450,pcie=25,ib=50";   // parse_links() in network.h
    double params = 0.0;                             // whole number of parameters; 0 = a model is planned
    int grad_accum = 0;                              // 0 = not given: --total-batch decides
    double step_seconds = 0.0;                       // 0 = from device_tflops and mfu
    double device_tflops = 989.4, mfu = 0.4;         // bf16, without sparsity
    double price = 0.0;                              // of a device-hour; 0 = not given

    // other
    int generate = 0, profile = 0;
    std::string config;

    bool help = false;  // --help was given; nothing else was checked

    // Where a value came from: one entry a row of the table.
    enum class Source : unsigned char { Default, Checkpoint, ConfigFile, CommandLine };  // a later one wins
    std::vector<Source> sources;
    bool given(const char* name) const;  // the option was set by the user ("--lr" or "lr")

    bool overlap() const { return no_overlap == 0; }
    bool save_async() const { return save_mode == "async"; }
    LrSchedule::Kind schedule_kind() const;
};

// Values of options by name, as a checkpoint keeps them.
using OptionValues = std::map<std::string, std::string>;

// Parses and checks everything that does not need the data or the number of ranks; fills what depends on the preset. `kept`: of the checkpoint the run goes on from; they
// stand where neither the command line nor the config file gives an option. Throws UsageError.
Options parse_options(int argc, const char* const* argv, const OptionValues& kept = {});

// The text of --help.
std::string options_help();

// One row of the start-up print.
struct OptionRow { std::string group, name, value; const char* source; };
std::vector<OptionRow> option_rows(const Options& options);

// The model the options describe: preset or file, with the overrides applied and validated. A --seq-len the model is too short for is
// refused; a default one shrinks to fit. The rows of a micro-batch must fit an int, and --lmhead-chunks must divide them. `resumed`: the checkpoint's model, which it is
// unless the user says another.
ModelConfig model_config_from_options(Options& options, const ModelConfig* resumed = nullptr);

// How a step is split: total_batch = micro_batch * seq_len * ranks * grad_accum tokens.
struct BatchPlan {
    int grad_accum = 1;                 // micro-steps
    long long windows_per_step = 0;     // over all ranks
    long long tokens_per_step = 0;      // over all ranks
};
// Of total_batch and grad_accum at most one is given, the other is 0; neither: one micro-step. Throws UsageError with the nearest totals that divide, and where a step
// would have more than 10^12 tokens.
BatchPlan plan_batch(long long total_batch, int micro_batch, int seq_len, int ranks, int grad_accum = 0);

// What a checkpoint keeps of a run's options: all but those of a single start (--out, --resume, --plan ...), with what was left open filled in: the tokens of a step,
// the number of steps, the warm-up.
OptionValues kept_options(const Options& options, const BatchPlan& batch, const LrSchedule& schedule);

// Compares what a run continues with what it is now. Options that change what is computed must be equal, or be named by --allow-change; ranks, stage, buckets, micro-batch,
// recomputation and what is printed or saved are free. `data`: the training data's fingerprint, `precision` of the weights. Throws UsageError naming every difference.
// Returns what was changed with leave, to be printed.
struct RunMeaning { OptionValues options; std::string data, precision; ModelConfig model; };
std::vector<std::string> check_changes(const RunMeaning& before, const RunMeaning& now, const std::string& allow_change);

// Steps of the run: --steps, or as many as --epochs give with this much data.
long long total_steps(const Options& options, long long windows, long long windows_per_step);

// The schedule of a run of that many steps. A --warmup longer than the run is refused; the default shrinks to a tenth of the run.
LrSchedule make_lr_schedule(const Options& options, long long steps);
