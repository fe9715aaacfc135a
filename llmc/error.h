// Errors of the host side: one exception type, printf-style messages, checks that survive NDEBUG.
//
// A message says what is wrong, the value, and the fix. Library code throws; main() alone decides how the process ends, so that
// start-up errors can be agreed over all ranks before anyone leaves.
#pragma once

#include <climits>
#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

// Something is wrong with the run: a file, a value, the machine. Exit status 1.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The command line itself is wrong. Exit status 2.
struct UsageError : Error {
    using Error::Error;
};

// vsnprintf into a string of the right length.
inline std::string format_va(const char* format, va_list args) {
    va_list measure;
    va_copy(measure, args);
    const int length = vsnprintf(nullptr, 0, format, measure);
    va_end(measure);
    std::string text(length > 0 ? length : 0, '\0');
    if (length > 0) vsnprintf(text.data(), text.size() + 1, format, args);
    return text;
}

// snprintf into a string of the right length.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = format_va(format, args);
    va_end(args);
    return text;
}

// Throws Error with a printf-style message.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = format_va(format, args);
    va_end(args);
    throw Error(text);
}

// A condition the program relies on; stays in every build. The message is printf-style.
#define CHECK(condition, ...)                    \
    do {                                         \
        if (!(condition)) fail(__VA_ARGS__);     \
    } while (0)

// A count that must fit an int (cuBLASLt and MPI take ints); `what` names it in the error.
inline int narrow_int(size_t value, const char* what) {
    CHECK(value <= static_cast<size_t>(INT_MAX), "%s is %zu, more than an int holds (%d); use a smaller batch or model", what, value, INT_MAX);
    return static_cast<int>(value);
}
