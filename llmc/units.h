// Numbers as people read them.
#pragma once

#include <string>

std::string format_bytes(double bytes);  // "1.50 GB" (10^9), "12.30 MB", "512 B"
std::string format_count(double count);  // "124.50M", "12.3k", "17"
