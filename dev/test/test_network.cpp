#include "llmc/network.h"

#include <algorithm>
#include <bit>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "dev/test/host_test.h"

namespace {

using enum CollectiveAlgorithm;
constexpr CollectiveAlgorithm kAll[] = {kRing, kTree, kHierarchical, kParameterServer};

// ---- --link ----

struct Expected {
    const char* name;
    double bytes_per_s, latency_s;
};

void expect_links(const std::string& text, const std::vector<Expected>& expected) {
    SCOPED_TRACE(text);
    const std::vector<Link> links = parse_links(text);
    ASSERT_EQ(links.size(), expected.size());
    for (size_t i = 0; i < links.size(); ++i) {
        EXPECT_EQ(links[i].name, expected[i].name);
        EXPECT_DOUBLE_EQ(links[i].bytes_per_s, expected[i].bytes_per_s);
        EXPECT_DOUBLE_EQ(links[i].latency_s, expected[i].latency_s);
    }
}

TEST(Links, AreReadInTheirOrder) {
    expect_links("nvlink=450,pcie=25,ib=50", {{"nvlink", 450e9, 0}, {"pcie", 25e9, 0}, {"ib", 50e9, 0}});
    expect_links("nvlink=600,ib=50:5", {{"nvlink", 600e9, 0}, {"ib", 50e9, 5e-6}});
    expect_links("x=0.125:0.5", {{"x", 0.125e9, 0.5e-6}});
    expect_links("10G-Ethernet=1.25:30,a.b=1e-3:0", {{"10G-Ethernet", 1.25e9, 30e-6}, {"a.b", 1e6, 0}});
    expect_links("fast=1e6,slow=1e-6:1e6", {{"fast", 1e15, 0}, {"slow", 1e3, 1}});  // the ends of the ranges
}

TEST(Links, WhatIsWrongIsNamedWithTheFix) {
    const auto expect_refused = [](const std::string& text, std::vector<std::string> words) {
        SCOPED_TRACE(text);
        words.push_back("--link is `" + text + "`");
        expect_error<UsageError>([&] { parse_links(text); }, words);
    };
    const std::string form = "must be name=GB/s[:latency in microseconds], with commas between, such as nvlink=450,ib=50:5";
    expect_refused("", {form});
    expect_refused("fast", {"--link is `fast`; it " + form});
    expect_refused("450", {form});
    expect_refused("a=1,fast", {"`fast` in it " + form});
    expect_refused("=450", {"`=450` in it has no name", form});
    expect_refused("a=1,=450:5", {"`=450:5` in it has no name", form});
    for (const char* text : {",", "a=1,", ",a=1", "a=1,,b=2"}) expect_refused(text, {"comma too many", form});
    expect_refused("a=1, b=2", {"` b=2` in it has a space", "write it without"});
    expect_refused("ib=5 0", {"`ib=5 0` in it has a space"});
    for (const char* speed : {"", "0", "-1", "1000001", "1e7", "1e999", "1e-7", "inf", "-inf", "nan", "50GB", "0x10", "x", "50=5", "1.2.3"}) {
        expect_refused("a=1,ib=" + std::string(speed), {"the speed of ib is `" + std::string(speed) + "`", "GB/s", "between 1e-06 and 1000000", "such as ib=50"});
    }
    expect_refused("ib=:5", {"the speed of ib is ``"});
    for (const char* latency : {"", "-1", "-0.001", "1000001", "inf", "nan", "5us", "5:5", "x"}) {
        expect_refused("ib=50:" + std::string(latency), {"the latency of ib is `" + std::string(latency) + "`", "microseconds", "between 0 and 1000000", "such as ib=50:5"});
    }
    expect_refused("a=1,b=2,a=3", {"a is in it twice", "name of its own"});
    expect_refused("a=1,a=1", {"a is in it twice"});
}

// ---- counted by hand ----

// Inside a node 100 GB/s and 2 us, between nodes 10 GB/s and 5 us: 1 MB takes 10 us and 100 us.
const Network kNetwork = {{"inside", 100e9, 2e-6}, {"between", 10e9, 5e-6}, 8};
constexpr double kMegabyte = 1e6;

void expect_microseconds(CollectiveAlgorithm algorithm, int ranks, double microseconds, const Network& network = kNetwork) {
    EXPECT_NEAR(collective_seconds(algorithm, network, ranks, kMegabyte) * 1e6, microseconds, 1e-9 * microseconds) << algorithm_name(algorithm) << ", " << ranks << " ranks";
}

TEST(Collectives, OneNode) {
    expect_microseconds(kRing, 8, 84);               // 7 (2 + 10)
    expect_microseconds(kTree, 8, 76);               // 3 x 2 + 7 x 10
    expect_microseconds(kTree, 6, 56);               // 3 x 2 + 5 x 10: 6 ranks take as many rounds as 8
    expect_microseconds(kTree, 5, 46);               // 3 x 2 + 4 x 10
    expect_microseconds(kTree, 4, 34);               // 2 x 2 + 3 x 10
    expect_microseconds(kHierarchical, 8, 84);       // the ring
    expect_microseconds(kHierarchical, 3, 24);       // 2 (2 + 10)
    expect_microseconds(kParameterServer, 8, 642);   // 2 + 8 x 8 x 10
    expect_microseconds(kParameterServer, 3, 92);    // 2 + 3 x 3 x 10
}

TEST(Collectives, SeveralNodes) {
    expect_microseconds(kRing, 32, 3255);            // 31 (5 + 100)
    expect_microseconds(kTree, 32, 3125);            // 5 x 5 + 31 x 100
    expect_microseconds(kTree, 33, 3230);            // 6 x 5 + 32 x 100
    expect_microseconds(kHierarchical, 32, 609);     // 7 (2 + 4 x 10) + 3 (5 + 100)
    expect_microseconds(kHierarchical, 16, 259);     // 7 (2 + 2 x 10) + 1 (5 + 100)
    expect_microseconds(kHierarchical, 9, 259);      // a second node with one rank: as with two full ones
    expect_microseconds(kParameterServer, 32, 102405);  // 5 + 32 x 32 x 100
    expect_microseconds(kRing, 9, 840);              // 8 (5 + 100): the slow link as soon as there are two nodes
    // One rank a node: the ring between nodes.
    const Network one_a_node = {kNetwork.inside, kNetwork.between, 1};
    expect_microseconds(kHierarchical, 4, 315, one_a_node);  // 3 (5 + 100)
    expect_microseconds(kRing, 4, 315, one_a_node);
    expect_microseconds(kRing, 2, 105, one_a_node);
}

TEST(Collectives, OneRankTakesNoTimeButWithAServer) {
    for (const CollectiveAlgorithm algorithm : {kRing, kTree, kHierarchical}) EXPECT_EQ(collective_seconds(algorithm, kNetwork, 1, kMegabyte), 0);
    expect_microseconds(kParameterServer, 1, 12);  // 2 + 10
}

TEST(Collectives, AMillionRanks) {
    expect_microseconds(kRing, 1 << 20, 110100375);          // 1048575 x 105
    expect_microseconds(kTree, 1 << 20, 104857600);          // 20 x 5 + 104857500
    // 7 (2 + 131072 x 10) + 131071 x 105 = 9175054 + 13762455
    expect_microseconds(kHierarchical, 1 << 20, 22937509);
    expect_microseconds(kParameterServer, 1 << 20, 109951162777605);  // 5 + 2^40 x 100
}

TEST(Collectives, Refuse) {
    for (const CollectiveAlgorithm algorithm : kAll) {
        for (const int ranks : {0, -1}) {
            expect_error([&] { collective_seconds(algorithm, kNetwork, ranks, 1); }, {"a collective of " + std::to_string(ranks) + " ranks", "at least 1"});
        }
        expect_error([&] { collective_seconds(algorithm, {{}, {}, 0}, 2, 1); }, {"nodes of 0 ranks", "at least 1"});
    }
}

TEST(Collectives, Names) {
    std::string names;
    for (const CollectiveAlgorithm algorithm : kAll) names += std::string(algorithm_name(algorithm)) + "; ";
    EXPECT_EQ(names, "ring; tree; hierarchical; parameter server; ");
}

// ---- against the algorithms themselves: an all-gather played out a message at a time ----

// Who has which slices, and the time. In a round every rank sends at most one message; the slowest says how long it takes.
struct Ranks {
    explicit Ranks(int count) : slices(count) {
        for (int rank = 0; rank < count; ++rank) slices[rank].insert(rank);
    }

    // The group's ranks pass on what they got last (at first what they have), round the ring, until all have all of the group's.
    double ring(const std::vector<int>& group, const Link& link) {
        std::vector<std::set<int>> got;
        for (const int rank : group) got.push_back(slices[rank]);
        double seconds = 0;
        for (size_t round = 1; round < group.size(); ++round) {
            std::vector<std::set<int>> next(group.size());
            size_t largest = 0;
            for (size_t i = 0; i < group.size(); ++i) {
                next[(i + 1) % group.size()] = got[i];
                largest = std::max(largest, got[i].size());
            }
            for (size_t i = 0; i < group.size(); ++i) slices[group[i]].insert(next[i].begin(), next[i].end());
            got = next;
            seconds += link.latency_s + largest * kMegabyte / link.bytes_per_s;
        }
        return seconds;
    }

    // Recursive doubling: rank r swaps all it has with rank r xor 1, 2, 4, ...; for a power of two.
    double doubling(const Link& link) {
        double seconds = 0;
        for (size_t distance = 1; distance < slices.size(); distance *= 2) {
            std::vector<std::set<int>> next = slices;
            for (size_t rank = 0; rank < slices.size(); ++rank) next[rank ^ distance].insert(slices[rank].begin(), slices[rank].end());
            seconds += link.latency_s + slices[0].size() * kMegabyte / link.bytes_per_s;
            slices = next;
        }
        return seconds;
    }

    bool have_all() const {
        for (const std::set<int>& own : slices) {
            if (own.size() != slices.size()) return false;
        }
        return true;
    }

    std::vector<std::set<int>> slices;  // of each rank
};

std::vector<int> every(int first, int step, int end) {
    std::vector<int> ranks;
    for (int rank = first; rank < end; rank += step) ranks.push_back(rank);
    return ranks;
}

TEST(Collectives, AreWhatTheMessagesTake) {
    const auto expect_same = [](CollectiveAlgorithm algorithm, const Network& network, int ranks, double seconds, const Ranks& after) {
        EXPECT_TRUE(after.have_all());
        EXPECT_NEAR(collective_seconds(algorithm, network, ranks, kMegabyte), seconds, 1e-12 * seconds) << algorithm_name(algorithm) << ", " << ranks << " ranks";
    };
    for (const int ranks_per_node : {1, 3, 4, 8}) {
        const Network network = {kNetwork.inside, kNetwork.between, ranks_per_node};
        for (int count = 1; count <= 24; ++count) {
            SCOPED_TRACE(testing::Message() << ranks_per_node << " ranks a node");
            const Link& link = count > ranks_per_node ? network.between : network.inside;
            Ranks ring(count);
            const double ring_seconds = ring.ring(every(0, 1, count), link);
            expect_same(kRing, network, count, ring_seconds, ring);
            if (std::has_single_bit(static_cast<unsigned>(count))) {
                Ranks tree(count);
                const double tree_seconds = tree.doubling(link);
                expect_same(kTree, network, count, tree_seconds, tree);
            }
            if (count % ranks_per_node != 0) continue;
            // Over the nodes the ranks of one place in them, all places at once; then each node, with all of its ranks' slices of the other nodes.
            Ranks both(count);
            double seconds = 0;
            for (int place = 0; place < ranks_per_node; ++place) seconds = both.ring(every(place, ranks_per_node, count), network.between);
            double in_node = 0;
            for (int first = 0; first < count; first += ranks_per_node) in_node = both.ring(every(first, 1, first + ranks_per_node), network.inside);
            expect_same(kHierarchical, network, count, seconds + in_node, both);
        }
    }
}

TEST(Collectives, FasterLinksTakeNoLongerAndMoreRanksNoLess) {
    for (const CollectiveAlgorithm algorithm : kAll) {
        for (const int ranks : {1, 2, 7, 8, 9, 64, 1000}) {
            const double seconds = collective_seconds(algorithm, kNetwork, ranks, kMegabyte);
            Network faster = kNetwork, sooner = kNetwork;
            faster.inside.bytes_per_s *= 2;
            faster.between.bytes_per_s *= 2;
            sooner.inside.latency_s /= 2;
            sooner.between.latency_s /= 2;
            for (const Network& better : {faster, sooner}) EXPECT_LE(collective_seconds(algorithm, better, ranks, kMegabyte), seconds);
            EXPECT_GE(collective_seconds(algorithm, kNetwork, ranks + 1, kMegabyte), seconds);
            EXPECT_LE(collective_seconds(kHierarchical, kNetwork, ranks, kMegabyte), collective_seconds(kRing, kNetwork, ranks, kMegabyte) * (1 + 1e-12));
        }
    }
}

}  // namespace
