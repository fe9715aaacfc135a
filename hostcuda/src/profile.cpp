// HOSTCUDA_PROFILE: time by name, printed at exit.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "runtime.h"

namespace hostcuda {
namespace {
struct Entry {
    long long calls = 0;
    double seconds = 0;
};
struct Profile {
    std::mutex mutex;
    std::unordered_map<std::string, Entry> entries;
};
Profile& profile() {
    static Profile& instance = *new Profile;   // never destroyed: stream workers may outlive static objects
    return instance;
}
}  // namespace

void profile_add(const char* name, double seconds) {
    if (!profile_mode()) return;
    TsanIgnore ignore;
    prepare_exit();
    std::lock_guard lock(profile().mutex);
    Entry& entry = profile().entries[name];
    entry.calls++;
    entry.seconds += seconds;
}

void print_profile() {
    if (!profile_mode()) return;
    std::lock_guard lock(profile().mutex);
    std::vector<std::pair<std::string, Entry>> rows(profile().entries.begin(), profile().entries.end());
    if (rows.empty()) return;
    std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) {
        return a.second.seconds != b.second.seconds ? a.second.seconds > b.second.seconds : a.first < b.first;
    });
    double total = 0;
    for (const auto& row : rows) total += row.second.seconds;
    std::string text = "hostcuda profile";
    if (const char* rank = getenv("OMPI_COMM_WORLD_RANK")) text += std::string(", rank ") + rank;
    text += "\n     calls     total ms      mean us    share  name\n";
    for (const auto& [name, entry] : rows) {
        char line[128];
        snprintf(line, sizeof line, "%10lld %12.3f %12.3f %7.1f%%  ", entry.calls, entry.seconds * 1e3,
                 entry.seconds * 1e6 / static_cast<double>(entry.calls), total > 0 ? entry.seconds / total * 100 : 0);
        text += line + name + "\n";
    }
    fputs(text.c_str(), stderr);   // one write, so that the tables of several ranks do not mix
}
}  // namespace hostcuda
