#include "llmc/network.h"

#include <algorithm>
#include <bit>
#include <charconv>

#include "llmc/error.h"

namespace {

constexpr double kLeastSpeed = 1e-6, kMostSpeed = 1e6;  // GB/s
constexpr double kMostLatency = 1e6;                    // microseconds
constexpr char kForm[] = "name=GB/s[:latency in microseconds], with commas between, such as nvlink=450,ib=50:5";

// Nothing but a number in decimal digits that lies in [least, most].
bool read_number(const std::string& text, double least, double most, double* number) {
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, *number);
    return error == std::errc() && rest == end && *number >= least && *number <= most;
}

// One entry of `text`.
Link parse_link(const std::string& entry, const std::string& text) {
    const auto refuse = [&](const std::string& what) { throw UsageError(format("--link is `%s`; %s", text.c_str(), what.c_str())); };
    if (text.empty()) refuse(format("it must be %s", kForm));
    if (entry.empty()) refuse(format("there is a comma too many; it must be %s", kForm));
    const size_t equals = entry.find('=');
    if (equals == std::string::npos) refuse(entry == text ? format("it must be %s", kForm) : format("`%s` in it must be %s", entry.c_str(), kForm));
    if (equals == 0) refuse(format("`%s` in it has no name; it must be %s", entry.c_str(), kForm));
    if (entry.find_first_of(" \t\n\r") != std::string::npos) refuse(format("`%s` in it has a space; write it without", entry.c_str()));

    Link link;
    link.name = entry.substr(0, equals);
    const size_t colon = entry.find(':', equals);
    const std::string speed = entry.substr(equals + 1, colon == std::string::npos ? colon : colon - equals - 1);
    double number = 0;
    if (!read_number(speed, kLeastSpeed, kMostSpeed, &number)) {
        refuse(format("the speed of %s is `%s`; it must be a number of GB/s (10^9 bytes in one direction) between %.15g and %.15g, such as %s=50", link.name.c_str(), speed.c_str(),
                      kLeastSpeed, kMostSpeed, link.name.c_str()));
    }
    link.bytes_per_s = number * 1e9;
    if (colon == std::string::npos) return link;
    const std::string latency = entry.substr(colon + 1);
    if (!read_number(latency, 0, kMostLatency, &number)) {
        refuse(format("the latency of %s is `%s`; it must be a number of microseconds between 0 and %.15g, such as %s=%s:5, or be left out with its colon", link.name.c_str(),
                      latency.c_str(), kMostLatency, link.name.c_str(), speed.c_str()));
    }
    link.latency_s = number / 1e6;
    return link;
}

}  // namespace

std::vector<Link> parse_links(const std::string& text) {
    std::vector<Link> links;
    for (size_t begin = 0; begin <= text.size();) {
        const size_t end = std::min(text.find(',', begin), text.size());
        const Link link = parse_link(text.substr(begin, end - begin), text);
        for (const Link& other : links) {
            if (other.name == link.name) throw UsageError(format("--link is `%s`; %s is in it twice; give every link a name of its own", text.c_str(), link.name.c_str()));
        }
        links.push_back(link);
        begin = end + 1;
    }
    return links;
}

const char* algorithm_name(CollectiveAlgorithm algorithm) {
    switch (algorithm) {
        case CollectiveAlgorithm::kRing: return "ring";
        case CollectiveAlgorithm::kTree: return "tree";
        case CollectiveAlgorithm::kHierarchical: return "hierarchical";
        case CollectiveAlgorithm::kParameterServer: return "parameter server";
    }
    fail("there is no collective algorithm %d", static_cast<int>(algorithm));
}

double collective_seconds(CollectiveAlgorithm algorithm, const Network& network, int ranks, double slice_bytes) {
    CHECK(ranks >= 1, "a collective of %d ranks; there must be at least 1", ranks);
    CHECK(network.ranks_per_node >= 1, "nodes of %d ranks; there must be at least 1 in each", network.ranks_per_node);
    const int nodes = (ranks - 1) / network.ranks_per_node + 1;
    const Link& link = nodes == 1 ? network.inside : network.between;
    // In doubles: a million ranks squared is more than an int holds.
    const double N = ranks, alpha = link.latency_s, slice_seconds = slice_bytes / link.bytes_per_s;
    switch (algorithm) {
        case CollectiveAlgorithm::kRing: return (N - 1) * (alpha + slice_seconds);
        case CollectiveAlgorithm::kTree: return std::bit_width(static_cast<unsigned>(ranks - 1)) * alpha + (N - 1) * slice_seconds;
        case CollectiveAlgorithm::kHierarchical: {
            const double g = std::min(ranks, network.ranks_per_node), n = nodes;
            const Link &inside = network.inside, &between = network.between;
            const double in_nodes = (g - 1) * (inside.latency_s + n * slice_bytes / inside.bytes_per_s);
            return nodes == 1 ? in_nodes : in_nodes + (n - 1) * (between.latency_s + slice_bytes / between.bytes_per_s);
        }
        case CollectiveAlgorithm::kParameterServer: return alpha + N * N * slice_seconds;
    }
    fail("there is no collective algorithm %d", static_cast<int>(algorithm));
}
