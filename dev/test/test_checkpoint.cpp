// A checkpoint's folder and its trainer.json: what was written is read and nothing else is, and no folder or file but a checkpoint's is ever touched.
#include <sys/stat.h>
#include <unistd.h>

#include <functional>
#include <tuple>

#include <nlohmann/json.hpp>

#include "dev/test/host_test.h"
#include "llmc/checkpoint.h"

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

using Names = std::vector<std::string>;

auto fields(const CheckpointInfo& i) {
    return std::tuple(i.step, i.steps, i.tokens, i.windows_consumed, i.data_fingerprint, i.precision, i.applied_steps, i.skipped_total, i.skipped_in_row, i.ranks, i.stage, i.options, i.files);
}

CheckpointInfo some_info() {
    CheckpointInfo info;
    info.step = 12;
    info.steps = 40;
    info.tokens = 12 * 4096;
    info.windows_consumed = 384;
    info.data_fingerprint = "0123456789abcdef";
    info.precision = "bf16";
    info.applied_steps = 11;
    info.skipped_total = 1;
    info.skipped_in_row = 0;
    info.ranks = 2;
    info.stage = 3;
    info.options = {{"lr", "0.0012345678901234567"}, {"prompt", "def \"f\\\x1f\n"}, {"schedule", "wsd"}};
    info.files = {{"model.safetensors", {123456, "00112233445566aa"}}, {"optimizer-00000-of-00002.safetensors", {0, "ffeeddccbbaa9988"}}};
    return info;
}

CheckpointInfo read_text(const TempFolder& folder, const std::string& text) {
    write_file(folder.file("trainer.json"), text);
    return read_checkpoint_info(folder.path());
}

// The text of `root` under a checksum that is right.
std::string with_checksum(json root) {
    root.erase("checksum");
    const std::string text = root.dump();
    Hash64 hash;
    hash.add(text.data(), text.size());
    root["checksum"] = hash.hex();
    return root.dump();
}

// some_info()'s trainer.json, changed by `change` and under a right checksum, is refused with these words and the file's path.
void info_refused(const std::function<void(json&)>& change, Names words) {
    const TempFolder folder;
    json root = json::parse(checkpoint_json(some_info()));
    change(root);
    words.push_back(folder.file("trainer.json"));
    expect_error([&] { read_text(folder, with_checksum(root)); }, words);
}

TEST(CheckpointInfo, WhatIsWrittenIsRead) {
    const TempFolder folder;
    CheckpointInfo info = some_info();
    EXPECT_TRUE(fields(read_text(folder, checkpoint_json(info))) == fields(info));
    EXPECT_FALSE(info.finished());
    EXPECT_TRUE(fields(read_text(folder, checkpoint_json({}))) == fields({}));
    EXPECT_TRUE(CheckpointInfo{}.finished());
    info.step = info.steps = info.tokens = info.windows_consumed = 1'000'000'000'000'000'000;
    info.applied_steps = info.skipped_total = info.skipped_in_row = 1'000'000'000'000'000'000;
    info.ranks = info.stage = 2147483647;
    info.files["model.safetensors"].bytes = 1'000'000'000'000'000'000;
    EXPECT_TRUE(fields(read_text(folder, checkpoint_json(info))) == fields(info));
    // The checksum is that of the text without it: another program can check it, too.
    EXPECT_TRUE(fields(read_text(folder, with_checksum(json::parse(checkpoint_json(info))))) == fields(info));
}

TEST(CheckpointInfo, APromptMayHoldAnyByte) {
    const TempFolder folder;
    const std::string replaced = "\xEF\xBF\xBD";  // U+FFFD, for what is no UTF-8
    for (int byte = 0; byte < 256; ++byte) {
        CheckpointInfo info = some_info();
        const std::string one(1, static_cast<char>(byte));
        info.options["prompt"] = "a" + one + "b";
        const CheckpointInfo read = read_text(folder, checkpoint_json(info));
        EXPECT_EQ(read.options.at("prompt"), "a" + (byte < 128 ? one : replaced) + "b") << byte;
        info.options["prompt"] = read.options.at("prompt");
        EXPECT_TRUE(fields(read) == fields(info)) << byte;
    }
    CheckpointInfo info = some_info();
    info.options["prompt"] = "\xC3\xA4\xE2\x82\xAC\xF0\x9F\x90\x8D";  // two, three and four bytes
    EXPECT_TRUE(fields(read_text(folder, checkpoint_json(info))) == fields(info));
    info.options["prompt"] = "\xC3";  // cut off
    EXPECT_EQ(read_text(folder, checkpoint_json(info)).options.at("prompt"), replaced);
}

TEST(CheckpointInfo, NoChangedBitReadsAsAnotherRun) {
    const TempFolder folder;
    const CheckpointInfo info = some_info();
    const std::string text = checkpoint_json(info);
    size_t refused = 0;
    for (size_t i = 0; i < text.size(); ++i) {
        for (int bit = 0; bit < 8; ++bit) {
            std::string changed = text;
            changed[i] = static_cast<char>(changed[i] ^ 1 << bit);
            try {
                ASSERT_TRUE(fields(read_text(folder, changed)) == fields(info)) << "byte " << i << " bit " << bit << " of\n" << text;
            } catch (const Error& error) {
                ASSERT_NE(std::string(error.what()).find(folder.file("trainer.json")), std::string::npos) << error.what();
                ++refused;
            }
        }
    }
    EXPECT_GT(refused, 7 * text.size());  // the others are a \u001f that reads \u001F, and such
}

TEST(CheckpointInfo, WhatIsCutOffIsRefused) {
    const TempFolder folder;
    const std::string text = checkpoint_json(some_info());
    ASSERT_EQ(text.substr(text.size() - 2), "}\n");
    for (size_t length = 0; length + 1 < text.size(); ++length)
        expect_error([&] { read_text(folder, text.substr(0, length)); }, {"cut off", folder.file("trainer.json")});
    expect_error([&] { read_text(folder, text + text); }, {"cut off or changed"});
    for (const char* other : {"", "[]", "null", "\"format\"", "7", "{]", "llm.zero checkpoint"}) expect_error([&] { read_text(folder, other); }, {"no JSON object", folder.file("trainer.json")});
}

TEST(CheckpointInfo, OnlyThisFormatAndVersionAreRead) {
    info_refused([](json& root) { root["version"] = 2; }, {"version 2 is newer than the 1", "the program that wrote it"});
    info_refused([](json& root) { root["version"] = 0; }, {"no version 0"});
    info_refused([](json& root) { root["version"] = (1ll << 32) + 1; }, {"`version`", "larger"});  // 1 in 32 bits
    info_refused([](json& root) { root["version"] = -1; }, {"`version` is not a whole number"});
    info_refused([](json& root) { root["format"] = "llm.zero checkpoints"; }, {"format is not `llm.zero checkpoint`"});
    info_refused([](json& root) { root["format"] = 1; }, {"`format` is not a text"});
    const TempFolder folder;
    expect_error([&] { read_text(folder, R"({"architectures": ["LlamaForCausalLM"]})"); }, {"`format` is missing", folder.file("trainer.json")});
    // A newer version may be without what this one has, and is still named.
    expect_error([&] { read_text(folder, R"({"format": "llm.zero checkpoint", "version": 3})"); }, {"version 3"});
}

TEST(CheckpointInfo, AMissingFieldIsNamed) {
    size_t names = 0;
    const json whole = json::parse(checkpoint_json(some_info()));
    for (const auto& item : whole.items()) {
        if (item.key() == "checksum") continue;
        info_refused([&](json& root) { root.erase(item.key()); }, {"`" + item.key() + "` is missing"});
        ++names;
    }
    EXPECT_EQ(names, 15u);
    const TempFolder folder;
    json root = json::parse(checkpoint_json(some_info()));
    root.erase("checksum");
    expect_error([&] { read_text(folder, root.dump()); }, {"`checksum` is missing"});
    root["checksum"] = 5;
    expect_error([&] { read_text(folder, root.dump()); }, {"`checksum` is not a text"});
    root["checksum"] = "0000000000000000";
    expect_error([&] { read_text(folder, root.dump()); }, {"checksum does not match", folder.file("trainer.json")});
}

TEST(CheckpointInfo, AValueOfAnotherKindIsNamed) {
    for (const char* name : {"step", "steps", "tokens", "windows_consumed", "applied_steps", "skipped_total", "skipped_in_row", "ranks", "zero_stage"}) {
        const auto bad = [&](const json& value, const std::string& word) { info_refused([&](json& root) { root[name] = value; }, {std::string("`") + name + "`", word}); };
        for (const json& value : {json(-1), json(1.5), json(3.0), json(1e30), json("7"), json(nullptr), json(true), json::array(), json::object()}) bad(value, "not a whole number");
        bad(1'000'000'000'000'000'001, "larger than any run");
        bad(18446744073709551615u, "larger than any run");
    }
    for (const char* name : {"ranks", "zero_stage"}) info_refused([&](json& root) { root[name] = (1ll << 32) + 2; }, {std::string("`") + name + "`", "larger"});
    for (const char* name : {"data_fingerprint", "precision"}) info_refused([&](json& root) { root[name] = 7; }, {std::string("`") + name + "` is not a text"});
    for (const char* name : {"options", "files"}) {
        for (const json& value : {json::array(), json("x"), json(nullptr)}) info_refused([&](json& root) { root[name] = value; }, {std::string("`") + name + "` is not an object"});
    }
    info_refused([](json& root) { root["options"]["lr"] = 0.5; }, {"`options`", "texts"});
    info_refused([](json& root) { root["files"]["model.safetensors"] = 5; }, {"`files`", "bytes and xxh3"});
    info_refused([](json& root) { root["files"]["model.safetensors"].erase("bytes"); }, {"`bytes` is missing"});
    info_refused([](json& root) { root["files"]["model.safetensors"].erase("xxh3"); }, {"`xxh3` is missing"});
    info_refused([](json& root) { root["files"]["model.safetensors"]["bytes"] = -1; }, {"`bytes` is not a whole number"});
    info_refused([](json& root) { root["files"]["model.safetensors"]["xxh3"] = 1; }, {"`xxh3` is not a text"});
}

TEST(CheckpointInfo, OnlyFilesOfACheckpointAreNamed) {
    for (const char* name : {"", "trainer.json", "notes.txt", "../model.safetensors", "model/../../x.safetensors", "/model.safetensors", "optimizer-/x.safetensors", "optimizer-0", "model", "config.json/",
                             ".", "..", "xmodel.safetensors", "product_choices.bin "})
        info_refused([&](json& root) { root["files"][name] = {{"bytes", 1}, {"xxh3", "0"}}; }, {"`files`", "no checkpoint holds"});
    const TempFolder folder;
    json root = json::parse(checkpoint_json(some_info()));
    for (const char* name : {"config.json", "product_choices.bin", "model-00001-of-00002.safetensors", "model.safetensors.index.json"}) root["files"][name] = {{"bytes", 1}, {"xxh3", "0"}};
    EXPECT_EQ(read_text(folder, with_checksum(root)).files.size(), 6u);
}

TEST(CheckpointInfo, WhatIsTooLargeOrTooDeepIsRefused) {
    const TempFolder folder;
    const std::string text = checkpoint_json(some_info());
    EXPECT_NO_THROW(read_text(folder, text + std::string(1 << 20, ' ')));
    expect_error([&] { read_text(folder, text + std::string(20'000'000, ' ')); }, {"more than 16000000 bytes", folder.file("trainer.json")});
    const std::string begin = R"({"format": "llm.zero checkpoint", "version": 1, "checksum": "", "options": )";
    const size_t depth = 5'000'000;  // of calls would be more than any stack
    expect_error([&] { read_text(folder, begin + std::string(depth, '[') + std::string(depth, ']') + "}"); }, {"nests deeper", folder.file("trainer.json")});
}

TEST(CheckpointInfo, AFolderThatIsNoCheckpointIsNamed) {
    const TempFolder folder;
    expect_error([&] { read_checkpoint_info(folder.path()); }, {folder.file("trainer.json") + " is missing", "no checkpoint"});
    expect_error([&] { read_checkpoint_info(folder.file("none")); }, {folder.file("none/trainer.json") + " is missing"});
    write_file(folder.file("file"), "x");
    expect_error([&] { read_checkpoint_info(folder.file("file")); }, {folder.file("file/trainer.json"), "Not a directory"});
    fs::create_directory(folder.file("trainer.json"));
    expect_error([&] { read_checkpoint_info(folder.path()); }, {folder.file("trainer.json"), "Is a directory"});
    fs::create_directory(folder.file("pipe"));
    ASSERT_EQ(mkfifo(folder.file("pipe/trainer.json").c_str(), 0600), 0);  // must not hang
    expect_error([&] { read_checkpoint_info(folder.file("pipe")); }, {folder.file("pipe/trainer.json")});
}

// ---- folders ----

const std::map<std::string, std::string> kFiles = {{"config.json", "{}"}, {"model.safetensors", std::string(1000, 'w')}, {"optimizer-00000-of-00002.safetensors", std::string(3000, 'a')},
                                                   {"optimizer-00001-of-00002.safetensors", std::string(2999, 'b')}, {"product_choices.bin", ""}};

// Saves a checkpoint of kFiles.
CheckpointInfo save(const std::string& run, long long step) {
    begin_checkpoint(run, step);
    CheckpointInfo info = some_info();
    info.step = step;
    info.files.clear();
    for (const auto& [name, bytes] : kFiles) info.files[name] = write_durable_file(run + "/" + unfinished_name(step) + "/" + name, bytes);
    EXPECT_EQ(complete_checkpoint(run, info), run + "/" + checkpoint_name(step));
    return info;
}

Names names_in(const std::string& folder) {
    Names names;
    for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
}

Names under(const std::string& folder, Names names) {
    for (std::string& name : names) name = folder + "/" + name;
    return names;
}

// A folder that looks like a checkpoint's and is elsewhere: nothing may reach it through a link.
struct Elsewhere {
    TempFolder folder;
    Elsewhere() {
        for (const auto& [name, bytes] : kFiles) write_file(folder.file(name), bytes);
        write_file(folder.file("trainer.json"), "{}");
    }
    void expect_untouched() const { EXPECT_EQ(names_in(folder.path()).size(), kFiles.size() + 1); }
};

TEST(Checkpoint, IsCompleteOrNotThere) {
    const TempFolder run;
    EXPECT_EQ(checkpoint_name(7), "step_00000007");
    EXPECT_EQ(checkpoint_name(1234567890123), "step_1234567890123");
    EXPECT_EQ(unfinished_name(7), ".saving-step_00000007");
    begin_checkpoint(run.path(), 7);
    EXPECT_EQ(names_in(run.path()), Names{".saving-step_00000007"});
    EXPECT_TRUE(list_checkpoints(run.path()).empty());
    const CheckpointInfo info = save(run.path(), 7);
    EXPECT_EQ(names_in(run.path()), Names{"step_00000007"});
    EXPECT_EQ(list_checkpoints(run.path()), under(run.path(), {"step_00000007"}));
    EXPECT_TRUE(fields(read_checkpoint_info(run.file("step_00000007"))) == fields(info));
    EXPECT_EQ(names_in(run.file("step_00000007")).size(), kFiles.size() + 1);
    // One of the same step does not take the place of the one that is there.
    expect_error([&] { save(run.path(), 7); }, {run.file("step_00000007"), "cannot be renamed"});
    EXPECT_TRUE(fields(read_checkpoint_info(run.file("step_00000007"))) == fields(info));
}

TEST(Checkpoint, TheListIsNewestFirstAndOfCheckpointsOnly) {
    const TempFolder run;
    const Elsewhere elsewhere;
    EXPECT_TRUE(list_checkpoints(run.file("none")).empty());
    for (const char* name : {"step_00000002", "step_00000010", "step_00000000", "step_99999999", "step_100000000", "step_123456789012345678"}) fs::create_directory(run.file(name));
    for (const char* name : {"step_1", "step_", "step", "step_0000001x", "step_x0000001", "step_000000010", "step_-0000001", "step_+0000001", "step_ 0000001", "xstep_00000001", "step_00000001.old",
                             "step_1234567890123456789", "STEP_00000001", ".saving-step_00000008", ".removing-step_00000008", "earlier.1", "other"})
        fs::create_directory(run.file(name));
    fs::create_directory(run.file("earlier.1/step_00000077"));
    write_file(run.file("step_00000003"), "a file");
    fs::create_directory_symlink(elsewhere.folder.path(), run.file("step_00000004"));
    fs::create_symlink("nowhere", run.file("step_00000005"));
    EXPECT_EQ(list_checkpoints(run.path()),
              under(run.path(), {"step_123456789012345678", "step_100000000", "step_99999999", "step_00000010", "step_00000002", "step_00000000"}));
    EXPECT_TRUE(list_checkpoints(run.file("step_00000003")).empty());
}

TEST(Checkpoint, WhatAKilledSaveLeftIsCleanedBeforeTheNext) {
    // Killed after so many of the files, of which the last may be half there.
    for (size_t count = 0; count <= kFiles.size(); ++count) {
        const TempFolder run;
        save(run.path(), 3);
        fs::create_directory(run.file(unfinished_name(5)));
        auto file = kFiles.begin();
        for (size_t i = 0; i < count; ++i, ++file) write_file(run.file(unfinished_name(5) + "/" + file->first), file->second.substr(0, file->second.size() / 2));
        EXPECT_EQ(list_checkpoints(run.path()), under(run.path(), {"step_00000003"}));
        save(run.path(), count % 2 ? 5 : 6);
        EXPECT_EQ(names_in(run.path()), (Names{"step_00000003", checkpoint_name(count % 2 ? 5 : 6)}));
    }
}

TEST(Checkpoint, WhatAKilledRemovalLeftIsCleaned) {
    Names files = {"trainer.json"};
    for (const auto& [name, bytes] : kFiles) files.push_back(name);
    for (size_t removed = 0; removed <= files.size(); ++removed) {
        const TempFolder run;
        save(run.path(), 3);
        save(run.path(), 4);
        fs::rename(run.file("step_00000003"), run.file(".removing-step_00000003"));
        for (size_t i = 0; i < removed; ++i) fs::remove(run.file(".removing-step_00000003/" + files[i]));
        EXPECT_EQ(list_checkpoints(run.path()), under(run.path(), {"step_00000004"}));
        remove_unfinished(run.path());
        EXPECT_EQ(names_in(run.path()), Names{"step_00000004"}) << removed;
    }
}

TEST(Checkpoint, CleaningTouchesNothingElse) {
    const TempFolder run;
    const Elsewhere elsewhere;
    save(run.path(), 3);
    write_file(run.file("metrics.jsonl"), "x");
    write_file(run.file(".saving-notes"), "x");
    fs::create_directory_symlink(elsewhere.folder.path(), run.file(".saving-step_00000001"));
    fs::create_directory_symlink(elsewhere.folder.path(), run.file(".removing-step_00000002"));
    fs::create_directories(run.file(".saving-step_00000004/model.safetensors"));  // a folder under a file's name
    fs::create_directory(run.file(".removing-step_00000005"));
    fs::create_directory_symlink(elsewhere.folder.path(), run.file(".removing-step_00000005/optimizer-x.safetensors"));
    fs::create_symlink(elsewhere.folder.file("config.json"), run.file(".removing-step_00000005/config.json"));
    fs::create_directory(run.file(".removing-step_00000006"));
    for (const char* name : {"model.safetensors", "my notes", "trainer.json"}) write_file(run.file(std::string(".removing-step_00000006/") + name), "x");
    remove_unfinished(run.path());
    elsewhere.expect_untouched();
    EXPECT_EQ(names_in(run.path()), (Names{".removing-step_00000002", ".removing-step_00000005", ".removing-step_00000006", ".saving-notes", ".saving-step_00000001", ".saving-step_00000004",
                                           "metrics.jsonl", "step_00000003"}));
    EXPECT_EQ(names_in(run.file(".removing-step_00000005")).size(), 2u);
    EXPECT_EQ(names_in(run.file(".removing-step_00000006")), Names{"my notes"});
    // The next save under a name that something else has is refused, and says where.
    expect_error([&] { begin_checkpoint(run.path(), 1); }, {run.file(".saving-step_00000001"), "move it away"});
    expect_error([&] { begin_checkpoint(run.path(), 4); }, {run.file(".saving-step_00000004"), "move it away"});
    elsewhere.expect_untouched();
    remove_unfinished(run.file("none"));
    expect_error([&] { begin_checkpoint(run.file("none"), 1); }, {run.file("none/.saving-step_00000001"), "No such file", "can be written"});
}

TEST(Checkpoint, OnlyTheNewestAreKept) {
    const TempFolder run;
    for (const long long step : {4, 8, 12, 100000000}) save(run.path(), step);
    EXPECT_TRUE(remove_old_checkpoints(run.path(), 4).empty());
    EXPECT_TRUE(remove_old_checkpoints(run.path(), 1 << 30).empty());
    EXPECT_EQ(remove_old_checkpoints(run.path(), 2), under(run.path(), {"step_00000008", "step_00000004"}));
    EXPECT_EQ(names_in(run.path()), (Names{"step_00000012", "step_100000000"}));
    EXPECT_EQ(remove_old_checkpoints(run.path(), 1), under(run.path(), {"step_00000012"}));
    EXPECT_EQ(names_in(run.path()), Names{"step_100000000"});
    EXPECT_EQ(names_in(run.file("step_100000000")).size(), kFiles.size() + 1);
    EXPECT_TRUE(remove_old_checkpoints(run.file("none"), 1).empty());
}

TEST(Checkpoint, AFileThatIsNoneOfOursOutlivesItsCheckpoint) {
    const TempFolder run;
    const Elsewhere elsewhere;
    fs::create_directory_symlink(elsewhere.folder.path(), run.file("step_00000009"));
    fs::create_directory_symlink(elsewhere.folder.path(), run.file("step_00000001"));
    for (int time = 0; time < 3; ++time) {  // the same step is saved and removed again, by a run that began anew
        save(run.path(), 3);
        write_file(run.file("step_00000003/my notes"), "kept");
        fs::create_directory_symlink(elsewhere.folder.path(), run.file("step_00000003/model-link.safetensors"));
        save(run.path(), 4);
        EXPECT_EQ(remove_old_checkpoints(run.path(), 1), under(run.path(), {"step_00000003"}));
        EXPECT_EQ(remove_old_checkpoints(run.path(), 0), under(run.path(), {"step_00000004"}));
    }
    size_t kept = 0;
    for (const std::string& name : names_in(run.path())) {
        if (name.find(".removing-step_00000003") != 0) continue;
        EXPECT_EQ(names_in(run.file(name)), (Names{"model-link.safetensors", "my notes"}));
        EXPECT_EQ(read_file(run.file(name + "/my notes")), "kept");
        ++kept;
    }
    EXPECT_EQ(kept, 3u);
    EXPECT_TRUE(fs::is_symlink(run.file("step_00000009")) && fs::is_symlink(run.file("step_00000001")));
    elsewhere.expect_untouched();
}

TEST(Checkpoint, NewerOnesAreSetAside) {
    const TempFolder run;
    const Elsewhere elsewhere;
    for (const long long step : {4, 8, 12, 16}) save(run.path(), step);
    fs::create_directory_symlink(elsewhere.folder.path(), run.file("step_00000020"));
    write_file(run.file("step_00000021"), "a file");
    EXPECT_EQ(set_newer_checkpoints_aside(run.path(), 16), "");
    EXPECT_EQ(set_newer_checkpoints_aside(run.file("none"), 0), "");
    EXPECT_EQ(names_in(run.path()).size(), 6u);
    EXPECT_EQ(set_newer_checkpoints_aside(run.path(), 8), run.file("earlier.1"));
    EXPECT_EQ(names_in(run.path()), (Names{"earlier.1", "step_00000004", "step_00000008", "step_00000020", "step_00000021"}));
    EXPECT_EQ(list_checkpoints(run.file("earlier.1")), under(run.file("earlier.1"), {"step_00000016", "step_00000012"}));
    const CheckpointInfo info = read_checkpoint_info(run.file("earlier.1/step_00000012"));
    EXPECT_EQ(info.step, 12);
    EXPECT_NO_THROW(check_checkpoint_bytes(run.file("earlier.1/step_00000012"), info, 0, 1));
    save(run.path(), 12);
    write_file(run.file("earlier.2"), "a file");
    EXPECT_EQ(set_newer_checkpoints_aside(run.path(), -1), run.file("earlier.3"));
    EXPECT_EQ(names_in(run.file("earlier.3")), (Names{"step_00000004", "step_00000008", "step_00000012"}));
    EXPECT_TRUE(list_checkpoints(run.path()).empty());
    elsewhere.expect_untouched();
    EXPECT_EQ(remove_old_checkpoints(run.path(), 0).size(), 0u);  // what is aside stays
    EXPECT_EQ(names_in(run.file("earlier.3")).size(), 3u);
}

// ---- whole or not ----

// A file that is not what was written: whether its size tells, and whether it takes bytes to do it to.
struct Damage { const char* name; bool other_size, of_bytes; std::function<void(const std::string& path, const std::string& bytes)> make; };
const Damage kDamages[] = {
    {"cut off", true, true, [](const std::string& path, const std::string& bytes) { write_file(path, bytes.substr(0, bytes.size() - 1)); }},
    {"empty", true, true, [](const std::string& path, const std::string&) { write_file(path, ""); }},
    {"longer", true, false, [](const std::string& path, const std::string& bytes) { write_file(path, bytes + '\0'); }},
    {"missing", true, false, [](const std::string& path, const std::string&) { fs::remove(path); }},
    {"a folder", true, false, [](const std::string& path, const std::string&) { fs::remove(path), fs::create_directory(path); }},
    {"a pipe", true, false, [](const std::string& path, const std::string&) { fs::remove(path), mkfifo(path.c_str(), 0600); }},
    {"a link to nothing", true, false, [](const std::string& path, const std::string&) { fs::remove(path), fs::create_symlink("nowhere", path); }},
    {"its first bit", false, true, [](const std::string& path, std::string bytes) { bytes.front() ^= 1, write_file(path, bytes); }},
    {"its last bit", false, true, [](const std::string& path, std::string bytes) { bytes.back() = static_cast<char>(bytes.back() ^ 128), write_file(path, bytes); }},
};

TEST(CheckpointFiles, EveryDamageIsSeenByExactlyOneRank) {
    const TempFolder run;
    const CheckpointInfo info = save(run.path(), 1);
    const std::string folder = run.file("step_00000001");
    const auto check_bytes = [&](int ranks) {
        Names errors;
        for (int rank = 0; rank < ranks; ++rank) {
            try {
                check_checkpoint_bytes(folder, info, rank, ranks);
            } catch (const Error& error) {
                errors.push_back(error.what());
            }
        }
        return errors;
    };
    for (const auto& [name, bytes] : kFiles) {
        const std::string path = folder + "/" + name;
        for (const Damage& damage : kDamages) {
            if (bytes.empty() && damage.of_bytes) continue;
            damage.make(path, bytes);
            if (damage.other_size) expect_error([&] { check_checkpoint_sizes(folder, info); }, {path});
            else EXPECT_NO_THROW(check_checkpoint_sizes(folder, info)) << damage.name;
            for (int ranks = 1; ranks <= 7; ++ranks) {
                const Names errors = check_bytes(ranks);
                ASSERT_EQ(errors.size(), 1u) << damage.name << " of " << name << " over " << ranks;
                EXPECT_EQ(errors[0].find(path), 0u) << errors[0];
            }
            fs::remove(path);
            write_file(path, bytes);
        }
    }
    EXPECT_NO_THROW(check_checkpoint_sizes(folder, info));
    for (int ranks = 1; ranks <= 7; ++ranks) EXPECT_TRUE(check_bytes(ranks).empty());
    // Sizes are said before any byte is read.
    write_file(folder + "/model.safetensors", "short");
    expect_error([&] { check_checkpoint_sizes(folder, info); }, {"has 5 bytes, 1000 were written"});
    fs::remove(folder + "/model.safetensors");
    expect_error([&] { check_checkpoint_sizes(folder, info); }, {folder + "/model.safetensors: is missing", "not whole"});
}

TEST(CheckpointFiles, DiskThatIsNotThereIsSaid) {
    const TempFolder run;
    EXPECT_NO_THROW(check_free_disk(run.path(), 0));
    EXPECT_NO_THROW(check_free_disk(run.file("not/yet/there"), 1));
    for (const size_t bytes : {~size_t{0}, size_t{1} << 62})
        expect_error([&] { check_free_disk(run.file("not/yet/there"), bytes); }, {"a checkpoint takes", run.path(), "--keep", "--out"});
}

}  // namespace
