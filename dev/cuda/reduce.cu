// Second stages of sums: over the partial rows of a norm's backward pass, over the losses of a micro-batch, over the partial squares of a gradient.
#include "dev/cuda/bench.cuh"
#include "llmc/global_norm.cuh"
#include "llmc/reduce.cuh"
#include "llmc/rmsnorm.cuh"

namespace reduce_bench {

void rows(bench::Case& c, int P, int C) {
    const auto partials = c.normal<float>(P, C);
    const auto out = c.output<floatX>("out", C);
    c.run([&](cudaStream_t stream) { sum_rows(out.get(), partials, P, C, C, stream); });
    bench::expect_column_sums(c, "out", out, partials, P, C);
    c.time(bench::bytes(partials, out), 1.0 * P * C);
}

// `call` is one of the two sums of a list into a double.
template <typename T, typename Call>
void list(bench::Case& c, const bench::Buffer<T>& x, Call&& call) {
    const auto out = c.output<double>("out", 1);
    c.run([&](cudaStream_t stream) { call(out, x, stream); });
    double want = 0, magnitude = 0;
    for (const double value : x.fetch(0, x.count())) {
        want += value;
        magnitude += std::abs(value);
    }
    c.expect("out", 0, out.at(0), want, 2 * x.count() * 0x1p-53 * magnitude);  // both sums in double
    c.time(bench::bytes(x, out), 1.0 * x.count());
}

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const int N = s.N, C = model.channels, P = ceil_div(N, rmsnorm_backward_rows(N));
        bench::add(format("sum_rows/P=%d/C=%d", P, C), [=](bench::Case& c) { rows(c, P, C); });
        bench::add(format("sum_to_double/n=%d", N), [=](bench::Case& c) {
            const auto losses = c.normal<float>(N);
            list(c, losses, [](double* out, const bench::Buffer<float>& x, cudaStream_t stream) { sum_to_double(out, x, x.count(), false, stream); });
        });
        const size_t chunks = sum_of_squares_count(bench::layer_parameters(model));
        bench::add(format("sum_partials/n=%zu", chunks), [=](bench::Case& c) {
            std::vector<double> host;
            for (size_t i = 0; i < chunks; i++) host.push_back(1.0 / (i + 1));
            list(c, c.upload(host), [](double* out, const bench::Buffer<double>& x, cudaStream_t stream) { sum_partials(out, x, x.count(), stream); });
        });
    }
});

}  // namespace reduce_bench
