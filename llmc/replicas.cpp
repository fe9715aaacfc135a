#include "llmc/replicas.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "llmc/durable_file.h"
#include "llmc/error.h"

namespace {

// Texts of all ranks, equal or refused: `describe(own, other)` says how this rank's differs from rank 0's.
template <class Describe>
void check_equal(const Process& process, const std::string& own, Describe&& describe) {
    const std::vector<std::string> texts = gather_texts(process, own);
    run_on_all_ranks(process, [&] {
        if (own != texts[0]) throw Error(describe(own, texts[0]));
    });
}

// From name=value texts that end with a zero byte each: a prompt may hold line ends.
std::map<std::string, std::string> option_values(const std::string& lines) {
    std::map<std::string, std::string> values;
    for (size_t begin = 0; begin < lines.size();) {
        const size_t end = lines.find('\0', begin), equals = lines.find('=', begin);
        values[lines.substr(begin, equals - begin)] = lines.substr(equals + 1, end - equals - 1);
        begin = end + 1;
    }
    return values;
}

std::string describe_options(const std::string& own, const std::string& other) {
    std::map<std::string, std::string> mine = option_values(own), theirs = option_values(other);
    std::string differences;
    for (const auto& [name, value] : mine) theirs.try_emplace(name, "not given");
    for (const auto& [name, value] : theirs) {
        const auto found = mine.find(name);
        const std::string here = found == mine.end() ? "not given" : found->second;
        if (here != value) differences += format("%s--%s is %s here and %s on rank 0", differences.empty() ? "" : ", ", name.c_str(), here.c_str(), value.c_str());
    }
    return differences + "; start every rank with the same options";
}

std::string bucket_name(size_t b, const ParamTable& table, const FlatLayout& layout) {
    const Bucket& bucket = layout.buckets[b];
    const std::string first = table.units[bucket.first_unit].name, last = table.units[bucket.end_unit - 1].name;
    return format("bucket %zu (%s)", b, first == last ? first.c_str() : (first + " to " + last).c_str());
}

}  // namespace

std::string file_hash(const std::string& path) { return summarize_file(path).xxh3; }

std::string program_hash() { return file_hash("/proc/self/exe"); }

void check_started_alike(const Process& process, const Options& options) {
    check_equal(process, program_hash(), [](const std::string& own, const std::string& other) {
        return format("this rank runs another build of the program (hash %s) than rank 0 (%s); copy one build to all hosts", own.c_str(), other.c_str());
    });
    check_equal(process, options.help ? "help" : "", [](const std::string& own, const std::string&) {
        return format("--help was given on %s; start every rank with the same options", own.empty() ? "rank 0 and not here" : "this rank and not on rank 0");
    });
    std::string lines;
    for (const OptionRow& row : option_rows(options)) lines += row.name + "=" + row.value + '\0';
    check_equal(process, lines, describe_options);
}

void check_same_files(const Process& process, const std::string& what, const std::string& fingerprint) {
    check_equal(process, fingerprint, [&](const std::string& own, const std::string& other) {
        return format("this rank sees other %s (fingerprint %s) than rank 0 (%s); every rank must see the same files", what.c_str(), own.c_str(), other.c_str());
    });
}

std::string replica_difference(const std::vector<unsigned long long>& checksums, const ParamTable& table, const FlatLayout& layout) {
    static const char* const kArrays[] = {"weights", "fp32 master weights", "first moments", "second moments"};
    const size_t ranks = layout.num_ranks, buckets = layout.buckets.size(), own = checksums.size() / ranks;
    CHECK(checksums.size() == ranks * own && own % buckets == 0 && own / buckets <= std::size(kArrays), "%zu checksums of %zu ranks and %zu buckets", checksums.size(), ranks, buckets);
    for (size_t i = 0; i < own; ++i) {
        std::map<unsigned long long, size_t> count;
        for (size_t rank = 0; rank < ranks; ++rank) ++count[checksums[rank * own + i]];
        if (count.size() == 1) continue;
        const auto common = std::max_element(count.begin(), count.end(), [](const auto& x, const auto& y) { return x.second < y.second; });
        const std::string what = format("%s in %s", kArrays[i / buckets], bucket_name(i % buckets, table, layout).c_str());
        if (2 * common->second <= ranks) {
            return format("the ranks do not hold the same %s, and no majority says which is right", what.c_str());
        }
        std::string odd;
        for (size_t rank = 0; rank < ranks; ++rank) {
            if (checksums[rank * own + i] != common->first) odd += format("%s%zu", odd.empty() ? "" : ", ", rank);
        }
        return format("rank %s does not hold the same %s as the others", odd.c_str(), what.c_str());
    }
    return "";
}
