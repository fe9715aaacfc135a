#include "llmc/units.h"

#include "llmc/error.h"

std::string format_bytes(double bytes) {
    if (bytes >= 1e9) return format("%.2f GB", bytes / 1e9);
    if (bytes >= 1e6) return format("%.2f MB", bytes / 1e6);
    if (bytes >= 1e3) return format("%.2f kB", bytes / 1e3);
    return format("%.0f B", bytes);
}

std::string format_count(double count) {
    if (count >= 1e9) return format("%.2fB", count / 1e9);
    if (count >= 1e6) return format("%.2fM", count / 1e6);
    if (count >= 1e4) return format("%.1fk", count / 1e3);
    return format("%.0f", count);
}
