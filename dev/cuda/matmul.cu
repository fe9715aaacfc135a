// The products of a model's layers and head, forward and both backward ones, and the gradient of a bias.
#include "dev/cuda/bench.cuh"
#include "llmc/matmul.cuh"

namespace matmul_bench {

// 8 x 8 elements of out (rows, cols): row(i) and column(j) are the `inner` factors of out[i, j], bias(j) what is added. The products of bf16 are exact in
// fp32, those of fp32 round once each: one more roundoff of the magnitudes; a bias is one more term.
template <typename Row, typename Column, typename Bias>
void check(bench::Case& c, const char* name, const bench::Buffer<floatX>& out, size_t rows, size_t cols, size_t inner, Row&& row, Column&& column, Bias&& bias) {
    std::vector<std::vector<double>> columns;
    const std::vector<size_t> is = bench::sample(rows, 8), js = bench::sample(cols, 8);
    for (const size_t j : js) columns.push_back(column(j));
    for (const size_t i : is) {
        const std::vector<double> a = row(i), got = out.fetch(i * cols, cols);
        for (size_t index = 0; index < js.size(); index++) {
            double want = bias(js[index]), magnitude = std::abs(want);
            for (size_t k = 0; k < inner; k++) {
                want += a[k] * columns[index][k];
                magnitude += std::abs(a[k] * columns[index][k]);
            }
            c.expect(name, i * cols + js[index], got[js[index]], want, bench::stored<floatX>(want, (bench::sum_error(inner + 1) + kRoundoff32) * magnitude));
        }
    }
}
double no_bias(size_t) { return 0; }

void forward(bench::Case& c, int N, int C, int OC, bool with_bias) {
    const auto inp = c.normal<floatX>(N, C), weight = c.normal<floatX>(OC, C), bias = c.normal<floatX>(with_bias ? OC : 0);
    const auto out = c.output<floatX>("out", N, OC);
    c.run([&](cudaStream_t stream) { matmul_forward(bench::matmuls(), out, inp, weight, with_bias ? bias.get() : nullptr, N, C, OC, stream); });
    check(c, "out", out, N, OC, C, [&](size_t i) { return inp.fetch(i * C, C); }, [&](size_t j) { return weight.fetch(j * C, C); },
          [&](size_t j) { return with_bias ? bias.at(j) : 0; });
    c.time(bench::bytes(inp, weight, bias, out), 2.0 * N * C * OC);
}

void backward_input(bench::Case& c, int N, int C, int OC) {
    const auto dout = c.normal<floatX>(N, OC), weight = c.normal<floatX>(OC, C);
    const auto dinp = c.output<floatX>("dinp", N, C);
    c.run([&](cudaStream_t stream) { matmul_backward_input(bench::matmuls(), dinp, dout, weight, N, C, OC, stream); });
    check(c, "dinp", dinp, N, C, OC, [&](size_t i) { return dout.fetch(i * OC, OC); }, [&](size_t j) { return weight.fetch(j, OC, C); }, no_bias);
    c.time(bench::bytes(dout, weight, dinp), 2.0 * N * C * OC);
}

void backward_weight(bench::Case& c, int N, int C, int OC) {
    const auto dout = c.normal<floatX>(N, OC), inp = c.normal<floatX>(N, C);
    const auto dweight = c.output<floatX>("dweight", OC, C);
    c.run([&](cudaStream_t stream) { matmul_backward_weight(bench::matmuls(), dweight, dout, inp, N, C, OC, stream); });
    check(c, "dweight", dweight, OC, C, N, [&](size_t i) { return dout.fetch(i, N, OC); }, [&](size_t j) { return inp.fetch(j, N, C); }, no_bias);
    c.time(bench::bytes(dout, inp, dweight), 2.0 * N * C * OC);
}

void bias(bench::Case& c, int N, int OC) {
    const auto dout = c.normal<floatX>(N, OC);
    const auto dbias = c.output<floatX>("dbias", OC);
    const auto scratch = c.scratch<float>(bias_backward_scratch_count(N, OC));
    c.run([&](cudaStream_t stream) { bias_backward(dbias, scratch, dout, N, OC, stream); });
    bench::expect_column_sums(c, "dbias", dbias, dout, N, OC);
    c.time(bench::bytes(dout, dbias), 1.0 * N * OC);
}

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const int N = s.N, C = model.channels, F = model.ffn_dim, width = model.num_heads * model.head_dim, QKV = width + 2 * model.num_kv_heads * model.head_dim;
        const struct {
            int in, out;
            bool bias;
        } products[] = {{C, QKV, model.qkv_bias}, {width, C, false}, {C, 2 * F, false}, {F, C, false}, {C, model.padded_vocab(), false}};
        for (const auto& product : products) {
            const int in = product.in, out = product.out;
            const bool with_bias = product.bias;
            bench::add(format("matmul_forward/N=%d/C=%d/OC=%d/bias=%d", N, in, out, with_bias), [=](bench::Case& c) { forward(c, N, in, out, with_bias); });
            bench::add(format("matmul_backward_input/N=%d/C=%d/OC=%d", N, in, out), [=](bench::Case& c) { backward_input(c, N, in, out); });
            bench::add(format("matmul_backward_weight/N=%d/C=%d/OC=%d", N, in, out), [=](bench::Case& c) { backward_weight(c, N, in, out); });
        }
        bench::add(format("bias_backward/N=%d/OC=%d", N, QKV), [=](bench::Case& c) { bias(c, N, QKV); });
    }
});

}  // namespace matmul_bench
