// HOSTCUDA_FAULT: one wrong value in device memory, planted on purpose, to see what an unmodified program makes of it.
#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>

#include "hostcuda/launch.h"
#include "runtime.h"

namespace hostcuda {
namespace {

constexpr const char* kForm = "kernel=NAME,launch=K,argument=A,byte=B,do=nan32|nan16|flip[,bit=0..7]";

struct Fault {
    std::string text;     // as it was given
    std::string kernel;   // the function's plain name
    long long launch, argument, byte;
    size_t width;         // bytes of the NaN; 1: a bit is flipped
    bool nan;
    long long bit;
};

std::atomic<long long> launches{0};   // of that kernel; relaxed, like `planted`: they must order nothing
std::atomic<bool> planted{false};

[[noreturn]] __attribute__((format(printf, 2, 3))) void refuse(const std::string& text, const char* format, ...) {
    char what[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    stop("HOSTCUDA_FAULT=%s: %s", text.c_str(), what);
}

long long number(const Fault& fault, const char* key, const std::string& value, long long high) {
    const bool digits = !value.empty() && value.size() < 18 && value.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || std::stoll(value) > high) refuse(fault.text, "%s=%s is not a whole number from 0 to %lld", key, value.c_str(), high);
    return std::stoll(value);
}

Fault parse(const char* text) {
    Fault fault{};
    fault.text = text;
    std::map<std::string, std::string> given;
    for (size_t at = 0; at <= fault.text.size();) {
        const size_t comma = std::min(fault.text.find(',', at), fault.text.size());
        const std::string part = fault.text.substr(at, comma - at);
        at = comma + 1;
        const size_t equals = part.find('=');
        const std::string key = part.substr(0, equals);
        bool known = equals != std::string::npos;
        if (known) known = key == "kernel" || key == "launch" || key == "argument" || key == "byte" || key == "do" || key == "bit";
        if (!known) refuse(fault.text, "'%s' is not one of its keys with a value; write %s", part.c_str(), kForm);
        if (!given.emplace(key, part.substr(equals + 1)).second) refuse(fault.text, "%s is given twice", key.c_str());
    }
    for (const char* key : {"kernel", "launch", "argument", "byte", "do"})
        if (!given.count(key)) refuse(fault.text, "%s is missing; write %s", key, kForm);

    fault.kernel = given["kernel"];
    const char* const kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789";
    if (fault.kernel.empty() || fault.kernel.find_first_not_of(kLetters) != std::string::npos)
        refuse(fault.text, "kernel=%s is not a function's plain name; leave out namespaces, template arguments and parameters", fault.kernel.c_str());
    fault.launch = number(fault, "launch", given["launch"], INT32_MAX);
    fault.argument = number(fault, "argument", given["argument"], 1023);
    fault.byte = number(fault, "byte", given["byte"], 1LL << 50);
    const std::string& what = given["do"];
    if (what != "nan32" && what != "nan16" && what != "flip") refuse(fault.text, "do=%s is not nan32, nan16 or flip", what.c_str());
    fault.nan = what != "flip";
    fault.width = what == "nan32" ? 4 : what == "nan16" ? 2 : 1;
    if (fault.byte % static_cast<long long>(fault.width) != 0)
        refuse(fault.text, "byte=%lld is not a multiple of %zu, so do=%s would damage two numbers", fault.byte, fault.width, what.c_str());
    if (fault.nan && given.count("bit")) refuse(fault.text, "bit=%s is for do=flip only", given["bit"].c_str());
    fault.bit = given.count("bit") ? number(fault, "bit", given["bit"], 7) : 0;
    return fault;
}

const Fault* fault() {
    static const Fault* const instance = [] {
        const char* text = env_text("HOSTCUDA_FAULT");
        return text ? new Fault(parse(text)) : nullptr;   // never destroyed: it is read at exit
    }();
    return instance;
}

// "ns::(anonymous namespace)::name<int>" is `name`.
std::string_view function_name(std::string_view name) {
    constexpr std::string_view kAnonymous = "(anonymous namespace)";
    size_t end = 0;
    while (end < name.size() && name[end] != '<') {
        if (name.compare(end, kAnonymous.size(), kAnonymous) == 0) end += kAnonymous.size();
        else if (name[end] == '(') break;
        else end++;
    }
    name = name.substr(0, end);
    const size_t before = name.find_last_of(": ");
    return before == std::string_view::npos ? name : name.substr(before + 1);
}

std::string hex(const unsigned char* bytes, size_t count) {
    std::string text;
    for (size_t i = 0; i < count; i++) {
        char one[8];
        snprintf(one, sizeof one, "%s%02x", i ? " " : "", bytes[i]);
        text += one;
    }
    return text;
}

std::string rank_note() {
    const char* rank = getenv("OMPI_COMM_WORLD_RANK");
    return rank ? std::string(" (rank ") + rank + ")" : "";
}

void plant(const Fault& f, const char* kernel, unsigned char* target) {
    unsigned char before[4], after[4];
    {
        const DeviceAccess access;
        memcpy(before, target, f.width);
        // CUDA's own NaN: as a float, as two bf16 or fp16, and as the upper half of a double.
        if (f.nan) memcpy(after, f.width == 4 ? "\xff\xff\xff\x7f" : "\xff\x7f", f.width);
        else after[0] = static_cast<unsigned char>(before[0] ^ (1 << f.bit));
        memcpy(target, after, f.width);
    }
    planted.store(true, std::memory_order_relaxed);
    fprintf(stderr, "hostcuda: fault planted: launch %lld of kernel %s, argument %lld, byte %lld: %s -> %s%s\n", f.launch, kernel, f.argument, f.byte,
            hex(before, f.width).c_str(), hex(after, f.width).c_str(), rank_note().c_str());
}

}  // namespace

bool fault_mode() {
    static const bool on = fault() != nullptr;
    return on;
}

// Launches are counted where they are made, in the host's order: streams run in an order of their own.
std::function<void()> with_planted_fault(const char* kernel, std::initializer_list<Argument> arguments, std::function<void()> work) {
    const Fault& f = *fault();
    if (function_name(kernel) != f.kernel || launches.fetch_add(1, std::memory_order_relaxed) != f.launch) return work;
    if (f.argument >= static_cast<long long>(arguments.size()))
        refuse(f.text, "argument=%lld: kernel %s has %zu parameters, counted from 0", f.argument, kernel, arguments.size());
    const Argument& argument = arguments.begin()[f.argument];
    if (!argument.is_pointer) {
        std::string pointers;
        for (size_t i = 0; i < arguments.size(); i++)
            if (arguments.begin()[i].is_pointer) pointers += (pointers.empty() ? "" : ", ") + std::to_string(i);
        refuse(f.text, "argument %lld of kernel %s is not a pointer; its pointers are %s", f.argument, kernel, pointers.empty() ? "none" : pointers.c_str());
    }
    if (!argument.pointer) refuse(f.text, "argument %lld of kernel %s is null in launch %lld", f.argument, kernel, f.launch);
    if (place_of(argument.pointer, 1) != Place::device)
        refuse(f.text, "argument %lld of kernel %s is %p in launch %lld, which is not in device memory", f.argument, kernel, argument.pointer, f.launch);
    if (place_of(argument.pointer, static_cast<size_t>(f.byte) + f.width) != Place::device)
        refuse(f.text, "byte=%lld is past the end of the allocation that argument %lld of kernel %s points into; take a smaller one", f.byte, f.argument, kernel);
    unsigned char* const target = static_cast<unsigned char*>(const_cast<void*>(argument.pointer)) + f.byte;
    return [work = std::move(work), &f, kernel, target] {
        work();
        plant(f, kernel, target);
    };
}

void report_missing_fault() {
    if (!fault_mode() || planted.load(std::memory_order_relaxed)) return;
    const Fault& f = *fault();
    const long long seen = launches.load(std::memory_order_relaxed);
    std::string why = "kernel " + f.kernel + " was launched " + std::to_string(seen) + (seen == 1 ? " time" : " times") + ", and launches count from 0";
    if (seen == 0) why = "no kernel " + f.kernel + " was launched; HOSTCUDA_PROFILE=1 prints the names";
    if (seen > f.launch) why = "launch " + std::to_string(f.launch) + " of kernel " + f.kernel + " had not run when the process ended";
    fprintf(stderr, "hostcuda: no fault was planted: HOSTCUDA_FAULT=%s: %s%s\n", f.text.c_str(), why.c_str(), rank_note().c_str());
}

}  // namespace hostcuda
