// metrics.jsonl stays valid JSON whatever the numbers, loses nothing of an earlier run, and a run folder belongs to one run.
#include <cmath>
#include <csignal>
#include <limits>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "dev/test/host_test.h"
#include "llmc/metrics.h"

using nlohmann::json;

namespace {

std::vector<json> lines_of(const std::string& path) {
    std::vector<json> lines;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
    return lines;
}

TEST(JsonLine, NumbersReadBackAsTheSameValue) {
    for (const double value : {0.1, 1.0 / 3.0, 3e-3, 1e-300, 1.7976931348623157e308, 123456789.123456789, -0.0, 5.0}) {
        const json line = json::parse(JsonLine("x").add("d", value).text());
        EXPECT_EQ(line["d"].get<double>(), value);
    }
    for (const float value : {0.1f, 1.0f / 3.0f, 3.4028235e38f, 1.4e-45f}) {
        const json line = json::parse(JsonLine("x").add("f", value).text());
        EXPECT_EQ(line["f"].get<float>(), value);
    }
    EXPECT_NE(JsonLine("x").add("f", 0.1f).text().find("0.1}"), std::string::npos);  // not 0.10000000149
    const json line = json::parse(JsonLine("x").add("i", std::numeric_limits<long long>::max()).add("u", std::numeric_limits<size_t>::max()).add("t", true).text());
    EXPECT_EQ(line["i"].get<long long>(), std::numeric_limits<long long>::max());
    EXPECT_EQ(line["u"].get<size_t>(), std::numeric_limits<size_t>::max());
    EXPECT_EQ(line["t"], true);
}

TEST(JsonLine, WhatJsonCannotHoldBecomesAString) {
    const json line = json::parse(JsonLine("x").add("a", NAN).add("b", INFINITY).add("c", -std::numeric_limits<double>::infinity()).text());
    EXPECT_EQ(line["a"], "nan");
    EXPECT_EQ(line["b"], "inf");
    EXPECT_EQ(line["c"], "-inf");
}

TEST(JsonLine, AnyBytesMakeAValidString) {
    std::string all;
    for (int c = 0; c < 256; ++c) all += static_cast<char>(c);
    for (const std::string& text : {all, std::string("\"\\\n\t\0", 5), std::string("\xc3\xa4\xf0\x9f\x98\x80"), std::string("\xe2\x82"), std::string("\xed\xa0\x80"), std::string("\xc0\x80"), std::string("\xf4\x90\x80\x80")}) {
        const json line = json::parse(JsonLine("x").add("s", text).text());
        EXPECT_TRUE(line["s"].is_string());
    }
    EXPECT_EQ(json::parse(JsonLine("x").add("s", "a\"\\\n\xc3\xa4").text())["s"], "a\"\\\n\xc3\xa4");
    EXPECT_EQ(json::parse(JsonLine("x").add("s", "\xc3").text())["s"], "\xef\xbf\xbd");
}

TEST(MetricsWriter, WritesWholeLinesAtOnce) {
    TempFolder folder;
    const RunFolder run(folder.file("a/b/run"));
    MetricsWriter metrics(run);
    TrainMetrics m;
    m.step = 7;
    m.loss = 2.5;
    m.grad_norm = INFINITY;
    m.mfu = NAN;
    m.mem_bytes = size_t{1} << 40;
    metrics.train(m);
    EXPECT_EQ(lines_of(metrics.path()).size(), 1u);  // before the file is closed
    metrics.val(7, 2.25, 1000);
    metrics.write(JsonLine("event").add("step", 8).add("event", "skip"));
    const std::vector<json> lines = lines_of(metrics.path());
    ASSERT_EQ(lines.size(), 3u);
    for (const char* field : {"step", "epoch", "tokens", "loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "mfu", "mfu_measured", "skipped", "mem_bytes", "data_ms", "exposed_comm_ms", "comm_bytes", "forward_ms", "head_ms", "backward_ms", "update_ms"})
        EXPECT_TRUE(lines[0].contains(field)) << field;
    EXPECT_EQ(lines[0]["kind"], "train");
    EXPECT_EQ(lines[0]["loss"], 2.5);
    EXPECT_EQ(lines[0]["mem_bytes"], size_t{1} << 40);
    EXPECT_EQ(lines[1], (json{{"kind", "val"}, {"step", 7}, {"val_loss", 2.25}, {"val_tokens", 1000}}));
    EXPECT_EQ(lines[2]["kind"], "event");
}

TEST(MetricsWriter, KeepsWhatAnEarlierRunWrote) {
    TempFolder folder;
    for (int i = 0; i < 3; ++i) {
        const RunFolder run(folder.path());
        MetricsWriter metrics(run);
        metrics.val(i, 1.0, 1);
        EXPECT_EQ(metrics.kept(), i == 0 ? "" : folder.file("metrics." + std::to_string(i) + ".jsonl"));
    }
    EXPECT_EQ(lines_of(folder.file("metrics.1.jsonl"))[0]["step"], 0);
    EXPECT_EQ(lines_of(folder.file("metrics.2.jsonl"))[0]["step"], 1);
    EXPECT_EQ(lines_of(folder.file("metrics.jsonl"))[0]["step"], 2);
}

TEST(MetricsWriter, AFullDiskIsAnErrorAndLeavesNoHalfLine) {
    TempFolder folder;
    const RunFolder run(folder.path());
    MetricsWriter metrics(run);
    metrics.val(0, 1.0, 1);
    const std::string before = read_file(metrics.path());
    // A file size limit inside the next line stands for the full disk: the first part of the line still fits.
    rlimit old_limit;
    getrlimit(RLIMIT_FSIZE, &old_limit);
    const rlimit limit = {before.size() + 10, old_limit.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    std::string message;
    try {
        metrics.val(1, 1.0, 1);
    } catch (const Error& error) {
        message = error.what();
    }
    setrlimit(RLIMIT_FSIZE, &old_limit);
    signal(SIGXFSZ, SIG_DFL);
    EXPECT_NE(message.find(metrics.path()), std::string::npos) << message;
    EXPECT_NE(message.find("File too large"), std::string::npos) << message;
    EXPECT_EQ(read_file(metrics.path()), before);
    metrics.val(1, 1.0, 1);
    EXPECT_EQ(lines_of(metrics.path()).size(), 2u);
}

TEST(RunFolder, IsHeldByOneRun) {
    TempFolder folder;
    {
        const RunFolder run(folder.file("run/"));
        EXPECT_EQ(run.path(), folder.file("run"));
        expect_error([&] { RunFolder second(folder.file("run")); }, {folder.file("run"), "in use", std::to_string(getpid())});
        // And against another process.
        const pid_t child = fork();
        if (child == 0) {
            try {
                RunFolder second(folder.file("run"));
            } catch (const Error&) {
                _exit(7);
            }
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        EXPECT_EQ(WEXITSTATUS(status), 7);
    }
    EXPECT_NO_THROW(RunFolder again(folder.file("run")));
}

TEST(RunFolder, AFolderThatCannotBeMadeOrWrittenIsRefused) {
    TempFolder folder;
    write_file(folder.file("plain"), "x");
    expect_error([&] { RunFolder run(folder.file("plain/run")); }, {folder.file("plain/run"), "Not a directory"});
    expect_error([&] { RunFolder run(folder.file("plain")); }, {folder.file("plain")});
    expect_error([&] { RunFolder run("/proc/run"); }, {"/proc/run"});
    expect_error([&] { RunFolder run(""); }, {"--out is empty"});
    std::filesystem::create_symlink(folder.file("plain"), folder.file(".lock"));
    expect_error([&] { RunFolder run(folder.path()); }, {folder.path()});  // a link is not followed
    EXPECT_EQ(read_file(folder.file("plain")), "x");
}

}  // namespace
