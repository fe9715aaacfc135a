// A table of text: a label and cells a row, cells aligned on the right.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

class TextTable {
public:
    // A line of its own: the title of the rows below it.
    void heading(const std::string& text) { rows_.push_back({text, {}}); }
    void row(const std::string& label, const std::vector<std::string>& cells) { rows_.push_back({label, cells}); }
    // One cell for each of `items`.
    template <class Item, class Cell>
    void row(const std::string& label, const std::vector<Item>& items, Cell&& cell) {
        rows_.push_back({label, {}});
        for (const Item& item : items) rows_.back().second.push_back(cell(item));
    }

    std::string text() const {
        size_t label_width = 0;
        std::vector<size_t> widths;
        for (const auto& [label, cells] : rows_) {
            if (cells.empty()) continue;
            label_width = std::max(label_width, label.size());
            widths.resize(std::max(widths.size(), cells.size()));
            for (size_t i = 0; i < cells.size(); ++i) widths[i] = std::max(widths[i], cells[i].size());
        }
        std::string all;
        for (const auto& [label, cells] : rows_) {
            std::string line = label;
            if (!cells.empty()) line.resize(label_width, ' ');
            for (size_t i = 0; i < cells.size(); ++i) line += std::string(2 + widths[i] - cells[i].size(), ' ') + cells[i];
            all += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
        }
        return all;
    }

private:
    std::vector<std::pair<std::string, std::vector<std::string>>> rows_;
};
