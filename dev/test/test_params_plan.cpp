// The plan for a number of parameters: the figures of an example to the digit, the numbers against a count of what each collective sends, and a text people can read.
#include <cmath>
#include <map>

#include <nlohmann/json.hpp>

#include "dev/test/host_test.h"
#include "llmc/params_plan.h"

namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

Options parse(const Words& more) {
    Words words = {"train_gpt", "--plan"};
    words.insert(words.end(), more.begin(), more.end());
    std::vector<const char*> argv;
    for (const std::string& word : words) argv.push_back(word.c_str());
    argv.push_back(nullptr);
    return parse_options(static_cast<int>(words.size()), argv.data());
}

std::string text_of(const Words& words) {
    const Options options = parse(words);
    return params_plan_text(options, options.ranks);
}

json json_of(const Words& words) {
    const Options options = parse(words);
    return json::parse(params_plan_json(options, options.ranks));
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    for (size_t begin = 0; begin < text.size();) {
        const size_t end = text.find('\n', begin);
        if (end == std::string::npos) {
            ADD_FAILURE() << "the last line has no end";
            break;
        }
        lines.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return lines;
}

// The cells of the row of that label: at least two spaces lie between.
Words cells(const std::string& text, const std::string& label) {
    Words found;
    for (const std::string& line : lines_of(text)) {
        if (line.rfind("  " + label + "  ", 0) != 0 && line.rfind(label + "  ", 0) != 0) continue;
        EXPECT_TRUE(found.empty()) << "two rows of " << label;
        size_t at = line.find(label) + label.size();
        while ((at = line.find_first_not_of(' ', at)) != std::string::npos) {
            const size_t end = std::min(line.find("  ", at), line.size());
            found.push_back(line.substr(at, end - at));
            at = end;
        }
    }
    return found;
}

const Words kExample = {"--params", "502.2M", "--ranks", "4", "--grad-accum", "16", "--step-seconds", "6.42", "--link", "nvlink=600,pcie=25"};

Words example_and(const Words& more) {
    Words words = kExample;
    words.insert(words.end(), more.begin(), more.end());
    return words;
}

TEST(ParamsPlan, TheExampleToTheDigit) {
    const std::string text = text_of(kExample);
    EXPECT_NE(text.find("plan for 502.20 M parameters on 4 ranks, 16 micro-steps a step"), std::string::npos) << text;
    EXPECT_EQ(cells(text, "sharded over the ranks"), Words({"nothing", "optimizer", "+ gradients", "+ parameters", "nothing"}));
    EXPECT_EQ(cells(text, "bytes a parameter"), Words({"16", "7", "5.5", "4", "16"}));
    EXPECT_EQ(cells(text, "on 40 GB"), Words({"1.75 B", "4.00 B", "5.09 B", "7.00 B", "1.75 B"}));
    EXPECT_EQ(cells(text, "on 80 GB"), Words({"3.50 B", "8.00 B", "10.18 B", "14.00 B", "3.50 B"}));
    EXPECT_EQ(cells(text, "memory, GB"), Words({"8.04", "3.52", "2.76", "2.01", "8.04"}));
    EXPECT_EQ(cells(text, "sent, GB"), Words({"1.51", "1.51", "12.81", "36.16", "24.11"}));
    EXPECT_EQ(cells(text, "nvlink at 600 GB/s, ms"), Words({"2.5", "2.5", "21.3", "60.3", "40.2"}));
    EXPECT_EQ(cells(text, "nvlink, % of a step of 6.42 s"), Words({"0.04", "0.04", "0.33", "0.94", "0.63"}));
    EXPECT_EQ(cells(text, "pcie at 25 GB/s, ms"), Words({"60.3", "60.3", "512.2", "1446.3", "964.2"}));
    EXPECT_EQ(cells(text, "pcie, % of a step of 6.42 s"), Words({"0.94", "0.94", "7.98", "22.53", "15.02"}));
    EXPECT_NE(text.find("7.03 GB a checkpoint, 28.12 GB with --keep 3"), std::string::npos) << text;  // 502.2e6 x 14, four of them
}

TEST(ParamsPlan, HoursAndCost) {
    const std::string neither = text_of(kExample);
    EXPECT_NE(neither.find("hours need --steps and --step-seconds"), std::string::npos) << neither;
    EXPECT_EQ(neither.find("cost"), std::string::npos);
    EXPECT_NE(text_of(example_and({"--price", "2"})).find("hours and cost need --steps and --step-seconds"), std::string::npos);
    EXPECT_NE(text_of({"--params", "1M", "--ranks", "2", "--steps", "10"}).find("hours need"), std::string::npos);
    const std::string hours = text_of(example_and({"--steps", "20000"}));
    EXPECT_NE(hours.find("35.67 hours of computation: 20000 steps of 6.42 s"), std::string::npos) << hours;  // 20000 x 6.42 / 3600
    EXPECT_NE(hours.find("142.67 device-hours; --price"), std::string::npos) << hours;
    const std::string cost = text_of(example_and({"--steps", "20000", "--price", "2.5"}));
    EXPECT_NE(cost.find("142.67 device-hours, cost 356.67 at 2.5 each"), std::string::npos) << cost;
}

// What a rank sends, one collective after the other: N-1 of its N slices in each.
double counted_bytes(int stage, bool every_micro_step, double parameters, int ranks, int micro_steps, int gradient_bytes) {
    const double gradients = (ranks - 1) * (parameters / ranks * gradient_bytes), weights = (ranks - 1) * (parameters / ranks * 2);
    double sent = 0;
    for (int micro_step = 0; micro_step < micro_steps; ++micro_step) {
        if (stage == 3) sent += weights + weights;  // gathered for forward, and for backward
        const bool reduced = stage >= 2 || every_micro_step || micro_step == micro_steps - 1;
        if (reduced) sent += gradients;
        if (reduced && stage == 0) sent += gradients;  // and gathered again
    }
    if (stage == 1 || stage == 2) sent += weights;
    return sent;
}

// What a rank holds, one kind of state after the other.
double counted_memory(int stage, double parameters, int ranks, int gradient_bytes) {
    const double share = parameters / ranks;
    double bytes = 0;
    for (int moment = 0; moment < 3; ++moment) bytes += (stage >= 1 ? share : parameters) * sizeof(float);
    bytes += (stage >= 2 ? share : parameters) * gradient_bytes;
    return bytes + (stage >= 3 ? share : parameters) * 2;
}

#define EXPECT_CLOSE(actual, expected) EXPECT_NEAR((actual), (expected), 1e-12 * (expected))

TEST(ParamsPlan, JsonHoldsTheNumbers) {
    const struct { const char* text; double parameters; int ranks, micro_steps, gradient_bytes; } cases[] = {
        {"502.2M", 502.2e6, 4, 16, 2}, {"502.2M", 502.2e6, 4, 16, 4}, {"70B", 70e9, 7, 1, 2}, {"1.3e9", 1.3e9, 1, 3, 4}, {"1k", 1000, 1048576, 5, 2}};
    for (const auto& c : cases) {
        const json plan = json_of({"--plan-json", "--params", c.text, "--ranks", std::to_string(c.ranks), "--grad-accum", std::to_string(c.micro_steps), "--step-seconds", "6.42",
                                   "--link", "fast=600:2,slow=0.5", "--grad-dtype", c.gradient_bytes == 4 ? "fp32" : "bf16", "--device-memory", "141GB", "--steps", "1000",
                                   "--price", "3", "--keep", "2"});
        SCOPED_TRACE(plan.dump(1));
        EXPECT_EQ(plan["parameters"], c.parameters);
        EXPECT_EQ(plan["ranks"], c.ranks);
        EXPECT_EQ(plan["micro_steps"], c.micro_steps);
        EXPECT_EQ(plan["gradient_bytes"], c.gradient_bytes);
        EXPECT_EQ(plan["step_seconds"], 6.42);
        ASSERT_EQ(plan["stages"].size(), 4u);
        for (int row = 0; row < 5; ++row) {
            const int stage = row % 4;
            const json& one = row < 4 ? plan["stages"][row] : plan["stage_0_every_micro_step"];
            const double memory = counted_memory(stage, c.parameters, c.ranks, c.gradient_bytes);
            const double sent = counted_bytes(stage, row == 4, c.parameters, c.ranks, c.micro_steps, c.gradient_bytes);
            EXPECT_EQ(one["stage"], stage);
            EXPECT_CLOSE(one["bytes_per_parameter"].get<double>() * c.parameters, memory);
            EXPECT_NEAR(one["memory_bytes"].get<double>(), memory, 0.5 + 1e-12 * memory);  // whole bytes
            EXPECT_NEAR(one["sent_bytes_per_step"].get<double>(), sent, 0.5 + 1e-12 * sent);
            ASSERT_EQ(one["largest_models"].size(), 3u);
            for (int i = 0; i < 3; ++i) {
                const double device = (i == 0 ? 40 : i == 1 ? 80 : 141) * 1e9;
                EXPECT_EQ(one["largest_models"][i]["device_memory_bytes"], device);
                // So many parameters take 70 % of the device.
                EXPECT_NEAR(one["largest_models"][i]["parameters"].get<double>() * memory / c.parameters / device, 0.7, 1e-9);
            }
            ASSERT_EQ(one["links"].size(), 2u);
            EXPECT_EQ(one["links"][0]["name"], "fast");
            EXPECT_EQ(one["links"][1]["name"], "slow");
            for (int i = 0; i < 2; ++i) {
                const double seconds = sent / (i == 0 ? 600e9 : 0.5e9);
                EXPECT_CLOSE(one["links"][i]["seconds"].get<double>(), seconds);
                EXPECT_CLOSE(one["links"][i]["share_of_step"].get<double>(), seconds / 6.42);
            }
        }
        EXPECT_CLOSE(plan["checkpoint_bytes"].get<double>(), 14 * c.parameters);
        EXPECT_CLOSE(plan["disk_bytes"].get<double>(), 3 * 14 * c.parameters);
        EXPECT_CLOSE(plan["hours"].get<double>(), 6420.0 / 3600);
        EXPECT_CLOSE(plan["device_hours"].get<double>(), 6420.0 / 3600 * c.ranks);
        EXPECT_CLOSE(plan["cost"].get<double>(), 3 * 6420.0 / 3600 * c.ranks);
    }
}

TEST(ParamsPlan, WhatIsNotGivenIsNull) {
    const json plan = json_of({"--params", "1B", "--ranks", "8"});
    EXPECT_EQ(plan["micro_steps"], 1);
    EXPECT_EQ(plan["keep"], 3);
    for (const char* name : {"step_seconds", "steps", "hours", "device_hours", "price", "cost"}) EXPECT_TRUE(plan.contains(name) && plan[name].is_null()) << name;
    EXPECT_EQ(plan["stages"][0]["links"].size(), 3u);  // the default of --link
    EXPECT_TRUE(plan["stages"][0]["links"][0]["share_of_step"].is_null());
    EXPECT_EQ(plan["stages"][0]["largest_models"].size(), 2u);
    EXPECT_EQ(json_of({"--params", "1B", "--ranks", "8", "--device-memory", "80GB"})["stages"][0]["largest_models"].size(), 2u);  // is there already
}

TEST(ParamsPlan, OneRankSendsNothingAndHoldsAll) {
    const std::string text = text_of({"--params", "1B", "--ranks", "1"});
    EXPECT_NE(text.find("on 1 rank, 1 micro-step a step"), std::string::npos) << text;
    EXPECT_EQ(cells(text, "bytes a parameter"), Words(5, "16"));
    EXPECT_EQ(cells(text, "sent, GB"), Words(5, "0.00"));
    EXPECT_EQ(cells(text, "ib at 50 GB/s, ms"), Words(5, "0.0"));
    EXPECT_EQ(text.find("% of a step"), std::string::npos);  // none was given
}

TEST(ParamsPlan, SmallNumbersKeepTheirDigits) {
    const std::string text = text_of({"--params", "1k", "--ranks", "2"});
    EXPECT_EQ(cells(text, "memory, GB")[0], "1.6e-05");
    EXPECT_EQ(cells(text, "sent, GB")[0], "2e-06");
    EXPECT_EQ(cells(text, "pcie at 25 GB/s, ms")[0], "8e-05");
}

// For every one: at most 120 columns, one right edge a column, no two stages' cells run together.
TEST(ParamsPlan, TablesArePleasantToRead) {
    const Words most = {"--params", "1000T", "--ranks", "1048576", "--grad-accum", "1073741824", "--step-seconds", "1e-9", "--steps", "1000000000000", "--price", "1e9",
                        "--keep", "1073741824", "--device-memory", "1000000TB", "--grad-dtype", "fp32", "--link", "nvlink=0.001,infiniband=999999.5:100"};
    for (const Words& words : {kExample, most, Words{"--params", "1", "--ranks", "3"}, example_and({"--device-memory", "24GiB", "--steps", "5", "--price", "1"})}) {
        const std::string text = text_of(words);
        std::vector<size_t> edges;
        for (const std::string& line : lines_of(text)) {
            EXPECT_LE(line.size(), 120u) << line;
            EXPECT_TRUE(line.empty() || line.back() != ' ') << line;
            EXPECT_EQ(line.find("nan"), std::string::npos) << line;
            EXPECT_EQ(line.find("inf "), std::string::npos) << line;
        }
        const std::vector<std::string> lines = lines_of(text);
        size_t rows = 0;
        for (size_t i = 3; i < lines.size() && lines[i][0] != '*'; ++i) {
            if (lines[i][0] != ' ' && lines[i].rfind("sharded", 0) != 0) continue;
            if (edges.empty())
                for (size_t at = 0; (at = lines[2].find("stage ", at)) != std::string::npos; at += 6) edges.push_back(at + 7 + (lines[2].substr(at + 7, 2) == " *" ? 2 : 0));
            ASSERT_EQ(edges.size(), 5u) << lines[2];
            ++rows;
            EXPECT_EQ(lines[i].size(), edges.back()) << lines[i];
            for (const size_t edge : edges) {
                ASSERT_LE(edge, lines[i].size()) << lines[i];
                EXPECT_NE(lines[i][edge - 1], ' ') << lines[i];
                EXPECT_TRUE(edge == lines[i].size() || lines[i].substr(edge, 2) == "  ") << lines[i];
            }
        }
        EXPECT_GE(rows, 8u) << text;
    }
}

TEST(ParamsPlan, SaysWhatItLeavesOut) {
    const std::string text = text_of(kExample);
    for (const char* words : {"Activations", "--preset or --from-config", "without latency", "(*: G 2x g P)", "--sync-every-micro-step"})
        EXPECT_NE(text.find(words), std::string::npos) << words;
    EXPECT_NE(text_of({"--params", "1B", "--ranks", "2", "--link", "ib=50:5"}).find("without the latency in --link"), std::string::npos);
    EXPECT_NE(text_of(example_and({"--grad-dtype", "fp32"})).find("g = 4 of its\ngradient (--grad-dtype fp32)"), std::string::npos);
}

TEST(ParamsPlan, AWrongLinkIsRefused) {
    expect_error<UsageError>([] { text_of({"--params", "1B", "--ranks", "2", "--link", "fast"}); }, {"--link"});
    expect_error<UsageError>([] { json_of({"--params", "1B", "--ranks", "2", "--link", "fast=-1"}); }, {"--link"});
    EXPECT_NO_THROW(json_of({"--params", "1B", "--ranks", "2", "--link", "\xff=1"}));  // a name that is no text still makes JSON
}

}  // namespace
