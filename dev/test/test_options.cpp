// The command line: every option reaches its field, nonsense is refused with the option, the value and the fix.
#include <cmath>
#include <map>
#include <set>

#include "dev/test/host_test.h"
#include "llmc/options.h"

namespace {

Options parse(std::vector<std::string> words, const OptionValues& kept = {}) {
    words.insert(words.begin(), "train_gpt");
    std::vector<const char*> argv;
    for (const std::string& word : words) argv.push_back(word.c_str());
    argv.push_back(nullptr);
    return parse_options(static_cast<int>(words.size()), argv.data(), kept);
}

void refused(const std::vector<std::string>& words, const std::vector<std::string>& expected) {
    expect_error<UsageError>([&] { parse(words); }, expected);
}

ModelConfig model_of(Options options) { return model_config_from_options(options); }

TEST(Options, NoneTrainsTiny) {
    Options o = parse({});
    EXPECT_EQ(o.preset, "tiny");
    EXPECT_EQ(o.train_data, "data/python-stdlib/train_*.bin");
    EXPECT_EQ(o.val_data, "data/python-stdlib/val_*.bin");
    EXPECT_EQ(o.out, "runs/tiny");
    EXPECT_EQ(o.zero_stage, 1);
    EXPECT_EQ(o.seq_len, 128);
    EXPECT_EQ(o.steps, 300);
    EXPECT_EQ(o.epochs, 0.0);
    EXPECT_EQ(o.clip, 1.0);
    EXPECT_EQ(o.bucket_mb, 25.0);
    EXPECT_TRUE(o.overlap());
    EXPECT_FALSE(o.help);
    EXPECT_FALSE(o.given("lr"));
    const ModelConfig config = model_config_from_options(o);
    EXPECT_EQ(config.vocab_size, 257);
    EXPECT_LE(o.seq_len, config.max_seq_len);
}

TEST(Options, EveryPresetHasWorkingDefaults) {
    for (const std::string& name : preset_names()) {
        Options o = parse({"--preset", name});
        EXPECT_EQ(o.out, "runs/" + name);
        EXPECT_LE(o.seq_len, model_config_from_options(o).max_seq_len) << name;
        EXPECT_GT(o.lr, 0.0);
        EXPECT_NE(o.steps > 0, o.epochs > 0.0);
    }
}

TEST(Options, EveryOptionThatWorksReachesItsField) {
    const Options o = parse({"--preset", "124M", "--num-layers", "3", "--channels=64", "--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "16", "--ffn-dim", "96",
                             "--vocab-size", "1000", "--max-seq-len", "256", "--rope-theta", "5e5", "--norm-eps", "1e-6", "--untied", "--qkv-bias", "--qk-norm",
                             "--train-data", "a*.bin", "--val-data", "b*.bin", "--seq-len", "64", "--micro-batch", "3", "--total-batch", "1536", "--seed", "18446744073709551615",
                             "--show-batch", "5", "--steps", "77", "--lr", "1e-3", "--warmup", "7", "--schedule", "wsd", "--final-lr-frac", "0", "--beta1", "0.8", "--beta2", "0.99",
                             "--eps", "1e-6", "--weight-decay", "0", "--clip", "0", "--max-skipped", "4", "--zero-stage", "3", "--bucket-mb", "0.5", "--no-overlap",
                             "--sync-every-micro-step", "--comm-timeout", "30", "--device-memory", "24GiB", "--recompute", "ffn", "--lmhead-chunks", "4", "--grad-dtype", "fp32",
                             "--val-every", "9", "--val-batches", "8", "--sample-every", "11", "--sample-tokens", "12", "--prompt", "two words", "--temperature", "0", "--top-k", "5",
                             "--top-p", "0.5", "--out", "here"});
    const ModelConfig c = model_of(o);
    EXPECT_EQ(c.num_layers, 3);
    EXPECT_EQ(c.channels, 64);
    EXPECT_EQ(c.num_heads, 4);
    EXPECT_EQ(c.num_kv_heads, 2);
    EXPECT_EQ(c.head_dim, 16);
    EXPECT_EQ(c.ffn_dim, 96);
    EXPECT_EQ(c.vocab_size, 1000);
    EXPECT_EQ(c.max_seq_len, 256);
    EXPECT_EQ(c.rope_theta, 5e5);
    EXPECT_FLOAT_EQ(c.norm_eps, 1e-6f);
    EXPECT_FALSE(c.tied);
    EXPECT_TRUE(c.qkv_bias);
    EXPECT_TRUE(c.qk_norm);
    EXPECT_EQ(o.train_data, "a*.bin");
    EXPECT_EQ(o.val_data, "b*.bin");
    EXPECT_EQ(o.seq_len, 64);
    EXPECT_EQ(o.micro_batch, 3);
    EXPECT_EQ(o.total_batch, 1536);
    EXPECT_EQ(o.seed, 18446744073709551615ull);
    EXPECT_EQ(o.show_batch, 5);
    EXPECT_EQ(o.steps, 77);
    EXPECT_EQ(o.lr, 1e-3);
    EXPECT_EQ(o.warmup, 7);
    EXPECT_EQ(o.schedule_kind(), LrSchedule::Kind::Wsd);
    EXPECT_EQ(o.final_lr_frac, 0.0);
    EXPECT_EQ(o.beta1, 0.8);
    EXPECT_EQ(o.beta2, 0.99);
    EXPECT_EQ(o.eps, 1e-6);
    EXPECT_EQ(o.weight_decay, 0.0);
    EXPECT_EQ(o.clip, 0.0);
    EXPECT_EQ(o.max_skipped, 4);
    EXPECT_EQ(o.zero_stage, 3);
    EXPECT_EQ(o.recompute, "ffn");
    EXPECT_EQ(o.lmhead_chunks, 4);
    EXPECT_EQ(o.grad_dtype, "fp32");
    EXPECT_EQ(o.bucket_mb, 0.5);
    EXPECT_FALSE(o.overlap());
    EXPECT_EQ(o.sync_every_micro_step, 1);
    EXPECT_EQ(o.comm_timeout, 30.0);
    EXPECT_EQ(o.device_memory, 24ll << 30);
    EXPECT_EQ(o.val_every, 9);
    EXPECT_EQ(o.val_batches, 8);
    EXPECT_EQ(o.sample_every, 11);
    EXPECT_EQ(o.sample_tokens, 12);
    EXPECT_EQ(o.prompt, "two words");
    EXPECT_EQ(o.temperature, 0.0);
    EXPECT_EQ(o.top_k, 5);
    EXPECT_EQ(o.top_p, 0.5);
    EXPECT_EQ(o.out, "here");
    EXPECT_TRUE(o.given("--lr"));
    EXPECT_FALSE(model_of(parse({"--preset", "qwen2.5-0.5B", "--qkv-bias=false"})).qkv_bias);
    EXPECT_TRUE(model_of(parse({"--tied"})).tied);
    EXPECT_EQ(parse({"--prompt", ""}).prompt, "");
    EXPECT_EQ(parse({"--lr", "1", "--lr", "2"}).lr, 2.0);
}

TEST(Options, WhatIsNotBuiltIsRefusedByName) {
    const std::vector<std::vector<std::string>> given = {
        {"--generate"}, {"--profile"}, {"--check-collectives"}, {"--model", "some/folder"}};
    for (const auto& words : given) refused(words, {words[0], "not available yet"});
    refused({"--model", "x"}, {"--from-config"});
    EXPECT_NO_THROW(parse({"--profile=false"}));
}

std::vector<std::string> joined(std::vector<std::string> first, const std::vector<std::string>& more) {
    first.insert(first.end(), more.begin(), more.end());
    return first;
}

TEST(Plan, Defaults) {
    const Options o = parse({});
    EXPECT_EQ(o.plan, 0);
    EXPECT_EQ(o.plan_json, 0);
    EXPECT_EQ(o.ranks, 0);
    EXPECT_EQ(o.ranks_per_node, 8);
    EXPECT_EQ(o.link, "nvlink=450,pcie=25,ib=50");
    EXPECT_EQ(o.params, 0.0);
    EXPECT_EQ(o.grad_accum, 0);
    EXPECT_EQ(o.step_seconds, 0.0);
    EXPECT_EQ(o.device_tflops, 989.4);
    EXPECT_EQ(o.mfu, 0.4);
    EXPECT_EQ(o.price, 0.0);
    EXPECT_EQ(o.keep, 3);
    EXPECT_EQ(o.memory_reserve, -1);
    EXPECT_EQ(o.ignore_plan, 0);
    EXPECT_EQ(o.allocate_only, 0);
    EXPECT_EQ(parse({"--plan"}).plan, 1);
    EXPECT_EQ(parse({"--plan"}).plan_json, 0);
}

TEST(Plan, EveryOptionReachesItsField) {
    const Options o = parse({"--plan", "--plan-json", "--ranks", "1048576", "--ranks-per-node", "4", "--link", "a=1,b=2:5", "--grad-accum", "16", "--step-seconds", "6.42", "--device-tflops", "312",
                             "--mfu", "1", "--price", "2.5", "--keep", "7", "--memory-reserve", "1.5GB", "--ignore-plan"});
    EXPECT_EQ(o.plan, 1);
    EXPECT_EQ(o.plan_json, 1);
    EXPECT_EQ(o.ranks, 1048576);
    EXPECT_EQ(o.ranks_per_node, 4);
    EXPECT_EQ(o.link, "a=1,b=2:5");
    EXPECT_EQ(o.grad_accum, 16);
    EXPECT_EQ(o.step_seconds, 6.42);
    EXPECT_EQ(o.device_tflops, 312.0);
    EXPECT_EQ(o.mfu, 1.0);
    EXPECT_EQ(o.price, 2.5);
    EXPECT_EQ(o.keep, 7);
    EXPECT_EQ(o.memory_reserve, 1500000000ll);
    EXPECT_EQ(o.ignore_plan, 1);
    EXPECT_EQ(parse({"--allocate-only"}).allocate_only, 1);
    EXPECT_EQ(parse({"--memory-reserve", "0"}).memory_reserve, 0);
    const struct { const char* text; double parameters; } counts[] = {
        {"502.2M", 502200000.0}, {"70B", 7e10}, {"1.3e9", 1.3e9}, {"1", 1.0}, {"12k", 12000.0}, {"12K", 12000.0}, {"1.5 T", 1.5e12}, {"1234567", 1234567.0}, {"+2e3M", 2e9}, {"1e15", 1e15},
        {"2.01M", 2010000.0}};  // 2.01 x 1e6 is 2009999.9999999998
    for (const auto& count : counts) EXPECT_EQ(parse({"--plan", "--params", count.text}).params, count.parameters) << count.text;
    std::map<std::string, std::string> shown;
    for (const OptionRow& row : option_rows(parse({"--plan", "--params", "502.2M"}))) shown[row.name] = row.value;
    EXPECT_EQ(shown["params"], "502200000");
}

TEST(Plan, NonsenseNamesOptionValueAndFix) {
    const auto bad = [](const std::vector<std::string>& words, const std::vector<std::string>& expected) { refused(joined({"--plan"}, words), expected); };
    bad({"--ranks", "0"}, {"--ranks is 0", "between 1 and 1048576"});
    bad({"--ranks", "-4"}, {"--ranks is -4"});
    bad({"--ranks", "1048577"}, {"--ranks is 1048577"});
    bad({"--ranks", "2.5"}, {"--ranks is `2.5`", "whole number"});
    bad({"--ranks", "many"}, {"--ranks is `many`"});
    bad({"--ranks-per-node", "0"}, {"--ranks-per-node is 0"});
    bad({"--grad-accum", "0"}, {"--grad-accum is 0", "between 1"});
    bad({"--grad-accum", "1073741825"}, {"--grad-accum is 1073741825"});
    bad({"--price", "-1"}, {"--price is -1", "between 0"});
    bad({"--price", "nan"}, {"--price is nan"});
    bad({"--mfu", "1.5"}, {"--mfu is 1.5", "at most 1"});
    bad({"--mfu", "0"}, {"--mfu is 0", "above 0"});
    bad({"--mfu", "40%"}, {"--mfu is `40%`"});
    bad({"--device-tflops", "0"}, {"--device-tflops is 0"});
    bad({"--step-seconds", "0"}, {"--step-seconds is 0", "above 0"});
    bad({"--step-seconds", "-6"}, {"--step-seconds is -6"});
    bad({"--step-seconds", "inf"}, {"--step-seconds is inf"});
    bad({"--link", ""}, {"--link is empty"});
    bad({"--keep", "0"}, {"--keep is 0"});
    bad({"--params", "banana"}, {"--params is `banana`", "502.2M"});
    bad({"--params", ""}, {"--params is ``", "502.2M"});
    bad({"--params", "M"}, {"--params is `M`"});
    bad({"--params", "-3"}, {"--params is `-3`", "negative", "502.2M"});
    bad({"--params", "0"}, {"--params is `0`", "too small", "the least is 1"});
    bad({"--params", "1e-400"}, {"--params is `1e-400`", "too small"});
    bad({"--params", "1e400"}, {"--params is `1e400`", "too large", "1e+15"});
    bad({"--params", "-1e400"}, {"--params is `-1e400`", "negative"});
    bad({"--params", "1001T"}, {"--params is `1001T`", "too large"});
    bad({"--params", "inf"}, {"--params is `inf`"});
    bad({"--params", "nan"}, {"--params is `nan`"});
    bad({"--params", "7GB"}, {"--params is `7GB`", "k, M, B or T"});
    bad({"--params", "7m"}, {"--params is `7m`", "k, M, B or T"});  // milli
    bad({"--params", "1.2.3M"}, {"--params is `1.2.3M`"});
    bad({"--plan-json=maybe"}, {"--plan-json", "maybe"});
}

TEST(Plan, SizesThatNobodyMeans) {
    for (const char* option : {"--device-memory", "--memory-reserve"}) {
        const std::string name = option;
        const auto bad = [&](const std::string& text, const std::string& word) { refused({name, text}, {name + " is `" + text + "`", word}); };
        bad("-5", "negative");
        bad("-1GB", "negative");
        bad("80", "a unit is missing, such as in 80GB");
        bad("1.5", "a unit is missing");
        bad("1e400GB", "too large");
        bad("99999999999999999999", "too large");
        bad("2000000TB", "too large: the most is 1e+18");
        bad("80 parsecs", "80GB");
        bad("GB", "80GB");
        bad("80gb", "80GB");
        bad("", "80GB");
        bad("inf", "80GB");
        bad("nan", "80GB");
        bad("0x50GB", "80GB");
    }
    EXPECT_EQ(parse({"--device-memory", "4096"}).device_memory, 4096);
    EXPECT_EQ(parse({"--device-memory", "80 B"}).device_memory, 80);
    EXPECT_EQ(parse({"--device-memory", "8e10"}).device_memory, 80000000000ll);
    EXPECT_EQ(parse({"--device-memory", "2.01MB"}).device_memory, 2010000);
    EXPECT_EQ(parse({"--device-memory", "1000000TB"}).device_memory, 1000000000000000000ll);
}

const std::vector<std::vector<std::string>> kForPlanOnly = {
    {"--plan-json"}, {"--ranks", "4"}, {"--ranks-per-node", "4"}, {"--link", "ib=50"}, {"--params", "4e9"}, {"--grad-accum", "2"}, {"--step-seconds", "1"}, {"--device-tflops", "312"},
    {"--mfu", "0.5"}, {"--price", "2"}};

TEST(Plan, ItsOptionsNeedIt) {
    for (const auto& words : kForPlanOnly) {
        refused(words, {words[0] + " is for --plan; add --plan or leave it out"});
        refused(joined({"--plan=false"}, words), {words[0] + " is for --plan"});
        EXPECT_NO_THROW(parse(joined({"--plan"}, words))) << words[0];
    }
    EXPECT_NO_THROW(parse({"--plan-json=false"}));
}

TEST(Plan, ItsOptionsNeedItInAConfigFileToo) {
    TempFolder folder;
    const std::string path = folder.file("run.toml");
    for (const auto& words : kForPlanOnly) {
        const std::string name = words[0].substr(2), line = name + " = " + (words.size() > 1 ? "\"" + words[1] + "\"" : "true") + "\n";
        write_file(path, line);
        refused({"--config", path}, {path, "`" + name + "` is for --plan", "plan = true"});
        refused({"--config", path, "--plan=false"}, {"`" + name + "` is for --plan"});
        EXPECT_NO_THROW(parse({"--config", path, "--plan"})) << name;
        write_file(path, line + "plan = true\n");
        EXPECT_NO_THROW(parse({"--config", path})) << name;
    }
    write_file(path, "plan = true\nranks = 16\nlink = \"nvlink=450,ib=50:5\"\nparams = 7B\nplan-json = true\nmemory-reserve = 3GB\n");
    const Options o = parse({"--config", path, "--ranks", "32"});
    EXPECT_EQ(o.plan, 1);
    EXPECT_EQ(o.plan_json, 1);
    EXPECT_EQ(o.ranks, 32);
    EXPECT_EQ(o.link, "nvlink=450,ib=50:5");
    EXPECT_EQ(o.params, 7e9);
    EXPECT_EQ(o.memory_reserve, 3000000000ll);
    EXPECT_EQ(parse({"--config", path, "--num-layers", "4"}).params, 0.0);  // the command line wins: a model is planned
    write_file(path, "plan = true\nparams = banana\n");
    refused({"--config", path}, {path, "`params`", "banana"});
    write_file(path, "plan = true\nranks = 0\n");
    refused({"--config", path}, {path, "`ranks`", "0"});
    write_file(path, "plan = true\nparams = 7B\npreset = tiny\n");
    refused({"--config", path}, {"--params", "--preset"});
    EXPECT_EQ(parse({"--config", path, "--params", "1B"}).params, 1e9);
}

TEST(Plan, WhatExcludesWhat) {
    const auto bad = [](const std::vector<std::string>& words, const std::vector<std::string>& expected) { refused(joined({"--plan"}, words), joined({"exclude each other"}, expected)); };
    const std::vector<std::string> overrides[] = {
        {"--preset", "124M"}, {"--from-config", "x.json"}, {"--num-layers", "3"}, {"--channels", "64"}, {"--num-heads", "4"}, {"--num-kv-heads", "2"}, {"--head-dim", "16"}, {"--ffn-dim", "96"},
        {"--vocab-size", "1000"}, {"--max-seq-len", "256"}, {"--rope-theta", "5e5"}, {"--norm-eps", "1e-6"}, {"--tied"}, {"--untied"}, {"--qkv-bias=false"}, {"--qk-norm"}};
    for (const auto& words : overrides) bad(joined({"--params", "7B"}, words), {"--params", words[0].substr(0, words[0].find('=')), "or for a model"});
    bad({"--params", "7B", "--total-batch", "4096"}, {"--params and --total-batch", "--grad-accum"});
    bad({"--grad-accum", "4", "--total-batch", "4096"}, {"--grad-accum and --total-batch"});
    bad({"--show-batch", "0"}, {"--plan and --show-batch", "stops"});
    bad({"--allocate-only"}, {"--plan and --allocate-only", "stops"});
    refused({"--show-batch", "0", "--allocate-only"}, {"--show-batch and --allocate-only", "stops"});
    EXPECT_NO_THROW(parse({"--plan=false", "--show-batch", "0"}));
    EXPECT_NO_THROW(parse({"--plan", "--allocate-only=false"}));
    EXPECT_NO_THROW(parse({"--plan", "--params", "7B", "--grad-accum", "4", "--grad-dtype", "fp32", "--steps", "10"}));
}

TEST(Options, UnknownOptionsSuggestTheNearest) {
    refused({"--zero-stge", "1"}, {"--zero-stge", "did you mean --zero-stage"});
    refused({"--seq_len", "64"}, {"--seq_len", "did you mean --seq-len"});
    refused({"--learning-rat=3"}, {"unknown option --learning-rat;"});
    refused({"--warmups=3"}, {"did you mean --warmup"});
    refused({"-lr", "3"}, {"-lr", "--lr"});
    refused({"--"  "x"}, {"--x"});
    refused({"stray"}, {"`stray` is no option"});
    refused({"--steps", "5", "stray"}, {"`stray`"});
    refused({"--step"}, {"unknown option --step;", "--steps"});  // no abbreviations: a later option could change their meaning
}

TEST(Options, ValuesOutOfRangeNameOptionValueAndRange) {
    refused({"--zero-stage", "4"}, {"--zero-stage is 4", "between 0 and 3"});
    refused({"--zero-stage", "-1"}, {"--zero-stage is -1"});
    refused({"--seq-len", "0"}, {"--seq-len is 0", "between 1"});
    refused({"--micro-batch", "1.5"}, {"--micro-batch is `1.5`", "whole number"});
    refused({"--micro-batch", "8x"}, {"--micro-batch is `8x`"});
    refused({"--micro-batch", "99999999999"}, {"--micro-batch is `99999999999`"});
    refused({"--seed", "-1"}, {"--seed is `-1`"});
    refused({"--seed", "18446744073709551616"}, {"--seed"});
    refused({"--steps", "0"}, {"--steps is 0"});
    refused({"--epochs", "0"}, {"--epochs is 0", "above 0"});
    refused({"--lr", "-1"}, {"--lr is -1"});
    refused({"--lr", "nan"}, {"--lr is nan"});
    refused({"--lr", "inf"}, {"--lr is inf"});
    refused({"--lr", "fast"}, {"--lr is `fast`", "number"});
    refused({"--eps", "0"}, {"--eps is 0"});  // 0 / 0 where a gradient is zero
    refused({"--beta1", "1"}, {"--beta1 is 1"});
    refused({"--beta2", "1"}, {"--beta2 is 1"});
    refused({"--final-lr-frac", "1.1"}, {"--final-lr-frac is 1.1"});
    refused({"--bucket-mb", "-1"}, {"--bucket-mb is -1"});
    refused({"--top-p", "0"}, {"--top-p is 0"});
    refused({"--schedule", "cosin"}, {"--schedule is `cosin`", "cosine|linear|constant|wsd"});
    refused({"--schedule", "cosine|linear"}, {"--schedule"});
    refused({"--recompute", "all"}, {"--recompute is `all`", "none|norm|ffn|block"});
    refused({"--preset", "huge"}, {"--preset", "`huge`", "tiny"});
    refused({"--device-memory", "80 parsecs"}, {"--device-memory is `80 parsecs`", "80GB"});
    refused({"--device-memory", "-5"}, {"--device-memory"});
    refused({"--no-overlap=maybe"}, {"--no-overlap", "maybe"});
    refused({"--train-data", ""}, {"--train-data is empty"});
    refused({"--lr"}, {"--lr"});
    refused({"--lr", "1", "--lr", "bad"}, {"--lr is `bad`"});
    refused({"--lr", "bad", "--lr", "1"}, {"--lr is `bad`"});
}

TEST(Options, MemoryUnits) {
    EXPECT_EQ(parse({"--device-memory", "80GB"}).device_memory, 80000000000ll);
    EXPECT_EQ(parse({"--device-memory", "1.5GiB"}).device_memory, 3ll << 29);
    EXPECT_EQ(parse({"--device-memory", "123456"}).device_memory, 123456);
    EXPECT_EQ(parse({"--device-memory", "512 MiB"}).device_memory, 512ll << 20);
    EXPECT_EQ(parse({}).device_memory, 0);
}

TEST(Options, PairsExcludeEachOther) {
    refused({"--steps", "5", "--epochs", "1"}, {"--steps", "--epochs", "exclude"});
    refused({"--tied", "--untied"}, {"--tied", "--untied"});
    refused({"--preset", "tiny", "--from-config", "x.json"}, {"--preset", "--from-config"});
    refused({"--steps", "5", "--warmup", "6"}, {"--warmup 6", "--steps 5"});
    const Options o = parse({"--epochs", "0.5"});
    EXPECT_EQ(o.steps, 0);
    EXPECT_EQ(o.epochs, 0.5);
}

TEST(Options, TheModelIsCheckedWithItsOverrides) {
    const auto bad = [](const std::vector<std::string>& words, const std::vector<std::string>& expected) {
        expect_error<UsageError>([&] { model_of(parse(words)); }, expected);
    };
    bad({"--num-heads", "6", "--num-kv-heads", "4"}, {"num_heads 6", "num_kv_heads 4"});
    bad({"--head-dim", "33"}, {"head_dim is 33", "odd"});
    bad({"--seq-len", "4096"}, {"--seq-len 4096", "512", "--max-seq-len"});
    EXPECT_NO_THROW(model_of(parse({"--seq-len", "4096", "--max-seq-len", "4096"})));
    Options shorter = parse({"--max-seq-len", "64"});
    EXPECT_EQ(model_config_from_options(shorter).max_seq_len, 64);
    EXPECT_EQ(shorter.seq_len, 64);  // the default of 128 gives way, a value that was given would not
    expect_error([] { model_of(parse({"--from-config", "no/such.json"})); }, {"no/such.json", "No such file"});
}

TEST(Options, AConfigFileTakesTheSameNamesAndTheCommandLineWins) {
    TempFolder folder;
    const std::string path = folder.file("run.toml");
    write_file(path, "# a comment\nlr = 0.5\nsteps = 9\nprompt = \"two words\"\ntrain-data = \"x/*.bin\"\nno-overlap = true\nseed=7\n");
    const Options o = parse({"--config", path, "--steps", "11"});
    EXPECT_EQ(o.lr, 0.5);
    EXPECT_EQ(o.steps, 11);
    EXPECT_EQ(o.prompt, "two words");
    EXPECT_EQ(o.train_data, "x/*.bin");
    EXPECT_EQ(o.seed, 7u);
    EXPECT_FALSE(o.overlap());
    std::map<std::string, std::string> sources;
    for (const OptionRow& row : option_rows(o)) sources[row.name] = row.source;
    EXPECT_EQ(sources["lr"], "config file");
    EXPECT_EQ(sources["steps"], "command line");
    EXPECT_EQ(sources["clip"], "default");

    const auto bad = [&](const std::string& text, const std::vector<std::string>& expected) {
        write_file(path, text);
        refused({"--config", path, "--steps", "11"}, expected);
    };
    bad("lrr = 1\n", {path, "lrr", "did you mean --lr"});
    bad("lr = -1\n", {path, "`lr`", "-1"});
    bad("lr = 1\nlr = 2\n", {path, "`lr`", "give it once"});
    bad("lr = 1\nseed = 3\nlr = 2\n", {path, "`lr` is given twice"});
    bad("steps = bad\n", {path, "`steps`", "bad"});  // nonsense is said even where the command line wins
    bad("[optimizer]\nlr = 1\n", {path, "`lr`", "section"});
    bad("prompt = two words\n", {path, "prompt"});
    bad("lr = [1, 2]\n", {path, "`lr`", "2 values"});
    bad("config = other\n", {path, "config"});
    bad("generate = true\n", {path, "generate", "not available yet"});
    bad("save-every = 3\nno-save = true\n", {"--no-save and --save-every", "exclude"});
    bad("help = true\n", {path, "help"});
    write_file(path, "epochs = 1\nsteps = 2\n");
    refused({"--config", path}, {"--steps", "--epochs", "exclude"});
    write_file(path, "epochs = 1\ntied = true\n");
    const Options mixed = parse({"--config", path, "--steps", "11", "--untied"});
    EXPECT_EQ(mixed.steps, 11);
    EXPECT_EQ(mixed.epochs, 0.0);
    EXPECT_FALSE(model_of(mixed).tied);
    refused({"--config", folder.file("none.toml")}, {"none.toml", "No such file"});
    refused({"--config", folder.path()}, {folder.path(), "regular file"});
}

TEST(Options, HelpListsEveryOptionAndChecksNothingElse) {
    EXPECT_TRUE(parse({"--help"}).help);
    EXPECT_TRUE(parse({"-h", "--zero-stage", "9"}).help);
    const std::string help = options_help();
    for (const char* name : {"--preset", "--model", "--from-config", "--num-layers", "--train-data", "--val-data", "--seq-len", "--micro-batch", "--total-batch", "--seed", "--show-batch",
                             "--steps", "--epochs", "--lr", "--warmup", "--schedule", "--final-lr-frac", "--beta1", "--beta2", "--eps", "--weight-decay", "--clip", "--max-skipped",
                             "--zero-stage", "--bucket-mb", "--no-overlap", "--sync-every-micro-step", "--comm-timeout", "--check-collectives", "--device-memory", "--recompute",
                             "--memory-reserve", "--ignore-plan", "--allocate-only", "--lmhead-chunks", "--grad-dtype", "--val-every", "--val-batches", "--sample-every", "--sample-tokens", "--prompt", "--temperature", "--top-k", "--top-p",
                             "--out", "--save-every", "--save-minutes", "--save-mode", "--keep", "--no-save", "--resume", "--allow-change", "--plan", "--ranks", "--plan-json", "--ranks-per-node", "--link", "--params",
                             "--grad-accum", "--step-seconds", "--device-tflops", "--mfu", "--price", "--generate", "--profile", "--config"})
        EXPECT_NE(help.find(std::string("  ") + name), std::string::npos) << name;
    for (const std::string& name : preset_names()) EXPECT_NE(help.find(name), std::string::npos) << name;
    for (const char* shown : {"[nvlink=450,pcie=25,ib=50]", "[989.4]", "[0.4]"}) EXPECT_NE(help.find(shown), std::string::npos) << shown;
    EXPECT_EQ(help.find("[-1]"), std::string::npos);
}

TEST(Options, TheStartUpPrintShowsWhatIsSet) {
    std::set<std::string> names;
    for (const OptionRow& row : option_rows(parse({}))) {
        EXPECT_FALSE(row.value.empty()) << row.name;
        EXPECT_TRUE(names.insert(row.name).second);
    }
    EXPECT_TRUE(names.count("lr") && names.count("steps") && names.count("zero-stage") && names.count("preset") && names.count("keep") && names.count("save-minutes"));
    EXPECT_FALSE(names.count("epochs") || names.count("num-layers") || names.count("resume") || names.count("allow-change") || names.count("plan") || names.count("link") || names.count("memory-reserve"));
    std::set<std::string> planned;
    for (const OptionRow& row : option_rows(parse({"--plan"}))) planned.insert(row.name);
    EXPECT_TRUE(planned.count("plan") && planned.count("link") && planned.count("mfu") && planned.count("keep"));
    EXPECT_FALSE(planned.count("ranks") || planned.count("params") || planned.count("price") || planned.count("memory-reserve"));
    for (const OptionRow& row : option_rows(parse({"--num-layers", "3", "--epochs", "2", "--tied"}))) names.insert(row.name);
    EXPECT_TRUE(names.count("epochs") && names.count("num-layers") && names.count("tied"));
}

TEST(Options, ChunksOfTheHeadDivideTheRowsOfAMicroBatch) {
    const std::vector<std::string> rows_48 = {"--micro-batch", "4", "--seq-len", "12", "--lmhead-chunks"};
    for (const char* chunks : {"1", "2", "3", "16", "48"}) {
        std::vector<std::string> words = rows_48;
        words.push_back(chunks);
        Options o = parse(words);
        EXPECT_NO_THROW(model_config_from_options(o)) << chunks;
    }
    const struct { const char *chunks, *advice; } refusals[] = {{"5", "try 4 or 6"}, {"13", "try 12 or 16"}, {"49", "try 48"}};
    for (const auto& refusal : refusals) {
        std::vector<std::string> words = rows_48;
        words.push_back(refusal.chunks);
        Options o = parse(words);
        expect_error<UsageError>([&] { model_config_from_options(o); }, {std::string("--lmhead-chunks ") + refusal.chunks, "micro-batch 4 x seq-len 12 = 48 rows", refusal.advice});
    }
}

TEST(Options, TheNearestChunksOfManyRowsAreFoundAtOnce) {
    // 1021 and 1048573 are prime: nothing but them divides the rows, and counting up from --lmhead-chunks takes 10^9 divisions.
    Options o = parse({"--micro-batch", "1048573", "--seq-len", "1021", "--max-seq-len", "1021", "--lmhead-chunks", "1048575"});
    expect_error<UsageError>([&] { model_config_from_options(o); }, {"1070593033 rows", "try 1048573 or 1070593033"});
}

TEST(Options, RowsOfAMicroBatchFitAnInt) {
    const auto rows = [](const char* micro_batch, const char* seq_len) {
        Options o = parse({"--micro-batch", micro_batch, "--seq-len", seq_len, "--max-seq-len", seq_len});
        model_config_from_options(o);
    };
    EXPECT_NO_THROW(rows("256", "4194304"));
    EXPECT_NO_THROW(rows("1048576", "1024"));
    expect_error<UsageError>([&] { rows("512", "4194304"); }, {"--micro-batch 512", "--seq-len 4194304", "2147483648 rows", "1073741824", "at most --micro-batch 256"});
    expect_error<UsageError>([&] { rows("1048576", "4194304"); }, {"4398046511104 rows", "at most --micro-batch 256"});
}

TEST(BatchPlan, TakesMicroSteps) {
    const BatchPlan plan = plan_batch(0, 4, 1024, 3, 5);
    EXPECT_EQ(plan.grad_accum, 5);
    EXPECT_EQ(plan.tokens_per_step, 4 * 1024 * 3 * 5);
    EXPECT_EQ(plan.windows_per_step, 4 * 3 * 5);
    expect_error([] { plan_batch(12288, 4, 1024, 3, 5); }, {"12288", "5 micro-steps"});
}

TEST(BatchPlan, RefusesMoreTokensThanAStepMayHave) {
    EXPECT_EQ(plan_batch(0, 1000, 1000, 1000, 1000).tokens_per_step, 1000000000000ll);
    expect_error<UsageError>([] { plan_batch(0, 1000, 1000, 1000, 1001); }, {"micro-batch 1000 x seq-len 1000 x 1000 ranks x 1001 micro-steps", "10^12", "--grad-accum"});
    // The largest values of the options: 2^62 tokens of a micro-step still fit 64 bits, 2^92 of a step do not.
    expect_error<UsageError>([] { plan_batch(0, 1 << 20, 1 << 22, 1 << 20); }, {"10^12", "--micro-batch"});
    expect_error<UsageError>([] { plan_batch(0, 1 << 20, 1 << 22, 1 << 20, 1 << 30); }, {"10^12"});
    expect_error<UsageError>([] { plan_batch(0, 1, 1, 1 << 20, 1 << 30); }, {"10^12"});
    expect_error<UsageError>([] { plan_batch(0, 1, 1 << 16, 1 << 18, 1 << 30); }, {"10^12"});  // 2^64 is 0 in 64 bits
    expect_error<UsageError>([] { plan_batch(1000000000000ll, 1 << 20, 1 << 22, 1 << 20); }, {"10^12"});
}

TEST(BatchPlan, DividesOrNamesTheNearestTotals) {
    const BatchPlan one = plan_batch(0, 4, 1024, 3);
    EXPECT_EQ(one.grad_accum, 1);
    EXPECT_EQ(one.tokens_per_step, 12288);
    EXPECT_EQ(one.windows_per_step, 12);
    EXPECT_EQ(plan_batch(12288 * 5, 4, 1024, 3).grad_accum, 5);
    expect_error<UsageError>([] { plan_batch(524288, 4, 1024, 3); }, {"total batch 524288", "micro-batch 4 x seq-len 1024 x 3 ranks = 12288", "try 516096 or 528384"});
    expect_error<UsageError>([] { plan_batch(100, 4, 1024, 3); }, {"try 12288"});
    // The tokens a step are B x T x accumulation x ranks, for the tokens/s of the step line.
    EXPECT_EQ(plan_batch(4 * 1024 * 3 * 7, 4, 1024, 3).tokens_per_step, 4 * 1024 * 7 * 3);
}

TEST(Schedule, StepsFollowFromEpochsAndWarmUpFitsTheRun) {
    EXPECT_EQ(total_steps(parse({"--steps", "9"}), 100, 8), 9);
    EXPECT_EQ(total_steps(parse({"--epochs", "2"}), 100, 8), 25);
    EXPECT_EQ(total_steps(parse({"--epochs", "0.5"}), 100, 8), 6);
    expect_error<UsageError>([] { total_steps(parse({"--epochs", "0.01"}), 100, 8); }, {"--epochs 0.01", "--epochs 0.08"});
    EXPECT_EQ(make_lr_schedule(parse({}), 300).warmup, 20);
    EXPECT_EQ(make_lr_schedule(parse({}), 50).warmup, 5);
    EXPECT_EQ(make_lr_schedule(parse({}), 1).warmup, 0);
    EXPECT_EQ(make_lr_schedule(parse({"--warmup", "50"}), 50).warmup, 50);
    EXPECT_EQ(make_lr_schedule(parse({"--warmup", "0"}), 50).warmup, 0);
    expect_error<UsageError>([] { make_lr_schedule(parse({"--epochs", "1", "--warmup", "51"}), 50); }, {"--warmup 51", "50 steps"});
}

// ---- checkpoints ----

TEST(Checkpoints, OptionsReachTheirFields) {
    const Options none = parse({});
    EXPECT_EQ(none.save_every, 0);
    EXPECT_EQ(none.save_minutes, 30.0);
    EXPECT_FALSE(none.save_async());
    EXPECT_EQ(none.keep, 3);
    EXPECT_EQ(none.no_save, 0);
    EXPECT_EQ(none.resume, "");
    const Options o = parse({"--save-every", "100", "--save-minutes", "2.5", "--save-mode", "async", "--keep", "7", "--resume", "auto", "--allow-change", "lr,steps"});
    EXPECT_EQ(o.save_every, 100);
    EXPECT_EQ(o.save_minutes, 2.5);
    EXPECT_TRUE(o.save_async());
    EXPECT_EQ(o.keep, 7);
    EXPECT_EQ(o.resume, "auto");
    EXPECT_EQ(o.allow_change, "lr,steps");
    EXPECT_EQ(parse({"--no-save"}).no_save, 1);
    refused({"--save-every", "-1"}, {"--save-every is -1", "between 0"});
    refused({"--save-minutes", "-1"}, {"--save-minutes is -1", "between 0"});
    refused({"--save-minutes", "nan"}, {"--save-minutes is nan"});
    refused({"--save-mode", "fast"}, {"--save-mode is `fast`", "stream|async"});
    refused({"--keep", "0"}, {"--keep is 0", "between 1"});
    refused({"--resume", ""}, {"--resume is empty"});
    refused({"--resume", "auto", "--allow-change", ""}, {"--allow-change is empty"});
}

TEST(Checkpoints, WhatExcludesWhat) {
    for (const auto& words : std::vector<std::vector<std::string>>{{"--save-every", "5"}, {"--save-minutes", "5"}, {"--save-mode", "async"}, {"--keep", "5"}}) {
        refused(joined({"--no-save"}, words), {"--no-save and " + words[0], "exclude", "writes no checkpoint"});
        EXPECT_NO_THROW(parse(joined({"--no-save=false"}, words)));
        // A checkpoint's options are no one's wish to save now.
        const Options o = parse({"--no-save", "--resume", "auto"}, {{words[0].substr(2), words[1]}});
        EXPECT_EQ(o.no_save, 1);
        EXPECT_EQ(o.save_every, 0);
    }
    for (const auto& words : std::vector<std::vector<std::string>>{{"--plan"}, {"--show-batch", "0"}, {"--allocate-only"}})
        refused(joined({"--resume", "auto"}, words), {words[0] + " and --resume", "exclude", "goes on with a run"});
    refused({"--allow-change", "lr"}, {"--allow-change is for --resume"});
    TempFolder folder;
    const std::string path = folder.file("run.toml");
    write_file(path, "allow-change = \"lr\"\nsave-every = 3\n");
    refused({"--config", path}, {"--allow-change is for --resume"});
    const Options o = parse({"--config", path, "--resume", "auto", "--no-save"});  // the command line wins
    EXPECT_EQ(o.allow_change, "lr");
    EXPECT_EQ(o.no_save, 1);
    EXPECT_EQ(o.save_every, 0);
}

TEST(Checkpoints, TheRunFolderOfANamedOneIsWhereItLies) {
    const struct { const char *resume, *out; } places[] = {{"step_1", "."},  {"/step_1", "/"}, {"a/b/step_1", "a/b"}, {"a/b/step_1/", "a/b"}, {"a/b/step_1///", "a/b"}, {"./step_1", "."},
                                                            {"../step_1", ".."}, {"step_1/", "."}, {"/", "/"},          {"auto", "runs/tiny"}};
    for (const auto& place : places) {
        EXPECT_EQ(parse({"--resume", place.resume}).out, place.out) << place.resume;
        EXPECT_EQ(parse({"--resume", place.resume, "--out", "elsewhere"}).out, "elsewhere");
    }
    EXPECT_EQ(parse({"--resume", "a/b/step_1//"}).resume, "a/b/step_1");
    EXPECT_EQ(parse({"--resume", "auto", "--preset", "124M"}).out, "runs/124M");
}

// A run of these words on so many ranks with 1000 windows of data, as the trainer makes it; `before`: the checkpoint it goes on from.
RunMeaning run_of(const std::vector<std::string>& words, int ranks = 1, const RunMeaning* before = nullptr) {
    Options o = parse(words, before ? before->options : OptionValues{});
    const ModelConfig model = model_config_from_options(o, before ? &before->model : nullptr);
    const BatchPlan batch = plan_batch(o.total_batch, o.micro_batch, o.seq_len, ranks);
    const LrSchedule schedule = make_lr_schedule(o, total_steps(o, 1000, batch.windows_per_step));
    return {kept_options(o, batch, schedule), "0123456789abcdef", "bf16", model};
}

// Every option that a checkpoint keeps, none at its default.
const std::vector<std::string> kEveryKeptOption = {
    "--num-layers", "3", "--channels", "64", "--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "16", "--ffn-dim", "96", "--vocab-size", "1000", "--max-seq-len", "256",
    "--rope-theta", "12345.678901234567", "--norm-eps", "1.1e-06", "--untied", "--qkv-bias", "--qk-norm=false", "--train-data", "a b/*.bin", "--val-data", "b*.bin", "--seq-len", "64", "--micro-batch", "3",
    "--total-batch", "1536", "--seed", "18446744073709551615", "--steps", "77", "--lr", "1.2345678901234567e-4", "--warmup", "7", "--schedule", "wsd", "--final-lr-frac", "5e-324", "--beta1", "0.8",
    "--beta2", "0.9899999999999999", "--eps", "1e-30", "--weight-decay", "0.30000000000000004", "--clip", "0", "--max-skipped", "4", "--zero-stage", "3", "--bucket-mb", "0.1", "--no-overlap",
    "--sync-every-micro-step", "--comm-timeout", "30.000000000000004", "--recompute", "ffn", "--lmhead-chunks", "4", "--grad-dtype", "fp32", "--val-every", "9", "--val-batches", "8",
    "--sample-every", "11", "--sample-tokens", "12", "--prompt", "--lr 3\n= \"x\"", "--temperature", "0", "--top-k", "5", "--top-p", "0.1", "--save-every", "13", "--save-minutes", "0", "--save-mode", "async",
    "--keep", "2"};

// Options that change what is computed, each with another value than above.
const std::map<std::string, std::string> kMeaning = {
    {"seq-len", "32"}, {"total-batch", "3072"}, {"seed", "18446744073709551614"}, {"steps", "78"}, {"lr", "0.00012345678901234565"}, {"warmup", "8"}, {"schedule", "cosine"}, {"final-lr-frac", "1e-323"},
    {"beta1", "0.80000000000000016"}, {"beta2", "0.98999999999999977"}, {"eps", "1e-29"}, {"weight-decay", "0.29999999999999999"}, {"clip", "1"}, {"grad-dtype", "bf16"}};

TEST(Checkpoints, KeptOptionsAreTheSameOptionsAgain) {
    const Options first = parse(joined({"--out", "here", "--device-memory", "1GB"}, kEveryKeptOption));
    const RunMeaning run = run_of(kEveryKeptOption, 2);
    const Options again = parse({"--resume", "auto", "--out", "there"}, run.options);
    std::map<std::string, std::string> before, now, sources;
    for (const OptionRow& row : option_rows(first)) before[row.name] = row.value;
    for (const OptionRow& row : option_rows(again)) now[row.name] = row.value, sources[row.name] = row.source;
    for (size_t i = 0; i < kEveryKeptOption.size(); ++i) {
        if (kEveryKeptOption[i].rfind("--", 0) != 0 || kEveryKeptOption[i].find(' ') != std::string::npos) continue;
        const std::string name = kEveryKeptOption[i].substr(2, kEveryKeptOption[i].find('=') - 2);
        EXPECT_EQ(run.options.count(name), 1u) << name;
        EXPECT_EQ(now.at(name), before.at(name)) << name;
        EXPECT_EQ(sources.at(name), "checkpoint") << name;
    }
    EXPECT_EQ(now.at("out"), "there");
    EXPECT_EQ(now.at("device-memory"), "0");
    for (const char* name : {"out", "resume", "device-memory", "epochs", "preset", "tied"}) EXPECT_FALSE(run.options.count(name)) << name;
    // To the last bit.
    EXPECT_EQ(again.lr, 1.2345678901234567e-4);
    EXPECT_EQ(again.final_lr_frac, 5e-324);
    EXPECT_EQ(again.weight_decay, 0.1 + 0.2);
    EXPECT_EQ(again.rope_theta, 12345.678901234567);
    EXPECT_EQ(again.comm_timeout, std::nextafter(30.0, 31.0));
    EXPECT_EQ(again.seed, 18446744073709551615ull);
    EXPECT_EQ(again.prompt, "--lr 3\n= \"x\"");
    EXPECT_EQ(again.untied, 1);
    EXPECT_EQ(again.tied, -1);
    EXPECT_EQ(again.qk_norm, 0);
    // What the checkpoint of the resumed run keeps is that again.
    EXPECT_EQ(run_of({"--resume", "auto"}, 2, &run).options, run.options);
}

TEST(Checkpoints, ADoubleIsKeptToTheLastBit) {
    for (const double value : {1e-300, 5e-324, 2.2250738585072014e-308, 0.1, 1.0 / 3.0, 999.9995, 999.99999999999989, 1e-4 / 3, 1000.0}) {
        const RunMeaning run = run_of({"--lr", format("%.17g", value)});
        EXPECT_EQ(parse({"--resume", "auto"}, run.options).lr, value);
    }
}

TEST(Checkpoints, TheSameCommandGoesOnAsItBegan) {
    const std::vector<std::vector<std::string>> commands = {{}, {"--steps", "50"}, {"--steps", "5"}, {"--epochs", "2"}, {"--preset", "124M"}, {"--preset", "124M", "--epochs", "90.5", "--warmup", "0"},
                                                            {"--max-seq-len", "64"}, {"--tied"}, {"--untied", "--qkv-bias=false"}, {"--total-batch", "24576"}, {"--prompt", ""}, kEveryKeptOption};
    for (const auto& words : commands) {
        SCOPED_TRACE(testing::PrintToString(words));
        const RunMeaning first = run_of(words, 2);
        // Without a word, and with all of them again.
        for (const auto& given : {std::vector<std::string>{}, words}) {
            const RunMeaning again = run_of(joined({"--resume", "auto"}, given), 2, &first);
            EXPECT_EQ(again.options, first.options);
            EXPECT_TRUE(same_model(again.model, first.model));
            EXPECT_TRUE(check_changes(first, again, "").empty());
        }
        // One rank does the work of two, in twice the micro-steps.
        const RunMeaning alone = run_of({"--resume", "auto"}, 1, &first);
        EXPECT_EQ(alone.options, first.options);
    }
    EXPECT_EQ(run_of({"--epochs", "2"}).options.at("steps"), "250");
    EXPECT_EQ(run_of({"--steps", "50"}).options.at("warmup"), "5");
    EXPECT_EQ(run_of({}, 3).options.at("total-batch"), "3072");
    EXPECT_EQ(run_of({"--prompt", ""}).options.at("prompt"), "");
    EXPECT_EQ(run_of({"--max-seq-len", "64"}).options.at("seq-len"), "64");
}

TEST(Checkpoints, WhatIsGivenWinsOverWhatIsKept) {
    const OptionValues kept = {{"lr", "0.5"}, {"clip", "3"}, {"eps", "1e-5"}, {"steps", "40"}, {"warmup", "4"}, {"prompt", "kept"}, {"no-overlap", "true"}};
    TempFolder folder;
    const std::string path = folder.file("run.toml");
    write_file(path, "clip = 2\neps = 1e-6\n");
    const Options o = parse({"--config", path, "--resume", "auto", "--eps", "1e-7", "--no-overlap=false"}, kept);
    EXPECT_EQ(o.lr, 0.5);
    EXPECT_EQ(o.clip, 2.0);
    EXPECT_EQ(o.eps, 1e-7);
    EXPECT_EQ(o.prompt, "kept");
    EXPECT_TRUE(o.overlap());
    EXPECT_EQ(o.beta1, 0.9);
    std::map<std::string, std::string> sources;
    for (const OptionRow& row : option_rows(o)) sources[row.name] = row.source;
    EXPECT_EQ(sources["lr"], "checkpoint");
    EXPECT_EQ(sources["clip"], "config file");
    EXPECT_EQ(sources["eps"], "command line");
    EXPECT_EQ(sources["beta1"], "default");
    // The number of steps and that of epochs are one wish.
    EXPECT_EQ(parse({"--resume", "auto"}, kept).steps, 40);
    EXPECT_EQ(parse({"--resume", "auto"}, kept).epochs, 0.0);
    EXPECT_EQ(parse({"--resume", "auto", "--steps", "60"}, kept).steps, 60);
    const Options epochs = parse({"--resume", "auto", "--epochs", "2"}, kept);
    EXPECT_EQ(epochs.steps, 0);
    EXPECT_EQ(epochs.epochs, 2.0);
    write_file(path, "epochs = 3\n");
    EXPECT_EQ(parse({"--config", path, "--resume", "auto"}, kept).epochs, 3.0);
    EXPECT_EQ(parse({"--config", path, "--resume", "auto"}, kept).steps, 0);
    expect_error<UsageError>([&] { parse({"--resume", "auto", "--steps", "3"}, kept); }, {"--warmup 4", "--steps 3"});
}

TEST(Checkpoints, WhatNoCheckpointKeepsIsRefused) {
    for (const char* name : {"no-such", "", "--lr", "LR", "out", "resume", "allow-change", "no-save", "plan", "ranks", "device-memory", "ignore-plan", "show-batch", "generate", "config", "check-collectives"})
        expect_error<UsageError>([&] { parse({"--resume", "auto"}, {{name, "1"}}); }, {std::string("the checkpoint keeps an option `") + name + "`"});
    expect_error<UsageError>([&] { parse({"--resume", "auto"}, {{"lr", "fast"}}); }, {"the checkpoint's --lr is `fast`"});
    expect_error<UsageError>([&] { parse({"--resume", "auto"}, {{"grad-dtype", "fp8"}}); }, {"the checkpoint's --grad-dtype is `fp8`"});
    expect_error<UsageError>([&] { parse({"--resume", "auto"}, {{"zero-stage", "4"}}); }, {"the checkpoint's --zero-stage is 4"});
}

TEST(Checkpoints, TheModelIsTheCheckpointsUnlessAnotherIsGiven) {
    ModelConfig resumed = small_config();
    resumed.rope_scaling.type = RopeScaling::Type::Llama3;  // which no option says
    const OptionValues kept = {{"from-config", "gone.json"}, {"num-layers", "3"}, {"seq-len", "48"}};
    Options o = parse({"--resume", "auto"}, kept);
    EXPECT_TRUE(same_model(model_config_from_options(o, &resumed), resumed));
    EXPECT_EQ(o.seq_len, 48);
    Options other = parse({"--resume", "auto", "--preset", "tiny"}, kept);
    const ModelConfig tiny = model_config_from_options(other, &resumed);
    EXPECT_TRUE(same_model(tiny, preset_config("tiny")));  // another base: none of the kept overrides
    EXPECT_EQ(other.from_config, "");
    Options deeper = parse({"--resume", "auto", "--num-layers", "7"}, kept);
    ModelConfig expected = resumed;
    expected.num_layers = 7;
    EXPECT_TRUE(same_model(model_config_from_options(deeper, &resumed), expected));  // one override changes one thing
    Options untied = parse({"--resume", "auto", "--untied"}, {{"tied", "true"}, {"num-layers", "3"}});  // of a pair the one that is given now
    ModelConfig own_head = resumed;
    own_head.tied = true;
    EXPECT_FALSE(model_config_from_options(untied, &own_head).tied);
    EXPECT_EQ(untied.tied, -1);
    Options longer = parse({"--resume", "auto", "--seq-len", "65"}, kept);
    expect_error<UsageError>([&] { model_config_from_options(longer, &resumed); }, {"--seq-len 65", "64"});
}

TEST(AllowChange, EveryOptionIsFreeOrChangedByLeaveOnly) {
    const RunMeaning before = run_of(kEveryKeptOption, 2);
    EXPECT_TRUE(check_changes(before, before, "").empty());
    size_t meaning = 0;
    for (const auto& [name, was] : before.options) {
        RunMeaning now = before;
        const auto found = kMeaning.find(name);
        if (found == kMeaning.end()) {  // a model's are compared as a model
            now.options[name] = "other";
            EXPECT_TRUE(check_changes(before, now, "").empty()) << name;
            EXPECT_TRUE(check_changes(now, before, "").empty()) << name;
            now.options.erase(name);
            EXPECT_TRUE(check_changes(before, now, "").empty()) << name;
            continue;
        }
        ++meaning;
        now.options[name] = found->second;
        const std::string text = name + " was " + was + ", now " + found->second;
        const std::string another = name == "clip" ? "lr" : "clip";
        for (const std::string& allowed : {std::string(), another})
            expect_error<UsageError>([&] { check_changes(before, now, allowed); }, {"another run than the checkpoint's", "\n  " + text + "\n", "--allow-change " + name});
        for (const std::string& allowed : {name, another + "," + name, name + "," + another}) {
            const std::vector<std::string> changed = check_changes(before, now, allowed);
            ASSERT_EQ(changed.size(), name == "total-batch" ? 2u : 1u) << name;
            EXPECT_EQ(changed[0], text);
        }
        now.options.erase(name);
        expect_error<UsageError>([&] { check_changes(before, now, ""); }, {name + " was " + was + ", now not set"});
        expect_error<UsageError>([&] { check_changes(now, before, ""); }, {name + " was not set, now " + was});
    }
    EXPECT_EQ(meaning, kMeaning.size());
}

TEST(AllowChange, EveryDifferenceIsNamedAtOnce) {
    const RunMeaning before = run_of(kEveryKeptOption, 2);
    RunMeaning now = before;
    now.options["lr"] = "0.5";
    now.options["clip"] = "2";
    now.options["keep"] = "9";
    now.data = "fedcba9876543210";
    now.precision = "fp32";
    now.model.rope_theta = 20000;
    expect_error<UsageError>([&] { check_changes(before, now, ""); },
                             {"lr was 0.00012345678901234567, now 0.5", "clip was 0, now 2", "train-data was 0123456789abcdef, now fedcba9876543210", "precision was bf16, now fp32", "rope-theta was",
                              "--allow-change rope-theta,lr,clip,train-data,precision"});
    expect_error<UsageError>([&] { check_changes(before, now, "clip,precision,rope-theta"); }, {"--allow-change lr,train-data"});
    const std::vector<std::string> changed = check_changes(before, now, "precision,train-data,lr,clip,rope-theta,seed");
    EXPECT_EQ(changed.size(), 5u);
}

TEST(AllowChange, NamesThatAreNone) {
    const RunMeaning run = run_of({});
    const auto bad = [&](const std::string& names, const std::vector<std::string>& words) { expect_error<UsageError>([&] { check_changes(run, run, names); }, words); };
    for (const char* names : {"no-such", "lr,no-such", "no-such,lr", ",", "lr,", ",lr", "lr,,clip", " lr", "lr clip", "lr;clip", "--lr", "LR"}) bad(names, {"--allow-change", "there is no such option"});
    bad("lrs", {"--allow-change lrs: there is no such option"});
    for (const char* name : {"zero-stage", "micro-batch", "bucket-mb", "recompute", "keep", "prompt", "val-data", "max-skipped", "out", "resume", "plan", "preset", "from-config", "untied", "config"})
        bad(name, {std::string("--allow-change ") + name, "without leave, or is not kept"});
    for (const char* name : {"num-layers", "channels", "num-heads", "num-kv-heads", "head-dim", "ffn-dim", "vocab-size", "tied", "qkv-bias", "qk-norm"})
        bad(name, {std::string("--allow-change ") + name, "another shape", "new run"});
    EXPECT_TRUE(check_changes(run, run, "precision,train-data,epochs,steps,lr,lr,max-seq-len,rope-theta,norm-eps").empty());
    RunMeaning longer = run;
    longer.options["steps"] = "400";
    EXPECT_EQ(check_changes(run, longer, "epochs"), std::vector<std::string>{"steps was 300, now 400"});  // what epochs become
}

TEST(AllowChange, AModelOfAnotherShapeIsAnother) {
    const RunMeaning before = run_of({});
    const auto change = [&](void (*make)(ModelConfig&)) {
        RunMeaning now = before;
        make(now.model);
        return now;
    };
    const struct { const char* name; void (*make)(ModelConfig&); } shapes[] = {
        {"num-layers", [](ModelConfig& c) { ++c.num_layers; }}, {"channels", [](ModelConfig& c) { c.channels += 8; }},      {"num-heads", [](ModelConfig& c) { c.num_heads *= 2; }},
        {"num-kv-heads", [](ModelConfig& c) { c.num_kv_heads = 1; }}, {"head-dim", [](ModelConfig& c) { c.head_dim *= 2; }}, {"ffn-dim", [](ModelConfig& c) { c.ffn_dim += 8; }},
        {"vocab-size", [](ModelConfig& c) { --c.vocab_size; }}, {"tied", [](ModelConfig& c) { c.tied = !c.tied; }},       {"qkv-bias", [](ModelConfig& c) { c.qkv_bias = !c.qkv_bias; }},
        {"qk-norm", [](ModelConfig& c) { c.qk_norm = !c.qk_norm; }}};
    for (const auto& shape : shapes) {
        const RunMeaning now = change(shape.make);
        for (const char* allowed : {"", "lr,max-seq-len"}) expect_error<UsageError>([&] { check_changes(before, now, allowed); }, {std::string("\n  ") + shape.name + " was ", "a model of another shape"});
    }
    const struct { const char* name; void (*make)(ModelConfig&); } uses[] = {
        {"max-seq-len", [](ModelConfig& c) { ++c.max_seq_len; }},
        {"rope-theta", [](ModelConfig& c) { c.rope_theta = std::nextafter(c.rope_theta, 1e9); }},
        {"norm-eps", [](ModelConfig& c) { c.norm_eps = std::nextafterf(c.norm_eps, 1.0f); }},
        {"rope-theta", [](ModelConfig& c) { c.rope_scaling.type = RopeScaling::Type::Llama3; }}};
    for (const auto& use : uses) {
        const RunMeaning now = change(use.make);
        expect_error<UsageError>([&] { check_changes(before, now, "lr"); }, {std::string("\n  ") + use.name + " was ", std::string("--allow-change ") + use.name});
        EXPECT_EQ(check_changes(before, now, use.name).size(), 1u);
    }
    RunMeaning scaled = before;
    scaled.model.rope_scaling.type = RopeScaling::Type::Llama3;
    for (void (*make)(RopeScaling&) : {+[](RopeScaling& r) { r.factor = std::nextafter(r.factor, 9.0); }, +[](RopeScaling& r) { r.low_freq_factor += 0.5; }, +[](RopeScaling& r) { r.high_freq_factor += 0.5; },
                                       +[](RopeScaling& r) { ++r.original_max_seq_len; }}) {
        RunMeaning now = scaled;
        make(now.model.rope_scaling);
        expect_error<UsageError>([&] { check_changes(scaled, now, ""); }, {"rope-theta was "});
        now = before;
        make(now.model.rope_scaling);  // of a scaling that is off nothing counts
        EXPECT_TRUE(check_changes(before, now, "").empty());
    }
    RunMeaning renamed = before;
    renamed.model.name = "other";
    EXPECT_TRUE(check_changes(before, renamed, "").empty());
}

TEST(AllowChange, AnotherBatchSuggestsAnotherLearningRate) {
    const RunMeaning before = run_of({"--total-batch", "1024", "--lr", "1e-3"});
    const auto suggested = [&](const char* batch, const char* lr) {
        RunMeaning now = before;
        now.options["total-batch"] = batch;
        now.options["lr"] = lr;
        return check_changes(before, now, "total-batch,lr").back();
    };
    EXPECT_EQ(suggested("4096", "0.001"), "the square-root rule would suggest --lr 0.002 for this batch (lr x sqrt(4096 / 1024)); it is not applied");
    EXPECT_NE(suggested("512", "0.001").find("--lr 0.0007071 "), std::string::npos);
    EXPECT_NE(suggested("2048", "0.01").find("--lr 0.01414 "), std::string::npos);  // from the rate that is used
    EXPECT_EQ(suggested("1024", "0.01"), "lr was 0.001, now 0.01");
}

}  // namespace
