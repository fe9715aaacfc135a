// How long a collective takes on a network: links, and the cost formulas of the algorithms that are compared.
//
// alpha is a link's latency (seconds a message), beta its speed (bytes a second, in one direction, of one rank's link). N ranks, each with a slice of s bytes:
// a reduce-scatter leaves the sum of slice r on rank r, an all-gather brings every slice everywhere; both cost the same. An all-reduce is one after the other.
//
//   ring              (N-1) (alpha + s/beta)                    every rank passes on one slice a round, N-1 rounds
//   tree              ceil(log2 N) alpha + (N-1) s/beta         halving and doubling: the same bytes in fewer messages
//   hierarchical      (g-1) (alpha1 + n s/beta1) + (n-1) (alpha2 + s/beta2)
//                                                               g ranks a node over the fast link, then n = ceil(N/g) nodes, each rank with its own part
//   parameter server  alpha + N s N/beta                        one server's link carries every rank's whole buffer (N s bytes); for comparison
//
// Ring and tree (recursive halving/doubling): Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005.
// Ring, tree and parameter server run at the speed of the link between nodes as soon as there are several.
#pragma once

#include <string>
#include <vector>

struct Link {
    std::string name;
    double bytes_per_s = 0;  // in one direction
    double latency_s = 0;
};

// "nvlink=600,ib=50:5": name=GB/s (10^9 bytes), then after a colon, if wanted, the latency in microseconds (else 0). Names are free, and differ; links keep their
// order. Throws UsageError.
std::vector<Link> parse_links(const std::string& text);

struct Network {
    Link inside, between;    // of a node; between nodes. The same where there is one link only
    int ranks_per_node = 8;  // g
};

enum class CollectiveAlgorithm { kRing, kTree, kHierarchical, kParameterServer };
const char* algorithm_name(CollectiveAlgorithm algorithm);

// Seconds of a reduce-scatter or an all-gather of slice_bytes (s) a rank over `ranks` (N, at least 1); 0 on one rank, but for a parameter server, whose link even one
// rank's buffer must pass.
double collective_seconds(CollectiveAlgorithm algorithm, const Network& network, int ranks, double slice_bytes);
