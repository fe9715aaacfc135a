#include "llmc/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <sstream>
#include <variant>

#include <CLI/CLI.hpp>

#include "llmc/error.h"
#include "llmc/mapped_file.h"

namespace {

// What a row holds. Memory is a number of bytes with an optional unit, Count a whole number with an optional k, M, B or T. Flag takes no value; an int, so that -1
// can mean "not said".
using Target = std::variant<int Options::*, long long Options::*, uint64_t Options::*, double Options::*, std::string Options::*>;
enum Kind { Number, Memory, Count, Flag };

constexpr double kTokens = 1e12;  // more than anyone trains on in a step or in steps; keeps products within 64 bits

struct Row {
    const char* name;
    const char* group;
    Target target;
    double least, most;         // legal range of a number, both ends included
    const char* choices;        // "a|b|c" for a word, nullptr for anything
    const char* help;
    const char* instead = nullptr;  // not built yet: refused, with what to do instead
    Kind kind = Number;
};

// Shorthands for the table.
constexpr const char *M = "model", *D = "data", *O = "optimizer", *P = "parallel", *Y = "memory", *E = "evaluation", *R = "run folder", *L = "plan", *X = "other";
constexpr double kTiny = 1e-300;  // "above zero"

const Row kRows[] = {
    {"preset", M, &Options::preset, 0, 0, nullptr, "shape of the model and defaults to train it: tiny, 124M, 0.5B, 1.5B, 3B, 4B, qwen2.5-0.5B, qwen2.5-1.5B, qwen2.5-3B, qwen2.5-7B"},
    {"model", M, &Options::model, 0, 0, nullptr, "Hugging Face folder to start from", "import of weights is not built; --from-config FILE trains the same shape from random weights"},
    {"from-config", M, &Options::from_config, 0, 0, nullptr, "Hugging Face config.json (llama, qwen2, qwen3) that gives the shape; random weights; excludes --preset"},
    {"num-layers", M, &Options::num_layers, 1, 4096, nullptr, "override: layers"},
    {"channels", M, &Options::channels, 8, 1 << 18, nullptr, "override: width of the residual stream"},
    {"num-heads", M, &Options::num_heads, 1, 8192, nullptr, "override: query heads"},
    {"num-kv-heads", M, &Options::num_kv_heads, 1, 8192, nullptr, "override: key and value heads, a divisor of --num-heads"},
    {"head-dim", M, &Options::head_dim, 1, 256, nullptr, "override: elements of a head, a multiple of 8"},
    {"ffn-dim", M, &Options::ffn_dim, 8, 1 << 20, nullptr, "override: width of the feed-forward part"},
    {"vocab-size", M, &Options::vocab_size, 2, 1 << 24, nullptr, "override: number of token ids"},
    {"max-seq-len", M, &Options::max_seq_len, 1, 1 << 22, nullptr, "override: longest sequence"},
    {"rope-theta", M, &Options::rope_theta, 1, 1e12, nullptr, "override: base of the rotary frequencies"},
    {"norm-eps", M, &Options::norm_eps, kTiny, 0.1, nullptr, "override: epsilon of RMSNorm"},
    {"tied", M, &Options::tied, 0, 0, nullptr, "override: the head is the embedding", nullptr, Flag},
    {"untied", M, &Options::untied, 0, 0, nullptr, "override: the head has its own weights", nullptr, Flag},
    {"qkv-bias", M, &Options::qkv_bias, 0, 0, nullptr, "override: biases in the query, key and value projections (--qkv-bias=false: none)", nullptr, Flag},
    {"qk-norm", M, &Options::qk_norm, 0, 0, nullptr, "override: RMSNorm on queries and keys (--qk-norm=false: none)", nullptr, Flag},

    {"train-data", D, &Options::train_data, 0, 0, nullptr, "token shards to train on, a quoted glob pattern"},
    {"val-data", D, &Options::val_data, 0, 0, nullptr, "token shards to evaluate on, a quoted glob pattern"},
    {"seq-len", D, &Options::seq_len, 1, 1 << 22, nullptr, "tokens of a sequence"},
    {"micro-batch", D, &Options::micro_batch, 1, 1 << 20, nullptr, "sequences a rank computes at once"},
    {"total-batch", D, &Options::total_batch, 0, kTokens, nullptr, "tokens a step over all ranks, a multiple of micro-batch x seq-len x ranks; 0 = one micro-step"},
    {"seed", D, &Options::seed, 0, 1.8446744073709552e19, nullptr, "seed of the initial weights, the data order, rounding and sampling"},
    {"show-batch", D, &Options::show_batch, 0, kTokens, nullptr, "print which windows of the data the given step trains on, and stop"},

    {"steps", O, &Options::steps, 1, kTokens, nullptr, "optimizer steps; excludes --epochs"},
    {"epochs", O, &Options::epochs, kTiny, 1e9, nullptr, "passes over the training data, a fraction allowed; excludes --steps"},
    {"lr", O, &Options::lr, 0, 1e3, nullptr, "peak learning rate"},
    {"warmup", O, &Options::warmup, 0, kTokens, nullptr, "steps of linear warm-up; the default is at most a tenth of the run"},
    {"schedule", O, &Options::schedule, 0, 0, "cosine|linear|constant|wsd", "learning rate after the warm-up; wsd is stable, then linear over the last fifth of the run"},
    {"final-lr-frac", O, &Options::final_lr_frac, 0, 1, nullptr, "learning rate of the last step as a share of the peak (constant: unused)"},
    {"beta1", O, &Options::beta1, 0, 0.999999, nullptr, "AdamW: decay of the first moment"},
    {"beta2", O, &Options::beta2, 0, 0.99999999, nullptr, "AdamW: decay of the second moment"},
    {"eps", O, &Options::eps, 1e-30, 1, nullptr, "AdamW: epsilon, added after bias correction"},
    {"weight-decay", O, &Options::weight_decay, 0, 100, nullptr, "AdamW: decoupled decay, on matrices only"},
    {"clip", O, &Options::clip, 0, 1e30, nullptr, "largest global gradient norm (the norm is logged before clipping); 0 = off"},
    {"max-skipped", O, &Options::max_skipped, 0, 1 << 30, nullptr, "steps in a row skipped for a non-finite gradient before the run ends with an error"},

    {"zero-stage", P, &Options::zero_stage, 0, 3, nullptr, "ZeRO: 0 nothing sharded, 1 optimizer, 2 and gradients, 3 and parameters"},
    {"bucket-mb", P, &Options::bucket_mb, 0, 1e6, nullptr, "merge what is communicated at once up to this many MB (10^6 bytes); 0 = one layer at a time"},
    {"no-overlap", P, &Options::no_overlap, 0, 0, nullptr, "communicate after computing, not beside it (same bits, slower)", nullptr, Flag},
    {"sync-every-micro-step", P, &Options::sync_every_micro_step, 0, 0, nullptr, "stages 0 and 1: synchronise gradients after every micro-step, not only after the last (for comparison: it sends more)", nullptr, Flag},
    {"comm-timeout", P, &Options::comm_timeout, 1, 1e6, nullptr, "seconds without progress before a run is ended"},
    {"check-collectives", P, &Options::check_collectives, 0, 0, nullptr, "compare the sequence of collectives over the ranks", "the check is not built; remove the option", Flag},

    {"device-memory", Y, &Options::device_memory, 0, 1e18, nullptr, "device memory to use, such as 80GB, 24GiB or bytes; 0 = all there is", nullptr, Memory},
    {"memory-reserve", Y, &Options::memory_reserve, 0, 1e18, nullptr, "of it, what lies outside the program's own allocations: CUDA context, libraries, NCCL; default 2GB where a GPU is planned for", nullptr, Memory},
    {"ignore-plan", Y, &Options::ignore_plan, 0, 0, nullptr, "start although the plan of the memory says that the run cannot fit", nullptr, Flag},
    {"allocate-only", Y, &Options::allocate_only, 0, 0, nullptr, "allocate everything a run needs on the device, print the start-up table, and stop", nullptr, Flag},
    {"recompute", Y, &Options::recompute, 0, 0, "none|norm|ffn|block", "activations computed again in backward instead of kept (same bits): norm two norms a layer, ffn also the feed-forward part, block all of a layer but its input"},
    {"lmhead-chunks", Y, &Options::lmhead_chunks, 1, 1 << 20, nullptr, "parts the head and loss are computed in, so that only one part's logits are in memory; divides micro-batch x seq-len"},
    {"grad-dtype", Y, &Options::grad_dtype, 0, 0, "bf16|fp32", "type gradients are accumulated and reduced in: bf16 with stochastic rounding over micro-steps, or fp32 (2 more bytes a parameter, twice the gradient bytes sent)"},

    {"val-every", E, &Options::val_every, 0, kTokens, nullptr, "steps between evaluations; 0 = only after the last step"},
    {"val-batches", E, &Options::val_batches, 0, kTokens, nullptr, "validation sequences to evaluate, in units of --micro-batch; 0 = all"},
    {"sample-every", E, &Options::sample_every, 0, kTokens, nullptr, "steps between samples of generated text; 0 = never"},
    {"sample-tokens", E, &Options::sample_tokens, 1, 1 << 22, nullptr, "tokens of a sample"},
    {"prompt", E, &Options::prompt, 0, 0, nullptr, "text a sample begins with"},
    {"temperature", E, &Options::temperature, 0, 100, nullptr, "sampling: flatter above 1, sharper below; 0 = always the likeliest token"},
    {"top-k", E, &Options::top_k, 0, 1 << 24, nullptr, "sampling: only the k likeliest tokens; 0 = all"},
    {"top-p", E, &Options::top_p, kTiny, 1, nullptr, "sampling: only the likeliest tokens that make up this probability; 1 = all"},

    {"out", R, &Options::out, 0, 0, nullptr, "folder of the run: metrics.jsonl, log.rankN, checkpoints"},
    {"save-every", R, &Options::save_every, 0, kTokens, nullptr, "steps between checkpoints; 0 = only by time, at the end, and on SIGUSR1, which also ends the run"},
    {"save-minutes", R, &Options::save_minutes, 0, 1e9, nullptr, "minutes between checkpoints, at most; 0 = not by time"},
    {"save-mode", R, &Options::save_mode, 0, 0, "stream|async", "stream: training waits while a checkpoint is written; async: it waits for a copy in host memory, and goes on while that is written"},
    {"keep", R, &Options::keep, 1, 1 << 30, nullptr, "newest checkpoints to keep"},
    {"no-save", R, &Options::no_save, 0, 0, nullptr, "write no checkpoint at all, at the end neither", nullptr, Flag},
    {"resume", R, &Options::resume, 0, 0, nullptr, "go on from a checkpoint: its folder, or auto: the newest complete one of --out, or a new run where there is none. Options that are not given are the checkpoint's"},
    {"allow-change", R, &Options::allow_change, 0, 0, nullptr, "with --resume: options, with commas, that may change what is computed, such as total-batch,steps; also train-data and precision"},

    {"plan", L, &Options::plan, 0, 0, nullptr, "print the bytes and times of a run of these options in every ZeRO stage, and stop; needs no device. The options below are for it only", nullptr, Flag},
    {"plan-json", L, &Options::plan_json, 0, 0, nullptr, "print the plan as one JSON object", nullptr, Flag},
    {"ranks", L, &Options::ranks, 1, 1 << 20, nullptr, "ranks to plan for; default: those that were started"},
    {"ranks-per-node", L, &Options::ranks_per_node, 1, 1 << 20, nullptr, "ranks that the first link of --link joins"},
    {"link", L, &Options::link, 0, 0, nullptr, "name=GB/s[:latency in microseconds] of each link to plan for, with commas: what one rank can send over it; the first joins the ranks of a node, the last the nodes"},
    {"params", L, &Options::params, 1, 1e15, nullptr, "plan for a number of parameters, such as 502.2M, 70B or 1.3e9, and no model: arithmetic of what ZeRO shards and sends", nullptr, Count},
    {"grad-accum", L, &Options::grad_accum, 1, 1 << 30, nullptr, "micro-steps a step, in place of --total-batch"},
    {"step-seconds", L, &Options::step_seconds, kTiny, 1e9, nullptr, "measured seconds that a rank computes for a step; takes the place of --device-tflops and --mfu"},
    {"device-tflops", L, &Options::device_tflops, kTiny, 1e9, nullptr, "bf16 TFLOP/s of a device by its datasheet, without sparsity; the default is an H100's or H200's"},
    {"mfu", L, &Options::mfu, kTiny, 1, nullptr, "share of --device-tflops that computation reaches"},
    {"price", L, &Options::price, 0, 1e9, nullptr, "price of a device-hour, in any currency; 0 = no cost is printed"},

    {"generate", X, &Options::generate, 0, 0, nullptr, "print a sample of --model and stop", "it needs --model, which is not built; --sample-every prints samples during training", Flag},
    {"profile", X, &Options::profile, 0, 0, nullptr, "time the phases of a step", "the profiler is not built; HOSTCUDA_PROFILE=1 times kernels on a CPU, Nsight on a GPU", Flag},
    {"config", X, &Options::config, 0, 0, nullptr, "file of options, one `name = value` a line; the command line wins over it"},
};
constexpr size_t kRowCount = std::size(kRows);

// Defaults that depend on the size of the model. micro_batch is what a 2-core machine (tiny) or one 80 GB GPU takes.
struct TrainingDefaults { const char* preset; int seq_len, micro_batch; long long steps; double lr; long long warmup, val_every, sample_every; int sample_tokens; const char* prompt; };
constexpr TrainingDefaults kTrainingDefaults[] = {
    {"tiny", 128, 8, 300, 3e-3, 20, 100, 100, 192, "def "},
    {"124M", 1024, 16, 0, 6e-4, 700, 250, 1000, 128, ""},
    {"0.5B", 2048, 4, 0, 4e-4, 1000, 250, 1000, 128, ""},
    {"1.5B", 2048, 2, 0, 3e-4, 2000, 250, 1000, 128, ""},
    {"", 2048, 1, 0, 3e-4, 2000, 250, 1000, 128, ""},  // every other preset, and --from-config
};
constexpr double kDefaultEpochs = 1.0;  // where there are no default steps

[[noreturn]] __attribute__((format(printf, 1, 2))) void usage(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = format_va(format, args);
    va_end(args);
    throw UsageError(text);
}

const Row* find_row(const std::string& name) {
    for (const Row& row : kRows)
        if (name == row.name) return &row;
    return nullptr;
}

// Edit distance, for "did you mean".
size_t distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
        }
    }
    return row[b.size()];
}

std::string nearest_name(std::string name) {
    std::replace(name.begin(), name.end(), '_', '-');
    std::string best = "help";
    for (const Row& row : kRows)
        if (distance(name, row.name) < distance(name, best)) best = row.name;
    return best;
}

[[noreturn]] void unknown_option(const std::string& shown, const std::string& name, const std::string& where) {
    usage("%sunknown option %s; did you mean --%s? --help lists all", where.c_str(), shown.c_str(), nearest_name(name).c_str());
}

bool in_list(const char* choices, const std::string& word) {
    const std::string all = std::string("|") + choices + "|";
    return !word.empty() && word.find('|') == std::string::npos && all.find("|" + word + "|") != std::string::npos;
}

template <typename T>
bool read_number(const std::string& text, T& value) {
    const char* first = text.c_str();
    const char* last = first + text.size();
    if (first != last && *first == '+') ++first;
    const auto end = std::from_chars(first, last, value);
    return end.ec == std::errc() && end.ptr == last && first != last;
}

// A number and what follows it, after a space if there is one. Too large for a double is infinity, too small 0.
bool read_number_and_unit(const std::string& text, double& number, std::string& unit) {
    const size_t end = std::min(text.find_first_not_of("0123456789.eE+-"), text.size());
    const std::string digits = text.substr(0, end);
    if (!read_number(digits, number)) {
        double exact;
        const char* first = digits.c_str() + (digits[0] == '+');
        if (std::from_chars(first, digits.c_str() + digits.size(), exact).ec != std::errc::result_out_of_range) return false;
        number = strtod(first, nullptr);
    }
    unit = text.substr(end);
    if (!unit.empty() && unit[0] == ' ') unit.erase(0, 1);
    return true;
}

struct Unit { const char* name; double factor; };
// Powers of ten for kB, MB, GB, TB; powers of two for KiB, MiB, GiB, TiB.
constexpr Unit kByteUnits[] = {{"", 1}, {"B", 1}, {"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
constexpr Unit kCountUnits[] = {{"", 1}, {"k", 1e3}, {"K", 1e3}, {"M", 1e6}, {"B", 1e9}, {"T", 1e12}};

// A whole number of bytes or of things with one of these units, within the row's range.
template <size_t N>
double read_with_unit(const Row& row, const Unit (&units)[N], const std::string& text, const char* name, const char* must_be) {
    double number;
    std::string word;
    const bool readable = read_number_and_unit(text, number, word);
    const Unit* unit = std::find_if(units, units + N, [&](const Unit& u) { return word == u.name; });
    if (!readable || unit == units + N) usage("%s is `%s`; it must be %s", name, text.c_str(), must_be);
    const double value = number * unit->factor;
    if (value < 0) usage("%s is `%s`, which is negative; it must be %s", name, text.c_str(), must_be);
    if (value > row.most) usage("%s is `%s`, which is too large: the most is %.0e; it must be %s", name, text.c_str(), row.most, must_be);
    if (value < row.least) usage("%s is `%s`, which is too small: the least is %g; it must be %s", name, text.c_str(), row.least, must_be);
    // Nobody means a device of 80 bytes.
    if (row.kind == Memory && word.empty() && value > 0 && value < 4096) usage("%s is `%s`, which is %.15g bytes: a unit is missing, such as in %sGB", name, text.c_str(), value, text.c_str());
    return std::round(value);
}

std::string range_text(const Row& row) {
    const std::string least = row.least == kTiny ? "above 0" : format("%.15g", row.least);
    if (row.least == kTiny) return format("%s and at most %.15g", least.c_str(), row.most);
    return format("between %s and %.15g", least.c_str(), row.most);
}

// Sets one option from its text. `shown` is how the user wrote the option, for messages.
void set_value(Options& options, const Row& row, const std::string& text, const std::string& shown) {
    const char* name = shown.c_str();
    if (row.kind == Memory) {
        options.*std::get<long long Options::*>(row.target) =
            static_cast<long long>(read_with_unit(row, kByteUnits, text, name, "bytes or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 80GB"));
    } else if (row.kind == Count) {
        options.*std::get<double Options::*>(row.target) = read_with_unit(row, kCountUnits, text, name, "a number, or one with k, M, B or T, such as 502.2M, 70B or 1.3e9");
    } else if (row.kind == Flag) {
        const bool yes = in_list("true|1|yes|on", text), no = in_list("false|0|no|off", text);
        if (!yes && !no) usage("%s is `%s`; it is a switch: true or false", name, text.c_str());
        options.*std::get<int Options::*>(row.target) = yes;
    } else {
        std::visit([&](auto member) {
            using T = std::remove_reference_t<decltype(options.*member)>;
            if constexpr (std::is_same_v<T, std::string>) {
                if (row.choices && !in_list(row.choices, text)) usage("%s is `%s`; it must be one of %s", name, text.c_str(), row.choices);
                // An empty word is an unset shell variable, except for a prompt.
                if (text.empty() && strcmp(row.name, "prompt") != 0) usage("%s is empty; give a value or leave the option out", name);
                options.*member = text;
            } else {
                T value{};
                const char* what = std::is_floating_point_v<T> ? "number" : "whole number";
                double as_double;
                // A fraction or exponent given for a whole number parses as a number but not as this type: same message.
                if (!read_number(text, value)) {
                    if (!read_number(text, as_double) || !std::is_floating_point_v<T>) usage("%s is `%s`; it must be a %s %s", name, text.c_str(), what, range_text(row).c_str());
                }
                as_double = static_cast<double>(value);
                if (!(as_double >= row.least && as_double <= row.most)) usage("%s is %s; it must be a %s %s", name, text.c_str(), what, range_text(row).c_str());
                options.*member = value;
            }
        }, row.target);
    }
    if (row.instead && !(row.kind == Flag && options.*std::get<int Options::*>(row.target) == 0))
        usage("%s%s is not available yet: %s", name, row.kind == Flag ? "" : (" " + text).c_str(), row.instead);
}

std::string value_text(const Options& options, const Row& row) {
    if (row.kind == Flag) {
        const int value = options.*std::get<int Options::*>(row.target);
        return value < 0 ? "" : value ? "true" : "false";
    }
    return std::visit([&](auto member) -> std::string {
        using T = std::remove_cv_t<std::remove_reference_t<decltype(options.*member)>>;
        if constexpr (std::is_same_v<T, std::string>) return options.*member;
        else if constexpr (std::is_same_v<T, double>) {
            const std::string text = format(row.kind == Count ? "%.15g" : "%.6g", options.*member);
            return strtod(text.c_str(), nullptr) == options.*member ? text : format("%.17g", options.*member);  // a kept value must be the same value
        }
        else return std::to_string(options.*member);
    }, row.target);
}

// Options that say nothing of a run that trains.
bool is_for_plan_only(const Row& row) { return row.group == L && strcmp(row.name, "plan") != 0; }

// What a checkpoint and a later start make of an option.
enum class OnResume {
    Start,    // says something of one start only: not kept
    Free,     // kept, and free to change: what is computed stays the same, but for the order of sums
    Meaning,  // kept, and changed only by leave: it changes what is computed
};

bool is_one_of(const char* name, std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* one) { return strcmp(name, one) == 0; });
}

OnResume on_resume(const Row& row) {
    if (row.instead || row.group == L || row.group == X || is_one_of(row.name, {"show-batch", "device-memory", "memory-reserve", "ignore-plan", "allocate-only", "out", "resume", "allow-change", "no-save"}))
        return OnResume::Start;
    // The training data is held by its fingerprint, the number of epochs by that of steps.
    if (is_one_of(row.name, {"train-data", "val-data", "micro-batch", "max-skipped"})) return OnResume::Free;
    if (row.group == M || row.group == D || row.group == O || is_one_of(row.name, {"grad-dtype"})) return OnResume::Meaning;
    return OnResume::Free;
}

// The user gave it, other than as a switch that is off like the one nobody gives.
bool is_asked_for(const Options& options, const Row& row) {
    if (!options.given(row.name)) return false;
    if (row.kind != Flag) return true;
    const Options untouched;
    const auto member = std::get<int Options::*>(row.target);
    return options.*member != 0 || untouched.*member != 0;
}

// Overrides and what has no default show nothing while unset; neither does the member of a pair of which the other is used.
bool is_unset(const Options& options, const Row& row) {
    const std::string name = row.name;
    if (name == "preset") return !options.from_config.empty();
    if (row.group == M && !options.given(row.name)) return true;
    for (const char* without_default : {"memory-reserve", "ranks", "params", "grad-accum", "step-seconds", "price"})
        if (name == without_default && !options.given(without_default)) return true;
    return (name == "steps" && options.steps == 0) || (name == "epochs" && options.epochs == 0.0) || (name == "show-batch" && options.show_batch < 0);
}

const TrainingDefaults& training_defaults(const Options& options) {
    const TrainingDefaults* found = kTrainingDefaults;
    while (found->preset[0] && (!options.from_config.empty() || options.preset != found->preset)) ++found;
    return *found;
}

void read_config_file(Options& options, const std::string& path) {
    std::vector<CLI::ConfigItem> items;
    try {
        const MappedFile file(path);
        std::istringstream text(std::string(file.data(), file.data() + file.size()));
        items = CLI::ConfigTOML().from_config(text);
    } catch (const Error& error) {
        usage("--config %s", error.what());
    } catch (const CLI::Error& error) {
        usage("--config %s: %s", path.c_str(), error.what());
    }
    for (const CLI::ConfigItem& item : items) {
        if (item.name == "++" || item.name == "--") continue;  // CLI11's marks for the start and end of a [section]
        const std::string where = "--config " + path + ": ", shown = where + "`" + item.name + "`";
        const Row* row = find_row(item.name);
        if (!row) unknown_option("`" + item.name + "`", item.name, where);
        if (!item.parents.empty()) usage("%s is in a section; the file holds plain `name = value` lines", shown.c_str());
        if (strcmp(row->name, "config") == 0) usage("%s: a config file cannot name another", shown.c_str());
        if (item.inputs.size() != 1) usage("%s has %zu values; give it once, with one value (text with spaces needs quotes)", shown.c_str(), item.inputs.size());
        Options::Source& source = options.sources[row - kRows];
        if (source == Options::Source::ConfigFile) usage("%s is given twice", shown.c_str());
        if (source == Options::Source::CommandLine) {
            Options scratch = options;  // the command line wins, but a value that is nonsense is still said
            set_value(scratch, *row, item.inputs[0], shown);
            continue;
        }
        set_value(options, *row, item.inputs[0], shown);
        source = Options::Source::ConfigFile;
    }
}

// Takes from a checkpoint what nobody gives now; nothing of the model where the user names another preset or file, which is compared later.
void take_kept(Options& options, const OptionValues& kept) {
    const bool other_model = options.given("preset") || options.given("from-config");
    for (const auto& [name, text] : kept) {
        const Row* row = find_row(name);
        if (!row || on_resume(*row) == OnResume::Start) usage("the checkpoint keeps an option `%s`, which this program does not", name.c_str());
        if (options.given(row->name) || (row->group == M && other_model)) continue;
        set_value(options, *row, text, "the checkpoint's --" + name);
        options.sources[row - kRows] = Options::Source::Checkpoint;
    }
}

// Fills what the user left open and the preset decides.
void fill_defaults(Options& options) {
    const TrainingDefaults& d = training_defaults(options);
    const auto fill = [&](const char* name, auto& member, auto value) {
        if (!options.given(name)) member = value;
    };
    fill("seq-len", options.seq_len, d.seq_len);
    fill("micro-batch", options.micro_batch, d.micro_batch);
    fill("lr", options.lr, d.lr);
    fill("warmup", options.warmup, d.warmup);
    fill("val-every", options.val_every, d.val_every);
    fill("sample-every", options.sample_every, d.sample_every);
    fill("sample-tokens", options.sample_tokens, d.sample_tokens);
    fill("prompt", options.prompt, std::string(d.prompt));
    fill("train-data", options.train_data, std::string("data/python-stdlib/train_*.bin"));
    fill("val-data", options.val_data, std::string("data/python-stdlib/val_*.bin"));
    if (!options.resume.empty() && options.resume != "auto") {  // the run folder of a checkpoint that is named is the one it lies in
        const size_t slash = options.resume.rfind('/');
        fill("out", options.out, slash == std::string::npos ? "." : options.resume.substr(0, std::max<size_t>(slash, 1)));
    }
    if (options.out.empty()) options.out = "runs/" + (options.from_config.empty() ? options.preset : std::string("custom"));
    if (!options.given("steps") && !options.given("epochs")) {
        options.steps = d.steps;
        if (d.steps == 0) options.epochs = kDefaultEpochs;
    }
}

// Puts an option back to what it is when nobody gives it.
void forget(Options& options, const Row& row) {
    const Options untouched;
    std::visit([&](auto member) { options.*member = untouched.*member; }, row.target);
    options.sources[&row - kRows] = Options::Source::Default;
}

// Two options of which one may be given. Where they come from different sources, the stronger one wins here too.
void exclude(Options& options, const Row& a, const Row& b, const char* advice) {
    if (!is_asked_for(options, a) || !is_asked_for(options, b)) return;
    const Options::Source from_a = options.sources[&a - kRows], from_b = options.sources[&b - kRows];
    if (from_a == from_b) usage("--%s and --%s exclude each other; %s", a.name, b.name, advice);
    forget(options, from_a < from_b ? a : b);
}

// Rules between options.
void check_pairs(Options& options) {
    static constexpr const char* kOne = "give one of them";
    static constexpr const char* kStops = "each prints something and stops; give one of them";
    static constexpr const char* kStarts = "one goes on with a run, the other looks at a new one; leave one out";
    static constexpr const char* kNever = "one writes no checkpoint, the other says which; leave one out";
    static constexpr struct { const char *a, *b, *advice; } kExclusive[] = {
        {"steps", "epochs", kOne}, {"preset", "from-config", kOne}, {"tied", "untied", kOne},
        {"plan", "show-batch", kStops}, {"plan", "allocate-only", kStops}, {"show-batch", "allocate-only", kStops},
        {"plan", "resume", kStarts}, {"show-batch", "resume", kStarts}, {"allocate-only", "resume", kStarts},
        {"no-save", "save-every", kNever}, {"no-save", "save-minutes", kNever}, {"no-save", "save-mode", kNever}, {"no-save", "keep", kNever},
        {"params", "total-batch", "a number of parameters has no batch; give the micro-steps with --grad-accum"},
        {"grad-accum", "total-batch", "each says how many micro-steps a step has; give one of them"}};
    for (const auto& pair : kExclusive) exclude(options, *find_row(pair.a), *find_row(pair.b), pair.advice);
    for (const Row& row : kRows)
        if (row.group == M) exclude(options, *find_row("params"), row, "plan for a number of parameters or for a model");
    for (const Row& row : kRows) {
        if (options.plan || !is_for_plan_only(row) || !is_asked_for(options, row)) continue;
        if (options.sources[&row - kRows] == Options::Source::CommandLine) usage("--%s is for --plan; add --plan or leave it out", row.name);
        usage("--config %s: `%s` is for --plan; add `plan = true` or leave it out", options.config.c_str(), row.name);
    }
    while (options.resume.size() > 1 && options.resume.back() == '/') options.resume.pop_back();
    if (options.given("allow-change") && options.resume.empty()) usage("--allow-change is for --resume; add it, or leave --allow-change out");
    if (options.given("steps") && options.given("warmup") && options.warmup > options.steps)
        usage("--warmup %lld is longer than the run of --steps %lld; use at most %lld", options.warmup, options.steps, options.steps);
}

// CLI11 splits the command line into names and texts; the table does everything else. One handle a row, then --help's.
std::vector<CLI::Option*> build_parser(CLI::App& app) {
    std::vector<CLI::Option*> handles;
    app.set_help_flag();  // --help is ours, so that it works the same on every rank
    app.allow_extras();   // unknown options are ours too, for the suggestion
    for (const Row& row : kRows) {
        const std::string name = std::string("--") + row.name;
        CLI::Option* option = row.kind == Flag ? app.add_flag(name) : app.add_option(name, [](const CLI::results_t&) { return true; });
        handles.push_back(option->multi_option_policy(CLI::MultiOptionPolicy::TakeAll));
        if (row.kind != Flag) option->expected(1)->type_size(1);
    }
    handles.push_back(app.add_flag("-h,--help"));
    return handles;
}

}  // namespace

bool Options::given(const char* name) const {
    const Row* row = find_row(strncmp(name, "--", 2) == 0 ? name + 2 : name);
    if (!row) fail("there is no option `%s` in the table", name);
    const size_t index = row - kRows;
    return index < sources.size() && sources[index] != Source::Default;
}

LrSchedule::Kind Options::schedule_kind() const {
    return schedule == "cosine" ? LrSchedule::Kind::Cosine : schedule == "linear" ? LrSchedule::Kind::Linear : schedule == "constant" ? LrSchedule::Kind::Constant : LrSchedule::Kind::Wsd;
}

Options parse_options(int argc, const char* const* argv, const OptionValues& kept) {
    Options options;
    options.sources.assign(kRowCount, Options::Source::Default);
    CLI::App app;
    const std::vector<CLI::Option*> handles = build_parser(app);
    try {
        app.parse(argc, const_cast<char**>(argv));
    } catch (const CLI::Error& error) {
        usage("%s; --help lists all options", error.what());
    }
    if (handles.back()->count() > 0) {
        options.help = true;
        return options;
    }
    for (const std::string& extra : app.remaining()) {
        if (extra.empty() || extra[0] != '-') usage("`%s` is no option; options begin with --, and text with spaces needs quotes", extra.c_str());
        const std::string shown = extra.substr(0, extra.find('='));  // --name=value
        unknown_option(shown, shown.substr(std::min(shown.find_first_not_of('-'), shown.size())), "");
    }
    for (size_t i = 0; i < kRowCount; ++i) {
        if (handles[i]->count() == 0) continue;
        // The last of several wins, so that a recipe script can take further options; each is checked.
        for (const std::string& text : handles[i]->results()) set_value(options, kRows[i], text, std::string("--") + kRows[i].name);
        options.sources[i] = Options::Source::CommandLine;
    }
    if (options.given("config")) read_config_file(options, options.config);
    take_kept(options, kept);
    const std::vector<std::string> presets = preset_names();
    if (std::find(presets.begin(), presets.end(), options.preset) == presets.end()) {
        try {
            preset_config(options.preset);
        } catch (const Error& error) {
            usage("--preset: %s", error.what());
        }
    }
    check_pairs(options);
    fill_defaults(options);
    return options;
}

std::string options_help() {
    Options defaults;
    defaults.sources.assign(kRowCount, Options::Source::Default);
    fill_defaults(defaults);
    std::string text =
        "train_gpt: trains a Llama-style model from token shards.\n"
        "  mpirun -np 4 ./train_gpt [options]     four ranks; plain ./train_gpt is one\n"
        "Without options it trains preset tiny on data/python-stdlib. Defaults in [ ] are those of that preset.\n";
    const char* group = nullptr;
    for (const Row& row : kRows) {
        if (row.group != group) text += format("\n%s\n", group = row.group);
        std::string left = std::string("  --") + row.name;
        if (row.choices) left += std::string(" ") + row.choices;
        else if (row.kind == Memory) left += " BYTES";
        else if (row.kind == Count) left += " N";
        else if (row.kind != Flag) left += std::holds_alternative<std::string Options::*>(row.target) ? " TEXT" : std::holds_alternative<double Options::*>(row.target) ? " X" : " N";
        text += left.size() < 30 ? left + std::string(30 - left.size(), ' ') : left + "\n" + std::string(30, ' ');
        text += row.help;
        const std::string value = is_unset(defaults, row) || row.kind == Flag ? "" : value_text(defaults, row);
        if (row.instead) text += " (not available yet)";
        else if (!value.empty()) text += " [" + value + "]";
        text += "\n";
    }
    return text + "\n  -h, --help                  this text\n";
}

std::vector<OptionRow> option_rows(const Options& options) {
    std::vector<OptionRow> rows;
    for (size_t i = 0; i < kRowCount; ++i) {
        const Row& row = kRows[i];
        const Options::Source source = i < options.sources.size() ? options.sources[i] : Options::Source::Default;
        if (!options.plan && (is_for_plan_only(row) || strcmp(row.name, "plan") == 0)) continue;
        if (source == Options::Source::Default && (is_unset(options, row) || row.instead || value_text(options, row).empty())) continue;
        rows.push_back({row.group, row.name, value_text(options, row),
                        source == Options::Source::Default ? "default" : source == Options::Source::Checkpoint ? "checkpoint" : source == Options::Source::ConfigFile ? "config file" : "command line"});
    }
    return rows;
}

ModelConfig model_config_from_options(Options& o, const ModelConfig* resumed) {
    const auto given_now = [&](const char* name) { return o.given(name) && o.sources[find_row(name) - kRows] > Options::Source::Checkpoint; };
    const bool same_base = resumed && !given_now("preset") && !given_now("from-config");
    ModelConfig config = same_base ? *resumed : o.from_config.empty() ? preset_config(o.preset) : config_from_json_file(o.from_config);
    const struct { int value; int& field; } numbers[] = {
        {o.num_layers, config.num_layers}, {o.channels, config.channels}, {o.num_heads, config.num_heads}, {o.num_kv_heads, config.num_kv_heads},
        {o.head_dim, config.head_dim},     {o.ffn_dim, config.ffn_dim},   {o.vocab_size, config.vocab_size}, {o.max_seq_len, config.max_seq_len}};
    for (const auto& number : numbers)
        if (number.value > 0) number.field = number.value;
    if (o.rope_theta > 0.0) config.rope_theta = o.rope_theta;
    if (o.norm_eps > 0.0) config.norm_eps = static_cast<float>(o.norm_eps);
    if (o.tied >= 0) config.tied = o.tied != 0;
    if (o.untied >= 0) config.tied = o.untied == 0;
    if (o.qkv_bias >= 0) config.qkv_bias = o.qkv_bias != 0;
    if (o.qk_norm >= 0) config.qk_norm = o.qk_norm != 0;
    for (size_t i = 0; i < std::min(kRowCount, o.sources.size()) && !same_base; ++i) {
        const std::string name = kRows[i].name;
        if (kRows[i].group != M || o.sources[i] == Options::Source::Default || name == "preset" || name == "model" || name == "from-config") continue;
        config.name += ", changed";
        break;
    }
    try {
        config.validate();
    } catch (const Error& error) {
        usage("the model (%s with the overrides of the command line): %s", config.name.c_str(), error.what());
    }
    if (!o.given("seq-len")) o.seq_len = std::min(o.seq_len, config.max_seq_len);
    if (o.seq_len > config.max_seq_len)
        usage("--seq-len %d is longer than the model's longest sequence %d; use at most that, or raise --max-seq-len", o.seq_len, config.max_seq_len);
    // Products and kernels count rows in an int, and round them up to tiles and slices.
    const long long rows = static_cast<long long>(o.micro_batch) * o.seq_len, most_rows = 1LL << 30;
    if (rows > most_rows)
        usage("--micro-batch %d x --seq-len %d = %lld rows of a micro-batch are more than the %lld that products and kernels count; use at most --micro-batch %lld with this --seq-len",
              o.micro_batch, o.seq_len, rows, most_rows, most_rows / o.seq_len);
    if (rows % o.lmhead_chunks != 0) {
        long long below = 1, above = rows;  // the nearest divisors; both divide
        for (long long divisor = 1; divisor * divisor <= rows; ++divisor) {
            if (rows % divisor != 0) continue;
            for (const long long one : {divisor, rows / divisor}) {
                if (one < o.lmhead_chunks) below = std::max(below, one);
                else above = std::min(above, one);
            }
        }
        const bool more = o.lmhead_chunks < rows;
        usage("--lmhead-chunks %d does not divide micro-batch %d x seq-len %d = %lld rows; try %lld%s", o.lmhead_chunks, o.micro_batch, o.seq_len, rows, below,
              more ? format(" or %lld", above).c_str() : "");
    }
    return config;
}

BatchPlan plan_batch(long long total_batch, int micro_batch, int seq_len, int ranks, int grad_accum) {
    CHECK(total_batch == 0 || grad_accum == 0, "both a total batch of %lld and %d micro-steps are given", total_batch, grad_accum);
    const long long unit = static_cast<long long>(micro_batch) * seq_len * ranks;  // at most 2^62 by the table's ranges
    const auto too_many = [&](const char* micro_steps) {
        usage("micro-batch %d x seq-len %d x %d ranks%s are more than the 10^12 tokens a step may have; use a smaller --micro-batch or --seq-len%s", micro_batch, seq_len, ranks,
              micro_steps, micro_steps[0] ? ", or fewer micro-steps (--grad-accum)" : "");
    };
    if (static_cast<double>(unit) > kTokens) too_many("");
    BatchPlan plan;
    if (total_batch > 0) {
        if (total_batch % unit != 0) {
            const long long below = total_batch / unit * unit, above = below + unit;
            usage("total batch %lld is not a multiple of micro-batch %d x seq-len %d x %d ranks = %lld; try %s%lld", total_batch, micro_batch, seq_len, ranks, unit,
                  below > 0 ? format("%lld or ", below).c_str() : "", above);
        }
        if (total_batch / unit > std::numeric_limits<int>::max()) usage("total batch %lld makes %lld micro-steps a step, more than an int holds; use a larger --micro-batch", total_batch, total_batch / unit);
        plan.grad_accum = static_cast<int>(total_batch / unit);
    } else if (grad_accum > 0) {
        if (static_cast<double>(unit) * grad_accum > kTokens) too_many(format(" x %d micro-steps", grad_accum).c_str());
        plan.grad_accum = grad_accum;
    }
    plan.tokens_per_step = unit * plan.grad_accum;
    plan.windows_per_step = plan.tokens_per_step / seq_len;
    return plan;
}

OptionValues kept_options(const Options& options, const BatchPlan& batch, const LrSchedule& schedule) {
    OptionValues kept;
    for (const Row& row : kRows) {
        if (on_resume(row) == OnResume::Start || is_unset(options, row) || (row.group == M && !options.given(row.name))) continue;
        const std::string text = value_text(options, row);
        if (!text.empty() || strcmp(row.name, "prompt") == 0) kept[row.name] = text;
    }
    kept.erase("epochs");
    kept["steps"] = std::to_string(schedule.steps);
    kept["warmup"] = std::to_string(schedule.warmup);
    kept["total-batch"] = std::to_string(batch.tokens_per_step);
    return kept;
}

namespace {

// What of a model makes its weights others, and what only how they are used.
struct ModelField { const char* name; bool may_change; std::string (*text)(const ModelConfig&); };
const ModelField kModelFields[] = {
    {"num-layers", false, [](const ModelConfig& c) { return std::to_string(c.num_layers); }},
    {"channels", false, [](const ModelConfig& c) { return std::to_string(c.channels); }},
    {"num-heads", false, [](const ModelConfig& c) { return std::to_string(c.num_heads); }},
    {"num-kv-heads", false, [](const ModelConfig& c) { return std::to_string(c.num_kv_heads); }},
    {"head-dim", false, [](const ModelConfig& c) { return std::to_string(c.head_dim); }},
    {"ffn-dim", false, [](const ModelConfig& c) { return std::to_string(c.ffn_dim); }},
    {"vocab-size", false, [](const ModelConfig& c) { return std::to_string(c.vocab_size); }},
    {"tied", false, [](const ModelConfig& c) { return std::string(c.tied ? "true" : "false"); }},
    {"qkv-bias", false, [](const ModelConfig& c) { return std::string(c.qkv_bias ? "true" : "false"); }},
    {"qk-norm", false, [](const ModelConfig& c) { return std::string(c.qk_norm ? "true" : "false"); }},
    {"max-seq-len", true, [](const ModelConfig& c) { return std::to_string(c.max_seq_len); }},
    {"rope-theta", true, [](const ModelConfig& c) {
         return c.rope_scaling.type == RopeScaling::Type::None ? format("%.17g", c.rope_theta)
                                                               : format("%.17g with scaling %.17g, %.17g, %.17g, %d", c.rope_theta, c.rope_scaling.factor, c.rope_scaling.low_freq_factor,
                                                                        c.rope_scaling.high_freq_factor, c.rope_scaling.original_max_seq_len);
     }},
    {"norm-eps", true, [](const ModelConfig& c) { return format("%.9g", static_cast<double>(c.norm_eps)); }},
};

std::set<std::string> allowed_changes(const std::string& allow_change) {
    std::set<std::string> allowed;
    for (size_t begin = 0; !allow_change.empty() && begin <= allow_change.size();) {
        const size_t end = std::min(allow_change.find(',', begin), allow_change.size());
        std::string name = allow_change.substr(begin, end - begin);
        if (name == "epochs") name = "steps";  // which is what epochs become
        const Row* row = find_row(name);
        const ModelField* field = std::find_if(std::begin(kModelFields), std::end(kModelFields), [&](const ModelField& f) { return name == f.name; });
        if (field != std::end(kModelFields) && !field->may_change) usage("--allow-change %s: a model of another shape has other weights; start a new run", name.c_str());
        const bool known = name == "precision" || name == "train-data" || field != std::end(kModelFields) || (row && row->group != M && on_resume(*row) == OnResume::Meaning);
        if (!known && row) usage("--allow-change %s: this option can be changed without leave, or is not kept", name.c_str());
        if (!known) usage("--allow-change %s: there is no such option; name options, with commas, such as total-batch,steps", name.c_str());
        allowed.insert(name);
        begin = end + 1;
    }
    return allowed;
}

}  // namespace

std::vector<std::string> check_changes(const RunMeaning& before, const RunMeaning& now, const std::string& allow_change) {
    const std::set<std::string> allowed = allowed_changes(allow_change);
    std::vector<std::string> changed;
    std::string refused, names;
    bool other_shape = false;
    const auto compare = [&](const std::string& name, const std::string& was, const std::string& is, bool may_change) {
        if (was == is) return;
        const std::string text = name + " was " + was + ", now " + is;
        if (may_change && allowed.count(name)) {
            changed.push_back(text);
            return;
        }
        refused += "\n  " + text;
        other_shape |= !may_change;
        names += (names.empty() ? "" : ",") + name;
    };
    for (const ModelField& field : kModelFields) compare(field.name, field.text(before.model), field.text(now.model), field.may_change);
    const auto value = [](const OptionValues& values, const char* name) {
        const auto found = values.find(name);
        return found == values.end() ? std::string("not set") : found->second;
    };
    for (const Row& row : kRows) {
        if (row.group != M && on_resume(row) == OnResume::Meaning) compare(row.name, value(before.options, row.name), value(now.options, row.name), true);
    }
    compare("train-data", before.data, now.data, true);
    compare("precision", before.precision, now.precision, true);
    if (!refused.empty()) {
        usage("this would be another run than the checkpoint's:%s\n%s", refused.c_str(),
              other_shape ? "a model of another shape cannot go on from these weights; leave the options of the model out, or start a new run in another --out"
                          : ("leave these options out to go on as before, or say --allow-change " + names).c_str());
    }
    const long long batch_before = atoll(value(before.options, "total-batch").c_str()), batch_now = atoll(value(now.options, "total-batch").c_str());
    if (batch_before != batch_now && batch_before > 0) {
        const double lr = strtod(value(now.options, "lr").c_str(), nullptr);
        changed.push_back(format("the square-root rule would suggest --lr %.4g for this batch (lr x sqrt(%lld / %lld)); it is not applied", lr * std::sqrt(static_cast<double>(batch_now) / batch_before),
                                 batch_now, batch_before));
    }
    return changed;
}

long long total_steps(const Options& options, long long windows, long long windows_per_step) {
    if (options.steps > 0) return options.steps;
    const double steps = options.epochs * static_cast<double>(windows) / static_cast<double>(windows_per_step);
    if (steps < 1.0)
        usage("--epochs %g of %lld windows are less than one step of %lld windows; use at least --epochs %.4g", options.epochs, windows, windows_per_step,
              static_cast<double>(windows_per_step) / static_cast<double>(windows));
    return static_cast<long long>(std::min(steps, 1e15));
}

LrSchedule make_lr_schedule(const Options& options, long long steps) {
    if (options.given("warmup") && options.warmup > steps)
        usage("--warmup %lld is longer than the run of %lld steps; use at most %lld", options.warmup, steps, steps);
    LrSchedule schedule;
    schedule.kind = options.schedule_kind();
    schedule.lr = options.lr;
    schedule.steps = steps;
    schedule.warmup = options.given("warmup") ? options.warmup : std::min(options.warmup, steps / 10);
    schedule.final_lr_frac = options.final_lr_frac;
    return schedule;
}
