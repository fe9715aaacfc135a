// What a run takes of a device's memory, by category.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

struct MemoryBill {
    std::vector<std::pair<std::string, size_t>> categories;  // category and bytes, in the order the categories were first used
    size_t total_bytes = 0;

    void add(const std::string& category, size_t bytes) {
        total_bytes += bytes;
        for (auto& [name, sum] : categories) {
            if (name != category) continue;
            sum += bytes;
            return;
        }
        categories.emplace_back(category, bytes);
    }

    // Bytes of a category; 0 where nothing was taken.
    size_t bytes_of(const std::string& category) const {
        for (const auto& [name, sum] : categories) {
            if (name == category) return sum;
        }
        return 0;
    }
};
