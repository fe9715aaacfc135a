// metrics.jsonl stays valid JSON whatever the numbers, loses nothing of an earlier run, is continued without a torn line, and a run folder belongs to one run.
#include <cmath>
#include <csignal>
#include <limits>
#include <sys/resource.h>
#include <sys/stat.h>
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

// What metrics.jsonl holds after a run continued `before` and wrote one line, without that line.
std::string continued(const std::string& before) {
    TempFolder folder;
    const RunFolder run(folder.path());
    write_file(folder.file("metrics.jsonl"), before);
    const std::string line = JsonLine("val").add("step", 9).text() + "\n";
    {
        MetricsWriter metrics(run, true);
        EXPECT_EQ(metrics.kept(), "");
        EXPECT_EQ(metrics.path(), folder.file("metrics.jsonl"));
        metrics.write(JsonLine("val").add("step", 9));
        metrics.sync();
    }
    const std::string after = read_file(folder.file("metrics.jsonl"));
    EXPECT_FALSE(std::filesystem::exists(folder.file("metrics.1.jsonl")));
    if (after.size() < line.size() || after.substr(after.size() - line.size()) != line) {
        ADD_FAILURE() << "the new line is not the last one of: " << after;
        return "";
    }
    return after.substr(0, after.size() - line.size());
}

TEST(MetricsWriter, ContinuesAFileAndCutsOffALineWithoutItsEnd) {
    const std::string whole = "{\"kind\": \"train\", \"step\": 0}\n{\"kind\": \"train\", \"step\": 1}\n";
    EXPECT_EQ(continued(whole), whole);
    EXPECT_EQ(continued(whole + "{\"kind\": \"tr"), whole);
    EXPECT_EQ(continued(whole + "{"), whole);
    EXPECT_EQ(continued(""), "");
    EXPECT_EQ(continued("{\"kind\": \"tr"), "");                   // nothing but a torn line
    EXPECT_EQ(continued("\n"), "\n");
    EXPECT_EQ(continued(whole + std::string(100, '\0')), whole);   // what a power failure leaves on some file systems
    // Torn lines around the size in which the file is searched, and the end of the last whole line on its edges.
    for (const size_t length : {4094, 4095, 4096, 4097, 8191, 8192, 8193, 20000}) {
        EXPECT_EQ(continued(whole + std::string(length, 'x')), whole) << length;
        EXPECT_EQ(continued(std::string(length, 'x')), "") << length;
        EXPECT_EQ(continued(std::string(length, 'x') + "\n"), std::string(length, 'x') + "\n") << length;
        EXPECT_EQ(continued(std::string(length, 'x') + "\n{"), std::string(length, 'x') + "\n") << length;
    }
}

TEST(MetricsWriter, ContinuingWithoutAFileBeginsOne) {
    TempFolder folder;
    const RunFolder run(folder.path());
    MetricsWriter metrics(run, true);
    metrics.val(0, 1.0, 1);
    EXPECT_EQ(lines_of(folder.file("metrics.jsonl")).size(), 1u);
}

TEST(MetricsWriter, ContinuesARegularFileOnly) {
    TempFolder folder;
    const RunFolder run(folder.path());
    const std::string path = folder.file("metrics.jsonl");
    write_file(folder.file("other"), "not ours");
    for (const char* target : {"other", "missing"}) {
        std::filesystem::create_symlink(folder.file(target), path);
        expect_error([&] { MetricsWriter metrics(run, true); }, {path, "symbolic link"});
        std::filesystem::remove(path);
    }
    EXPECT_EQ(read_file(folder.file("other")), "not ours");
    EXPECT_FALSE(std::filesystem::exists(folder.file("missing")));
    ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
    expect_error([&] { MetricsWriter metrics(run, true); }, {path, "not a regular file"});
    std::filesystem::remove(path);
    std::filesystem::create_directory(path);
    expect_error([&] { MetricsWriter metrics(run, true); }, {path, "Is a directory"});
}

TEST(MetricsWriter, WhatCannotBeSyncedIsAnError) {
    TempFolder folder;
    const RunFolder run(folder.path());
    MetricsWriter metrics(run);
    metrics.val(0, 1.0, 1);
    metrics.sync();
    // The writer's file becomes a pipe, which cannot be synced.
    int fd = -1;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code ignored;
        if (std::filesystem::read_symlink(entry.path(), ignored) == metrics.path()) fd = std::stoi(entry.path().filename().string());
    }
    ASSERT_GE(fd, 0);
    int pipe_fds[2];
    ASSERT_EQ(pipe(pipe_fds), 0);
    ASSERT_EQ(dup2(pipe_fds[1], fd), fd);
    expect_error([&] { metrics.sync(); }, {metrics.path(), "to disk", "Invalid argument"});
    close(pipe_fds[0]);
    close(pipe_fds[1]);
}

TEST(RunFolder, IsHeldByOneRun) {
    TempFolder folder;
    {
        const RunFolder run(folder.file("run/"));
        EXPECT_EQ(run.path(), folder.file("run"));
        // The message ends its bracket after the host: no digits, no line end.
        char host[128] = {};
        gethostname(host, sizeof host - 1);
        expect_error([&] { RunFolder second(folder.file("run")); },
                     {folder.file("run"), "in use by another run (process " + std::to_string(getpid()) + " on " + host + "); give another folder"});
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

TEST(RunFolder, OtherRanksSeeWhetherItIsRankZeros) {
    TempFolder folder;
    const std::string path = folder.file("run"), lock = folder.file("run/.lock");
    std::string first;
    {
        const RunFolder run(path + "/");
        first = run.owner();
        EXPECT_EQ(first.find("process " + std::to_string(getpid()) + " on "), 0u) << first;
        EXPECT_EQ(read_file(lock), first);
        EXPECT_NO_THROW(check_run_folder_is_shared(path, first));
        EXPECT_NO_THROW(check_run_folder_is_shared(path + "//", first));
    }
    // The same process on the same host: another run all the same.
    const RunFolder run(path);
    EXPECT_NE(run.owner(), first);
    const std::vector<std::string> words = {"--out " + path + " is not the folder that rank 0 sees: every rank must see one file system (", lock};
    const auto refused = [&](const std::string& why) {
        std::vector<std::string> all = words;
        all.push_back(why);
        expect_error([&] { check_run_folder_is_shared(path, run.owner()); }, all);
    };
    const std::string owner = run.owner();
    for (const std::string& text : {first, owner + "x", owner.substr(0, owner.size() - 1), std::string()}) {
        write_file(lock, text);
        refused("written by another run");
    }
    write_file(lock, owner);
    EXPECT_NO_THROW(check_run_folder_is_shared(path, owner));
    std::filesystem::remove(lock);
    refused("No such file");
    write_file(folder.file("copy"), owner);
    std::filesystem::create_symlink(folder.file("copy"), lock);  // a link is not followed
    refused("symbolic links");
    std::filesystem::remove(lock);
    ASSERT_EQ(mkfifo(lock.c_str(), 0600), 0);  // and a pipe is not waited for
    refused("");
    std::filesystem::remove_all(path);
    refused("No such file");
}

}  // namespace
