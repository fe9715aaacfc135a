// What the benchmarks share: shapes from models, device buffers, checks of samples against double precision, timing, the two measured ceilings, and main.
//
// A benchmark reads from top to bottom: make inputs and outputs, run() once, check samples, time():
//
//   void forward(bench::Case& c, int N, int C) {
//       const auto inp = c.normal<floatX>(N, C), weight = c.normal<floatX>(C);
//       const auto out = c.output<floatX>("out", N, C);
//       c.run([&](cudaStream_t stream) { some_forward(out, inp, weight, N, C, stream); });
//       for (const size_t row : bench::sample(N, 8)) ... c.expect("out", index, got, want, bound);
//       c.time(bench::bytes(inp, weight, out), 4.0 * N * C);
//   }
//
// Before run() outputs and scratch are filled with NaN patterns; after it no element of an output may be left. Elements are then compared with loops in
// double precision that know the formula and not the kernel. bytes are the fewest an operation must move (each input and each output once), flops the
// useful ones. A time is the median of 5 to 50 runs between two events; on a GPU the L2 cache is overwritten before each.
//
// main stands in this header because every program is one translation unit: one dev/cuda/NAME.cu alone, or all of them included into one. A file registers
// itself through a Registration object in a namespace of its own.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "dev/test/roundoff.h"
#include "llmc/device.cuh"
#include "llmc/init.cuh"
#include "llmc/matmul.cuh"
#include "llmc/model_config.h"

namespace bench {

// ---- what is measured where ------------------------------------------------------------------------------------------------------

struct Settings {
    std::vector<ModelConfig> models;
    int N = 0, T = 0;         // tokens, and how many of them are one sequence
    bool gpu = false;         // false: hostcuda
    std::string device;
    size_t flush_bytes = 0;   // overwritten before each run, so that no input waits in the L2 cache; 0 on a CPU
    double copy_bytes_per_second = 0, product_flops_per_second = 0;  // the ceilings
};

inline Settings& settings() {
    static Settings instance;
    return instance;
}

inline cudaStream_t stream() {
    static cudaStream_t created = [] {
        cudaStream_t fresh;
        CUDA_CHECK(cudaStreamCreateWithFlags(&fresh, cudaStreamNonBlocking));
        return fresh;
    }();
    return created;
}

inline void synchronize() { CUDA_CHECK(cudaStreamSynchronize(stream())); }

// Never destroyed: the driver may be gone before statics are.
inline MatmulContext& matmuls() {
    static MatmulContext* const instance = new MatmulContext;
    return *instance;
}

// ---- numbers ---------------------------------------------------------------------------------------------------------------------

// Error of a sum of `terms` in fp32, in any order, relative to the sum of magnitudes: each addition is off by at most a roundoff of a partial sum. For many
// terms the errors' signs mix: beyond 6 sqrt(terms) roundoffs lies a probability of 2 exp(-18) = 3e-8 (Higham and Mary, 2019), and the worst case, terms
// roundoffs, would hide a row that was left out.
inline double sum_error(double terms) { return std::min(terms, 6 * std::sqrt(terms)) * kRoundoff32; }

// Error of a sum whose terms were each rounded to T before they were added: at most a roundoff of their magnitudes (`size`), and since these errors' signs mix
// too, at most 6 roundoffs of the root of the sum of squares but for a probability of 2 exp(-18) (Hoeffding).
template <typename T>
inline double rounded_terms_error(double size, double squares) {
    return kRoundoff<T> * std::min(size, 6 * std::sqrt(squares));
}

// The bound of a value known to `error`, once it is rounded to T.
template <typename T>
inline double stored(double value, double error) {
    return error + kRoundoff<T> * (std::abs(value) + error) + kTiny<T>;
}

inline double to_double(float x) { return x; }
inline double to_double(double x) { return x; }
inline double to_double(int x) { return x; }
inline double to_double(__nv_bfloat16 x) { return static_cast<double>(__bfloat162float(x)); }

// Up to `wanted` different indices below n in ascending order: the first, the last (beyond 2^31 where the tensor is that large) and random ones.
inline std::vector<size_t> sample(size_t n, size_t wanted) {
    std::set<size_t> chosen = {0, n - 1};
    std::mt19937_64 generator(n);
    while (chosen.size() < std::min(n, wanted)) chosen.insert(generator() % n);
    return {chosen.begin(), chosen.end()};
}

// Elements of one layer's unit, what the kernels over flat buffers see at once.
inline size_t layer_parameters(ModelConfig model) {
    const long long whole = count_parameters(model);
    model.num_layers++;
    return static_cast<size_t>(count_parameters(model) - whole);
}

inline std::vector<int> random_ints(size_t count, unsigned seed, int low, int high) {
    std::mt19937 generator(seed);
    std::uniform_int_distribution<int> uniform(low, high);
    std::vector<int> values(count);
    for (int& value : values) value = uniform(generator);
    return values;
}

// ---- device memory ---------------------------------------------------------------------------------------------------------------

// out[r, c] = x[first + r * row_stride + c * col_stride]: rows, columns or blocks of a large tensor, so that only what is checked travels.
template <typename T>
__global__ void gather_kernel(T* out, const T* x, size_t first, size_t rows, size_t row_stride, size_t cols, size_t col_stride) {
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < rows * cols) out[i] = x[first + i / cols * row_stride + i % cols * col_stride];
}

// Elements that still hold the poison, every bit set. The 16 elements of a thread lie a block apart.
template <typename Bits>
__global__ void count_poison_kernel(unsigned long long* count, const Bits* x, size_t n) {
    unsigned long long found = 0;
    for (int j = 0; j < 16; j++) {
        const size_t i = (static_cast<size_t>(blockIdx.x) * 16 + j) * blockDim.x + threadIdx.x;
        if (i < n && x[i] == static_cast<Bits>(~Bits{0})) found++;
    }
    if (found > 0) atomicAdd(count, found);
}

template <typename T>
class Buffer {
public:
    explicit Buffer(size_t count) : count_(count) { CUDA_CHECK(cudaMalloc(&data_, std::max<size_t>(bytes(), 1))); }
    explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
        CUDA_CHECK(cudaMemcpyAsync(data_, values.data(), bytes(), cudaMemcpyHostToDevice, stream()));
        synchronize();
    }
    Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { cudaFree(data_); }

    T* get() const { return data_; }
    operator T*() const { return data_; }
    size_t count() const { return count_; }
    size_t bytes() const { return count_ * sizeof(T); }

    std::vector<T> download() const { return download(count_); }
    std::vector<T> download(size_t count) const {
        std::vector<T> values(count);
        CUDA_CHECK(cudaMemcpyAsync(values.data(), data_, count * sizeof(T), cudaMemcpyDeviceToHost, stream()));
        synchronize();
        return values;
    }
    // `rows` x `cols` elements as doubles, rows row_stride apart.
    std::vector<double> block(size_t first, size_t rows, size_t row_stride, size_t cols, size_t col_stride = 1) const {
        const size_t wanted = rows * cols;
        CHECK(wanted == 0 || first + (rows - 1) * row_stride + (cols - 1) * col_stride < count_, "a check reads outside of its buffer of %zu elements", count_);
        if (wanted == 0) return {};
        // One staging buffer for all, never freed: checks fetch thousands of times.
        static Buffer* staging = nullptr;
        if (staging == nullptr || staging->count_ < wanted) {
            delete staging;
            staging = new Buffer(std::max<size_t>(wanted, 1 << 16));
        }
        launch(gather_kernel<T>, grid_for(wanted, 256), 256, 0, stream(), staging->data_, static_cast<const T*>(data_), first, rows, row_stride, cols, col_stride);
        std::vector<double> values;
        values.reserve(wanted);
        for (const T value : staging->download(wanted)) values.push_back(to_double(value));
        return values;
    }
    // `count` elements as doubles, `stride` apart.
    std::vector<double> fetch(size_t first, size_t count, size_t stride = 1) const { return block(first, 1, 0, count, stride); }
    double at(size_t i) const { return fetch(i, 1)[0]; }

private:
    T* data_ = nullptr;
    size_t count_;
};

// Each of the buffers once.
template <typename... Buffers>
inline double bytes(const Buffers&... buffers) {
    return (static_cast<double>(buffers.bytes()) + ...);
}

// ---- one benchmark ---------------------------------------------------------------------------------------------------------------

// Small fixed budgets: the whole program has to fit into about a minute.
inline constexpr size_t kMinSamples = 5, kMaxSamples = 50;
inline constexpr double kSampleSeconds = 0.15;

// Seconds of each run of `operation` between two events. The overwritten cache also gives the host time to queue the operation, so that its launches are
// not measured; what is left of that on a GPU is the 2 to 3 us between two events with a kernel that does nothing.
inline std::vector<double> sample_seconds(const std::function<void(cudaStream_t)>& operation, size_t most = kMaxSamples) {
    static const Buffer<unsigned char>* const flush = settings().flush_bytes > 0 ? new Buffer<unsigned char>(settings().flush_bytes) : nullptr;
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    std::vector<double> samples;
    const auto begin = std::chrono::steady_clock::now();
    const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
    while (samples.size() < kMinSamples || (samples.size() < most && elapsed() < kSampleSeconds)) {
        if (flush != nullptr) CUDA_CHECK(cudaMemsetAsync(flush->get(), 0, flush->bytes(), stream()));
        CUDA_CHECK(cudaEventRecord(start, stream()));
        operation(stream());
        CUDA_CHECK(cudaEventRecord(stop, stream()));
        CUDA_CHECK(cudaEventSynchronize(stop));
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        samples.push_back(std::max(ms * 1e-3, 1e-9));
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    std::sort(samples.begin(), samples.end());
    return samples;
}

class Case {
public:
    explicit Case(benchmark::State& state) : state_(state) {}

    // N(0, 1) made on the device: the host would need seconds for a large tensor. The dimensions are multiplied.
    template <typename T, typename... Dims>
    Buffer<T> normal(Dims... dims) {
        const size_t count = (static_cast<size_t>(dims) * ...);
        Buffer<T> buffer(count);
        init_normal(buffer.get(), count, 1234, ++next_input_, 1.0f, stream());
        return buffer;
    }
    template <typename T>
    Buffer<T> upload(const std::vector<T>& values) {
        return Buffer<T>(values);
    }
    // Poisoned before run(), and every element must be written by it.
    template <typename T, typename... Dims>
    Buffer<T> output(const char* name, Dims... dims) {
        Buffer<T> buffer((static_cast<size_t>(dims) * ...));
        poisoned_.push_back({name, buffer.get(), buffer.count(), sizeof(T)});
        return buffer;
    }
    // Poisoned before run(), and may keep it.
    template <typename T>
    Buffer<T> scratch(size_t count) {
        Buffer<T> buffer(count);
        poisoned_.push_back({nullptr, buffer.get(), buffer.count(), sizeof(T)});
        return buffer;
    }

    // Runs the operation once, on poisoned outputs. The operation is kept for time(), so what it refers to must live until then.
    void run(std::function<void(cudaStream_t)> operation) {
        operation_ = std::move(operation);
        for (const Poisoned& p : poisoned_) CUDA_CHECK(cudaMemsetAsync(p.data, 0xFF, p.count * p.element_bytes, stream()));
        operation_(stream());
        synchronize();
        for (const Poisoned& p : poisoned_) {
            if (p.name == nullptr || p.count == 0) continue;
            const unsigned long long left = count_poison(p);
            if (left > 0) fail_check(format("%s: %llu of %zu elements were not written", p.name, left, p.count));
        }
    }

    // |got - want| <= bound; false for a NaN.
    void expect(const char* what, size_t index, double got, double want, double bound) {
        if (!(std::abs(got - want) <= bound)) {
            fail_check(format("%s[%zu] is %.9g, expected %.9g within %.3g, off by %.3g", what, index, got, want, bound, std::abs(got - want)));
        }
    }

    void fail_check(const std::string& message) {
        if (error_.empty()) error_ = message;
    }

    // Times the operation of run(), unless a check failed.
    void time(double bytes, double flops) {
        if (!error_.empty()) return;
        timed_ = true;
        std::vector<double> samples;
        for (auto _ : state_) samples = sample_seconds(operation_);
        const double seconds = samples[samples.size() / 2];
        const double copy_share = bytes / seconds / settings().copy_bytes_per_second, product_share = flops / seconds / settings().product_flops_per_second;
        state_.counters["us"] = seconds * 1e6;
        state_.counters["bytes"] = bytes;
        state_.counters["flops"] = flops;
        state_.counters["share"] = std::max(copy_share, product_share);
        state_.counters["samples"] = static_cast<double>(samples.size());
        state_.SetLabel(copy_share >= product_share ? "copy" : "product");  // the ceiling that `share` is of
    }

    // The error of this benchmark, or "".
    std::string error() const { return error_.empty() && !timed_ ? "nothing was timed" : error_; }

private:
    struct Poisoned {
        const char* name;  // nullptr: scratch
        void* data;
        size_t count, element_bytes;
    };

    static unsigned long long count_poison(const Poisoned& p) {
        const Buffer<unsigned long long> count(std::vector<unsigned long long>{0});
        const auto start = [&](auto bits) {
            launch(count_poison_kernel<decltype(bits)>, grid_for(p.count, 16 * 256), 256, 0, stream(), count.get(), static_cast<const decltype(bits)*>(p.data), p.count);
        };
        CHECK(p.element_bytes == 2 || p.element_bytes == 4 || p.element_bytes == 8, "an output has elements of %zu bytes", p.element_bytes);
        if (p.element_bytes == 2) start(uint16_t{});
        if (p.element_bytes == 4) start(uint32_t{});
        if (p.element_bytes == 8) start(uint64_t{});
        return count.download()[0];
    }

    benchmark::State& state_;
    std::function<void(cudaStream_t)> operation_;
    std::vector<Poisoned> poisoned_;
    std::string error_;
    bool timed_ = false;
    unsigned next_input_ = 0;
};

// Some of the columns of out (cols) against the sums over the rows of inp (rows, cols).
template <typename Out, typename In>
inline void expect_column_sums(Case& c, const char* name, const Buffer<Out>& out, const Buffer<In>& inp, size_t rows, size_t cols) {
    for (const size_t column : sample(cols, 16)) {
        double want = 0, magnitude = 0;
        for (const double value : inp.fetch(column, rows, cols)) {
            want += value;
            magnitude += std::abs(value);
        }
        c.expect(name, column, out.at(column), want, stored<Out>(want, sum_error(static_cast<double>(rows)) * magnitude));
    }
}

// ---- registration ----------------------------------------------------------------------------------------------------------------

// Called once the models are known; adds the benchmarks of one header.
using RegisterFunction = void (*)(const Settings&);

inline std::vector<RegisterFunction>& registered_headers() {
    static std::vector<RegisterFunction> functions;
    return functions;
}

struct Registration {
    explicit Registration(RegisterFunction function) { registered_headers().push_back(function); }
};

inline int& failed_checks() {
    static int count = 0;
    return count;
}

// Adds a benchmark, `op/KEY=value/KEY=value`. A shape that another model already brought is left out.
inline void add(const std::string& name, std::function<void(Case&)> body) {
    static std::set<std::string> names;
    if (!names.insert(name).second) return;
    benchmark::RegisterBenchmark(name.c_str(), [body = std::move(body)](benchmark::State& state) {
        std::string error;
        Case c(state);
        try {
            body(c);
            error = c.error();
        } catch (const Error& thrown) {
            error = thrown.what();
        }
        if (error.empty()) return;
        failed_checks()++;
        state.SkipWithError(error.c_str());
    });
}

// ---- the ceilings ----------------------------------------------------------------------------------------------------------------

__global__ void copy_kernel(float* out, const float* in, size_t n) {
    const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVector;
    if (i < n) store8(out + i, load8(in + i));
}

// On a GPU large enough that nothing stays in the cache and that a product fills the device. On a CPU also small: the small shapes measured there stay in its
// cache, and a ceiling has to lie above them.
inline std::vector<size_t> copy_counts() { return settings().gpu ? std::vector<size_t>{size_t{1} << 28} : std::vector<size_t>{1 << 24, 1 << 17}; }
inline std::vector<int> product_sizes() { return settings().gpu ? std::vector<int>{8192} : std::vector<int>{1024, 512, 256}; }

inline std::function<void(cudaStream_t)> copy_by_kernel(const Buffer<float>& to, const Buffer<float>& from) {
    return [&](cudaStream_t stream) { launch(copy_kernel, grid_for(to.count(), 256 * kVector), 256, 0, stream, to.get(), static_cast<const float*>(from.get()), to.count()); };
}

// Bytes read and written a second, by the better of the library's copy and a kernel's. A ceiling is the best that was seen, a benchmark the median.
inline double measure_copy() {
    double best = 0;
    for (const size_t count : copy_counts()) {
        const Buffer<float> from(count), to(count);
        init_normal(from.get(), count, 1, 0, 1.0f, stream());
        const double by_library = sample_seconds([&](cudaStream_t stream) { CUDA_CHECK(cudaMemcpyAsync(to, from, from.bytes(), cudaMemcpyDeviceToDevice, stream)); })[0];
        best = std::max(best, bytes(from, to) / std::min(by_library, sample_seconds(copy_by_kernel(to, from))[0]));
    }
    return best;
}

// FLOP/s of a product of random square matrices: zeros would take less power and give a GPU a higher clock.
inline double measure_product() {
    double best = 0;
    for (const int n : product_sizes()) {
        const size_t count = static_cast<size_t>(n) * n;
        const Buffer<floatX> a(count), b(count), out(count);
        init_normal(a.get(), count, 1, 0, 1.0f, stream());
        init_normal(b.get(), count, 1, 1, 1.0f, stream());
        best = std::max(best, 2.0 * n * n * n / sample_seconds([&](cudaStream_t stream) { matmul_forward(matmuls(), out, a, b, nullptr, n, n, n, stream); })[0]);
    }
    return best;
}

// The two again as benchmarks, for --ceilings: medians.
inline void add_ceilings() {
    for (const size_t count : copy_counts()) {
        add(format("ceiling_copy/n=%zu", count), [count](Case& c) {
            const auto from = c.normal<float>(count), to = c.output<float>("to", count);
            c.run(copy_by_kernel(to, from));
            for (const size_t i : sample(count, 64)) c.expect("to", i, to.at(i), from.at(i), 0);
            c.time(bytes(from, to), 0);
        });
    }
    for (const int n : product_sizes()) {
        add(format("ceiling_product/n=%d", n), [n](Case& c) {
            const auto a = c.normal<floatX>(n, n), b = c.normal<floatX>(n, n), out = c.output<floatX>("out", n, n);
            c.run([&](cudaStream_t stream) { matmul_forward(matmuls(), out, a, b, nullptr, n, n, n, stream); });
            c.time(bytes(a, b, out), 2.0 * n * n * n);
        });
    }
}

// ---- the program -----------------------------------------------------------------------------------------------------------------

// One line a benchmark. (Google Benchmark's own columns would show the wall time of a whole measurement.)
class LineReporter : public benchmark::BenchmarkReporter {
public:
    bool ReportContext(const Context&) override {
        printf("%-66s %12s %10s %12s %8s\n", "benchmark", "us", "GB/s", "GFLOP/s", "share");
        return true;
    }
    void ReportRuns(const std::vector<Run>& runs) override {
        for (const Run& run : runs) {
            if (run.error_occurred) {
                printf("%-66s FAILED: %s\n", run.benchmark_name().c_str(), run.error_message.c_str());
            } else {
                const auto value = [&](const char* name) { return static_cast<double>(run.counters.at(name)); };
                const double us = value("us");
                printf("%-66s %12.2f %10.1f %12.1f %7.1f%% of %s\n", run.benchmark_name().c_str(), us, value("bytes") / us * 1e-3, value("flops") / us * 1e-3,
                       100 * value("share"), run.report_label.c_str());
            }
        }
        fflush(stdout);
    }
};

inline ModelConfig model_of(const std::string& text) {
    if (text.find('/') != std::string::npos || std::filesystem::exists(text)) return config_from_json_file(text);
    try {
        return preset_config(text);
    } catch (const Error& error) {
        throw UsageError(format("--models: %s; or give the path of a Hugging Face config.json", error.what()));
    }
}

inline std::string take_option(std::vector<char*>& arguments, const std::string& name, const std::string& missing) {
    std::string value = missing;
    for (auto it = arguments.begin(); it != arguments.end();) {
        const std::string argument = *it;
        const bool own = argument.rfind(name + "=", 0) == 0;
        if (own) value = argument.substr(name.size() + 1);
        it = own ? arguments.erase(it) : it + 1;
    }
    return value;
}

// 0 where it is none.
inline int positive_int(const std::string& text) { return text.size() < 9 && text.find_first_not_of("0123456789") == std::string::npos ? atoi(text.c_str()) : 0; }

inline void select_device(Settings& s) {
    device_count();
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    s.device = properties.name;
    s.gpu = s.device.rfind("hostcuda", 0) != 0;
    // Twice the cache, so that nothing of it survives whatever the replacement rule is.
    if (s.gpu) s.flush_bytes = 2 * static_cast<size_t>(properties.l2CacheSize);
}

inline int run_program(int argc, char** argv) {
    std::vector<char*> arguments(argv, argv + argc);
    bool help = false, list = false, other_format = false, ceilings = false;
    for (const std::string argument : arguments) {
        ceilings |= argument == "--ceilings";
        help |= argument == "--help";
        list |= argument == "--benchmark_list_tests" || argument == "--benchmark_list_tests=true";
        other_format |= argument.rfind("--benchmark_format=", 0) == 0;
    }
    if (help) {
        printf("Kernel benchmarks: each checks its kernel against double precision on real shapes, then times it beside two measured ceilings.\n"
               "  --models=A,B   presets or paths of a Hugging Face config.json (GPU: qwen2.5-0.5B,qwen2.5-1.5B,qwen2.5-3B; CPU: tiny)\n"
               "  --tokens=N     tokens of a micro-batch (GPU: 16384; CPU: 256)\n"
               "  --seq-len=T    in sequences of this length (GPU: 1024; CPU: 128)\n"
               "  --ceilings     only measures the two ceilings\n"
               "and Google Benchmark's own, as --benchmark_filter=REGEX --benchmark_out=FILE --benchmark_out_format=json --benchmark_list_tests\n");
        return 0;
    }

    Settings& s = settings();
    select_device(s);
    std::string names = take_option(arguments, "--models", s.gpu ? "qwen2.5-0.5B,qwen2.5-1.5B,qwen2.5-3B" : "tiny") + ",";
    for (size_t comma; (comma = names.find(',')) != std::string::npos; names.erase(0, comma + 1)) {
        if (comma > 0) s.models.push_back(model_of(names.substr(0, comma)));
    }
    if (s.models.empty()) throw UsageError("--models names no model; give a preset such as tiny, or the path of a Hugging Face config.json");
    const std::string tokens = take_option(arguments, "--tokens", s.gpu ? "16384" : "256"), length = take_option(arguments, "--seq-len", s.gpu ? "1024" : "128");
    s.N = positive_int(tokens);
    s.T = std::min(s.N, positive_int(length));
    if (s.T < 8 || s.N % 8 != 0 || s.N % s.T != 0) {
        throw UsageError(format("--tokens=%s --seq-len=%s: tokens must be a multiple of 8 and of the sequence length, which is at least 8", tokens.c_str(), length.c_str()));
    }

    std::erase_if(arguments, [](const char* argument) { return std::string(argument) == "--ceilings"; });
    // One call of each benchmark: it takes its own samples, so Google Benchmark need not search for a number of iterations.
    static char once[] = "--benchmark_min_time=0";
    arguments.insert(arguments.begin() + 1, once);
    int count = static_cast<int>(arguments.size());
    benchmark::Initialize(&count, arguments.data());
    if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 2;

    if (ceilings) {
        add_ceilings();
    } else {
        for (const RegisterFunction function : registered_headers()) function(s);
    }
    if (!list) {
        s.copy_bytes_per_second = measure_copy();
        s.product_flops_per_second = measure_product();
        benchmark::AddCustomContext("device", s.device);
        benchmark::AddCustomContext("precision", std::is_same_v<floatX, float> ? "FP32" : "BF16");
        benchmark::AddCustomContext("tokens", std::to_string(s.N));
        benchmark::AddCustomContext("copy_bytes_per_second", format("%.6g", s.copy_bytes_per_second));
        benchmark::AddCustomContext("product_flops_per_second", format("%.6g", s.product_flops_per_second));
    }
    LineReporter lines;
    const size_t run = benchmark::RunSpecifiedBenchmarks(list || other_format ? nullptr : &lines);
    if (list) return 0;
    if (other_format) return run == 0 || failed_checks() > 0;
    printf("%s: copy %.1f GB/s, product %.1f GFLOP/s; %zu benchmarks, %d failed checks\n", s.device.c_str(), s.copy_bytes_per_second * 1e-9,
           s.product_flops_per_second * 1e-9, run, failed_checks());
    return run == 0 || failed_checks() > 0;
}

}  // namespace bench

int main(int argc, char** argv) {
    try {
        return bench::run_program(argc, argv);
    } catch (const UsageError& error) {
        fprintf(stderr, "error: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
}
