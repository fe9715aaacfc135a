// The command line: every option reaches its field, nonsense is refused with the option, the value and the fix.
#include <map>
#include <set>

#include "dev/test/host_test.h"
#include "llmc/options.h"

namespace {

Options parse(std::vector<std::string> words) {
    words.insert(words.begin(), "train_gpt");
    std::vector<const char*> argv;
    for (const std::string& word : words) argv.push_back(word.c_str());
    argv.push_back(nullptr);
    return parse_options(static_cast<int>(words.size()), argv.data());
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
        {"--resume", "auto"}, {"--allow-change", "lr"}, {"--save-every", "100"}, {"--save-minutes", "5"}, {"--save-mode", "stream"}, {"--generate"}, {"--profile"},
        {"--check-collectives"}, {"--model", "some/folder"}};
    for (const auto& words : given) refused(words, {words[0], "not available yet"});
    refused({"--model", "x"}, {"--from-config"});
    EXPECT_NO_THROW(parse({"--profile=false"}));
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
    bad("save-every = 3\n", {path, "save-every", "not available yet"});
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
                             "--lmhead-chunks", "--grad-dtype", "--val-every", "--val-batches", "--sample-every", "--sample-tokens", "--prompt", "--temperature", "--top-k", "--top-p",
                             "--out", "--save-every", "--save-minutes", "--save-mode", "--keep", "--resume", "--allow-change", "--plan", "--ranks", "--link", "--params", "--grad-accum",
                             "--step-seconds", "--price", "--generate", "--profile", "--config"})
        EXPECT_NE(help.find(std::string("  ") + name), std::string::npos) << name;
    for (const std::string& name : preset_names()) EXPECT_NE(help.find(name), std::string::npos) << name;
}

TEST(Options, TheStartUpPrintShowsWhatIsSet) {
    std::set<std::string> names;
    for (const OptionRow& row : option_rows(parse({}))) {
        EXPECT_FALSE(row.value.empty()) << row.name;
        EXPECT_TRUE(names.insert(row.name).second);
    }
    EXPECT_TRUE(names.count("lr") && names.count("steps") && names.count("zero-stage") && names.count("preset"));
    EXPECT_FALSE(names.count("epochs") || names.count("num-layers") || names.count("resume") || names.count("keep") || names.count("plan"));
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

}  // namespace
