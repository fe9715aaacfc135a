#include "llmc/checkpoint.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>

#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/hash.h"
#include "llmc/plan_request.h"
#include "llmc/units.h"

using nlohmann::json;

namespace {

constexpr const char* kFormat = "llm.zero checkpoint";
constexpr int kVersion = 1;
constexpr size_t kMaxInfoBytes = 16'000'000;
constexpr const char *kSaving = ".saving-", *kRemoving = ".removing-", *kStep = "step_";

// The step of a folder's name, -1 where it is not one of ours.
long long step_of_name(const std::string& name) {
    const size_t digits = name.size() - std::min(name.size(), strlen(kStep));
    if (!name.starts_with(kStep) || digits < 8 || digits > 18 || name.find_first_not_of("0123456789", strlen(kStep)) != std::string::npos) return -1;
    const long long step = std::stoll(name.substr(strlen(kStep)));
    return name == checkpoint_name(step) ? step : -1;
}

// A file name of a checkpoint: nothing else is ever removed.
bool is_ours(const std::string& name) {
    return name == "trainer.json" || name == "config.json" || name == "product_choices.bin" || name == "model.safetensors.index.json" ||
           ((name.starts_with("model") || name.starts_with("optimizer-")) && name.ends_with(".safetensors"));
}

// Names in a folder; none where it cannot be read. Kind: DT_DIR or DT_REG, links are neither.
std::vector<std::string> entries(const std::string& folder, unsigned char kind) {
    std::vector<std::string> names;
    DIR* const directory = opendir(folder.c_str());
    if (!directory) return names;
    while (const dirent* entry = readdir(directory)) {
        struct stat info;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (fstatat(dirfd(directory), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
        if (kind == DT_DIR ? S_ISDIR(info.st_mode) : S_ISREG(info.st_mode)) names.push_back(entry->d_name);
    }
    closedir(directory);
    std::sort(names.begin(), names.end());
    return names;
}

// Removes our files and the folder, never through a link. A folder that holds something else stays, with that.
void remove_folder(const std::string& folder) {
    const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return;
    for (const std::string& name : entries(folder, DT_REG)) {
        if (is_ours(name)) unlinkat(fd, name.c_str(), 0);
    }
    close(fd);
    rmdir(folder.c_str());
}

void rename_folder(const std::string& from, const std::string& to) {
    CHECK(rename(from.c_str(), to.c_str()) == 0, "%s: cannot be renamed to %s: %s", from.c_str(), to.c_str(), strerror(errno));
}

// A prompt may hold anything; what is no UTF-8 becomes U+FFFD.
std::string json_text(const json& root, int indent) { return root.dump(indent, ' ', false, json::error_handler_t::replace); }

std::string checksum_of(const json& root) { return hash_of(json_text(root, -1)); }

// A value of trainer.json, of the type of the variable it is for.
class InfoReader {
public:
    InfoReader(const std::string& path, const json& root) : path_(path), root_(root) {}

    void read(const char* name, std::string* value) const { *value = get(name, root_, &json::is_string, "a text").get<std::string>(); }
    template <class Integer>
    void read(const char* name, Integer* value) const {
        const int64_t read = whole(name, root_);
        CHECK(static_cast<uint64_t>(read) <= static_cast<uint64_t>(std::numeric_limits<Integer>::max()), "%s: `%s` is larger than any run", path_.c_str(), name);
        *value = static_cast<Integer>(read);
    }
    void read(const char* name, std::map<std::string, std::string>* values) const {
        for (const auto& item : get(name, root_, &json::is_object, "an object").items()) {
            if (!item.value().is_string()) fail("%s: `%s` holds something other than texts", path_.c_str(), name);
            (*values)[item.key()] = item.value().get<std::string>();
        }
    }
    void read(const char* name, std::map<std::string, FileSummary>* files) const {
        for (const auto& item : get(name, root_, &json::is_object, "an object").items()) {
            const std::string& file = item.key();
            if (!is_ours(file) || file == "trainer.json" || file.find('/') != std::string::npos) fail("%s: `%s` names a file that no checkpoint holds", path_.c_str(), name);
            if (!item.value().is_object()) fail("%s: `%s` holds something other than bytes and xxh3", path_.c_str(), name);
            (*files)[file] = {static_cast<size_t>(whole("bytes", item.value())), get("xxh3", item.value(), &json::is_string, "a text").get<std::string>()};
        }
    }

private:
    const json& get(const char* name, const json& from, bool (json::*is)() const noexcept, const char* what) const {
        const auto found = from.find(name);
        CHECK(found != from.end(), "%s: `%s` is missing", path_.c_str(), name);
        CHECK(((*found).*is)(), "%s: `%s` is not %s", path_.c_str(), name, what);
        return *found;
    }
    int64_t whole(const char* name, const json& from) const {
        const json& value = get(name, from, &json::is_number_unsigned, "a whole number");
        CHECK(value.get<uint64_t>() <= 1'000'000'000'000'000'000, "%s: `%s` is larger than any run", path_.c_str(), name);
        return static_cast<int64_t>(value.get<uint64_t>());
    }

    const std::string& path_;
    const json& root_;
};

// The fields of trainer.json, for writing and reading alike.
template <class Info, class Visit>
void visit_fields(Info& info, Visit&& visit) {
    visit("step", &info.step);
    visit("steps", &info.steps);
    visit("tokens", &info.tokens);
    visit("windows_consumed", &info.windows_consumed);
    visit("data_fingerprint", &info.data_fingerprint);
    visit("precision", &info.precision);
    visit("applied_steps", &info.applied_steps);
    visit("skipped_total", &info.skipped_total);
    visit("skipped_in_row", &info.skipped_in_row);
    visit("ranks", &info.ranks);
    visit("zero_stage", &info.stage);
    visit("options", &info.options);
    visit("files", &info.files);
}

void to_json(json& out, const FileSummary& file) { out = json{{"bytes", file.bytes}, {"xxh3", file.xxh3}}; }

std::string read_text(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT) fail("%s is missing: the folder is no checkpoint, or an incomplete one", path.c_str());
    CHECK(fd >= 0, "%s: cannot be opened: %s", path.c_str(), strerror(errno));
    std::string text;
    char buffer[65536];
    ssize_t got = 0;
    while ((got = read(fd, buffer, sizeof buffer)) != 0) {
        if (got < 0 && errno == EINTR) continue;
        const int reason = errno;
        if (got > 0) text.append(buffer, static_cast<size_t>(got));
        if (got > 0 && text.size() <= kMaxInfoBytes) continue;
        close(fd);
        if (got < 0) fail("%s: cannot be read: %s", path.c_str(), strerror(reason));
        fail("%s: has more than %zu bytes, which no trainer.json has", path.c_str(), kMaxInfoBytes);
    }
    close(fd);
    return text;
}

}  // namespace

std::string checkpoint_name(long long step) { return format("%s%08lld", kStep, step); }

std::string checkpoint_json(const CheckpointInfo& info) {
    json root = {{"format", kFormat}, {"version", kVersion}};
    visit_fields(info, [&](const char* name, const auto* value) {
        if constexpr (std::is_same_v<decltype(value), const std::map<std::string, FileSummary>*>) {
            root[name] = json::object();
            for (const auto& [file, summary] : *value) to_json(root[name][file], summary);
        } else {
            root[name] = *value;
        }
    });
    root["checksum"] = checksum_of(root);
    return json_text(root, 1) + "\n";
}

CheckpointInfo read_checkpoint_info(const std::string& folder) {
    const std::string path = folder + "/trainer.json";
    // Deeper than a file's summary nests nothing: what nests on and on would run out of stack when its checksum is made.
    const json::parser_callback_t shallow = [&](int depth, json::parse_event_t event, json&) {
        if (depth >= 3 && (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start)) fail("%s: nests deeper than a trainer.json does", path.c_str());
        return true;
    };
    json root = json::parse(read_text(path), shallow, /*allow_exceptions=*/false);
    CHECK(root.is_object(), "%s is no JSON object: it was cut off or changed", path.c_str());
    std::string format_name;
    int version = 0;
    const InfoReader reader(path, root);
    reader.read("format", &format_name);
    CHECK(format_name == kFormat, "%s: its format is not `%s`: it is something else's", path.c_str(), kFormat);
    reader.read("version", &version);
    CHECK(version >= 1, "%s: there is no version %d", path.c_str(), version);
    CHECK(version <= kVersion, "%s: version %d is newer than the %d this program reads; use the program that wrote it, or a newer one", path.c_str(), version, kVersion);
    std::string checksum;
    reader.read("checksum", &checksum);
    root.erase("checksum");
    CHECK(checksum == checksum_of(root), "%s: its checksum does not match: it was changed after it was written", path.c_str());
    CheckpointInfo info;
    visit_fields(info, [&](const char* name, auto* value) { reader.read(name, value); });
    return info;
}

void check_checkpoint_sizes(const std::string& folder, const CheckpointInfo& info) {
    for (const auto& [name, summary] : info.files) {
        const std::string path = folder + "/" + name;
        struct stat file;
        CHECK(stat(path.c_str(), &file) == 0, "%s: %s; the checkpoint is not whole", path.c_str(), errno == ENOENT ? "is missing" : strerror(errno));
        CHECK(S_ISREG(file.st_mode), "%s: is not a regular file; the checkpoint is not whole", path.c_str());
        CHECK(static_cast<size_t>(file.st_size) == summary.bytes, "%s: has %lld bytes, %zu were written; it was cut off or changed", path.c_str(), static_cast<long long>(file.st_size),
              summary.bytes);
    }
}

void check_checkpoint_bytes(const std::string& folder, const CheckpointInfo& info, int rank, int ranks) {
    int i = 0;
    for (const auto& [name, written] : info.files) {
        if (i++ % ranks != rank) continue;
        const std::string path = folder + "/" + name;
        const FileSummary found = summarize_file(path);
        CHECK(found.bytes == written.bytes, "%s: has %zu bytes, %zu were written; it was cut off or changed", path.c_str(), found.bytes, written.bytes);
        CHECK(found.xxh3 == written.xxh3, "%s: its bytes are not those that were written (XXH3 %s, %s then)", path.c_str(), found.xxh3.c_str(), written.xxh3.c_str());
    }
}

std::vector<std::string> list_checkpoints(const std::string& run_folder) {
    std::vector<std::pair<long long, std::string>> found;
    for (const std::string& name : entries(run_folder, DT_DIR)) {
        if (step_of_name(name) >= 0) found.push_back({step_of_name(name), run_folder + "/" + name});
    }
    std::sort(found.rbegin(), found.rend());
    std::vector<std::string> folders;
    for (auto& [step, folder] : found) folders.push_back(std::move(folder));
    return folders;
}

std::string unfinished_name(long long step) { return kSaving + checkpoint_name(step); }

void begin_checkpoint(const std::string& run_folder, long long step) {
    remove_unfinished(run_folder);
    const std::string folder = run_folder + "/" + unfinished_name(step);
    CHECK(mkdir(folder.c_str(), 0755) == 0, "%s: the folder of a checkpoint cannot be made: %s; %s", folder.c_str(), strerror(errno),
          errno == EEXIST ? "what is there is no part of a checkpoint: move it away" : ("see whether " + run_folder + " can be written").c_str());
}

std::string complete_checkpoint(const std::string& run_folder, const CheckpointInfo& info) {
    const std::string saving = run_folder + "/" + unfinished_name(info.step), folder = run_folder + "/" + checkpoint_name(info.step);
    write_durable_file(saving + "/trainer.json", checkpoint_json(info));
    sync_folder(saving);
    rename_folder(saving, folder);
    sync_folder(run_folder);
    return folder;
}

void remove_unfinished(const std::string& run_folder) {
    for (const std::string& name : entries(run_folder, DT_DIR)) {
        if (name.starts_with(kSaving) || name.starts_with(kRemoving)) remove_folder(run_folder + "/" + name);
    }
}

std::vector<std::string> remove_old_checkpoints(const std::string& run_folder, int keep) {
    std::vector<std::string> folders = list_checkpoints(run_folder);
    folders.erase(folders.begin(), folders.begin() + std::min<size_t>(folders.size(), keep));
    for (const std::string& folder : folders) {
        std::string removing = run_folder + "/" + kRemoving + folder.substr(run_folder.size() + 1);
        struct stat info;
        while (lstat(removing.c_str(), &info) == 0) removing += "~";  // where a file that is none of ours kept an earlier one of this step
        rename_folder(folder, removing);
        remove_folder(removing);
    }
    return folders;
}

std::string set_newer_checkpoints_aside(const std::string& run_folder, long long step) {
    std::string aside;
    for (const std::string& folder : list_checkpoints(run_folder)) {
        const std::string name = folder.substr(run_folder.size() + 1);
        if (step_of_name(name) <= step) continue;
        for (int n = 1; aside.empty(); ++n) {
            const std::string candidate = run_folder + "/earlier." + std::to_string(n);
            if (mkdir(candidate.c_str(), 0755) == 0) aside = candidate;
            else CHECK(errno == EEXIST, "%s: cannot be made: %s", candidate.c_str(), strerror(errno));
        }
        rename_folder(folder, aside + "/" + name);
    }
    if (!aside.empty()) {
        sync_folder(aside);
        sync_folder(run_folder);
    }
    return aside;
}

void check_free_disk(const std::string& folder, size_t bytes) {
    const FreeDisk disk = free_disk(folder);
    CHECK(disk.bytes >= bytes, "a checkpoint takes %s and only %s are free in %s; free some space, keep fewer (--keep), or give an --out on a larger disk", format_bytes(bytes).c_str(),
          format_bytes(disk.bytes).c_str(), disk.folder.c_str());
}
