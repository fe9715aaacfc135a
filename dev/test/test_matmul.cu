// Matrix products and the bias gradient against loops in double precision; the wrapper's checks, and its choices as bytes.
#include "dev/test/kernel_test.cuh"

#include <string>

#include "llmc/matmul.cuh"

namespace {

MatmulContext& context() {
    static MatmulContext* const instance = new MatmulContext;  // never destroyed: the driver may be gone before statics are
    return *instance;
}

struct Shape {
    int N, C, OC;
};

// One row, few rows, rows that are no multiple of anything, both aspect ratios, the smallest widths.
const std::vector<Shape> kShapes = {{1, 64, 192}, {1, 8, 8}, {3, 8, 200}, {17, 72, 24}, {64, 128, 384}, {127, 96, 40}, {200, 256, 64}, {33, 8, 1024}};

// The reference: out[i][j] = sum over k of a(i, k) b(k, j), and the sum of magnitudes that bounds its error.
struct Reference {
    std::vector<double> out, size;
    Reference(int rows, int cols, int inner, const std::function<double(int, int)>& a, const std::function<double(int, int)>& b) {
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++) {
                double sum = 0, magnitude = 0;
                for (int k = 0; k < inner; k++) {
                    const double term = a(i, k) * b(k, j);
                    sum += term;
                    magnitude += std::abs(term);
                }
                out.push_back(sum);
                size.push_back(magnitude);
            }
    }
};

template <typename Out>
void check_product(const char* what, const DeviceBuffer<Out>& out, const Reference& reference, int terms) {
    expect_close(what, out.values(), reference.out, [&](size_t i) { return product_bound<Out>(reference.out[i], reference.size[i], terms); });
}

TEST(Matmul, ForwardWithAndWithoutBias) {
    for (const auto& [N, C, OC] : kShapes) {
        SCOPED_TRACE(format("N %d C %d OC %d", N, C, OC));
        const auto inp = random_values<floatX>(static_cast<size_t>(N) * C, 1), weight = random_values<floatX>(static_cast<size_t>(OC) * C, 2);
        const auto bias = random_values<floatX>(OC, 3, 5.0);
        const DeviceBuffer<floatX> inp_device(to_storage<floatX>(inp)), weight_device(to_storage<floatX>(weight)), bias_device(to_storage<floatX>(bias));
        // The second bias meets what was cached for the first.
        const auto second_bias = random_values<floatX>(OC, 4, 5.0);
        const DeviceBuffer<floatX> second_bias_device(to_storage<floatX>(second_bias));
        for (const int biases : {0, 1, 2}) {
            const DeviceBuffer<floatX> out(static_cast<size_t>(N) * OC);
            const floatX* const bias_pointer = biases == 0 ? nullptr : biases == 1 ? bias_device.get() : second_bias_device.get();
            const std::vector<double>& bias_values = biases == 1 ? bias : second_bias;
            matmul_forward(context(), out, inp_device, weight_device, bias_pointer, N, C, OC, test_stream());
            // The bias is one more column of inp, with value 1.
            const int inner = C + (biases > 0);
            const Reference reference(
                N, OC, inner, [&, C = C](int i, int k) { return k == C ? 1.0 : inp[static_cast<size_t>(i) * C + k]; },
                [&, C = C](int k, int j) { return k == C ? bias_values[j] : weight[static_cast<size_t>(j) * C + k]; });
            check_product(biases == 0 ? "out" : biases == 1 ? "out with bias" : "out with another bias", out, reference, inner);
        }
    }
}

// Products that differ in one property only must not share what is cached.
TEST(Matmul, KindsAreToldApart) {
    const int n = 16;
    const size_t gap = 8;
    const auto a = random_values<floatX>(n * (n + gap), 1), b = random_values<floatX>(n * (n + gap), 2);
    const DeviceBuffer<floatX> a_device(to_storage<floatX>(a)), b_device(to_storage<floatX>(b));
    for (int kind = 0; kind < 32; kind++) {
        const bool transposed_a = kind & 1, transposed_b = kind & 2;
        const size_t a_row = n + (kind & 4 ? gap : 0), b_row = n + (kind & 8 ? gap : 0), out_row = n + (kind & 16 ? gap : 0);
        SCOPED_TRACE(format("kind %d", kind));
        const DeviceBuffer<floatX> out(n * (n + gap));
        const std::vector<floatX> before = out.download();
        MatrixDesc a_desc = matrix(a_device.get(), n, n), b_desc = matrix(b_device.get(), n, n), out_desc = matrix(out.get(), n, n);
        a_desc.ld = a_row, b_desc.ld = b_row, out_desc.ld = out_row;
        a_desc.transposed = transposed_a, b_desc.transposed = transposed_b;
        matmul(context(), out_desc, a_desc, b_desc, nullptr, false, test_stream());
        const Reference reference(
            n, n, n, [&](int i, int k) { return a[transposed_a ? k * a_row + i : i * a_row + k]; },
            [&](int k, int j) { return b[transposed_b ? j * b_row + k : k * b_row + j]; });
        std::vector<floatX> got = out.download();
        std::vector<double> product;
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++) {
                product.push_back(to_double(got[i * out_row + j]));
                got[i * out_row + j] = before[i * out_row + j];
            }
        expect_close("out", product, reference.out, [&](size_t i) { return product_bound<floatX>(reference.out[i], reference.size[i], n); });
        expect_same_bits("what lies between the rows of out", got, before);
    }
}

TEST(Matmul, BackwardInputAndWeight) {
    for (const auto& [N, C, OC] : kShapes) {
        SCOPED_TRACE(format("N %d C %d OC %d", N, C, OC));
        const size_t width = C, out_width = OC;
        const auto inp = random_values<floatX>(N * width, 1), weight = random_values<floatX>(out_width * C, 2), dout = random_values<floatX>(N * out_width, 3);
        const DeviceBuffer<floatX> inp_device(to_storage<floatX>(inp)), weight_device(to_storage<floatX>(weight)), dout_device(to_storage<floatX>(dout));
        const DeviceBuffer<floatX> dinp(N * width), dweight(out_width * C);
        matmul_backward_input(context(), dinp, dout_device, weight_device, N, C, OC, test_stream());
        matmul_backward_weight(context(), dweight, dout_device, inp_device, N, C, OC, test_stream());
        check_product("dinp", dinp, Reference(N, C, OC, [&](int i, int k) { return dout[i * out_width + k]; }, [&](int k, int j) { return weight[k * width + j]; }), OC);
        check_product("dweight", dweight, Reference(OC, C, N, [&](int i, int k) { return dout[k * out_width + i]; }, [&](int k, int j) { return inp[k * width + j]; }), N);
    }
}

// The core: rows farther apart than they are long, an fp32 result of bf16 tensors, all transposes, adding to what is there.
TEST(Matmul, DescriptorsWithDistancesTypesAndTransposes) {
    const int M = 24, N = 40, K = 72;
    const size_t gap = 8;
    for (const bool transposed_a : {false, true}) {
        for (const bool transposed_b : {false, true}) {
            for (const bool accumulate : {false, true}) {
                SCOPED_TRACE(format("transposed a %d b %d accumulate %d", transposed_a, transposed_b, accumulate));
                const size_t a_rows = transposed_a ? K : M, a_cols = transposed_a ? M : K, b_rows = transposed_b ? N : K, b_cols = transposed_b ? K : N;
                auto a = random_values<floatX>(a_rows * (a_cols + gap), 1), b = random_values<floatX>(b_rows * (b_cols + 2 * gap), 2);
                std::vector<double> before(M * (N + gap));
                for (size_t i = 0; i < before.size(); i++) before[i] = static_cast<double>(i % 7) - 3;
                // What lies between rows is never read ...
                for (size_t i = 0; i < a.size(); i++) a[i] = i % (a_cols + gap) < a_cols ? a[i] : std::nan("");
                for (size_t i = 0; i < b.size(); i++) b[i] = i % (b_cols + 2 * gap) < b_cols ? b[i] : std::nan("");
                const DeviceBuffer<floatX> a_device(to_storage<floatX>(a)), b_device(to_storage<floatX>(b));
                const DeviceBuffer<float> out(to_storage<float>(before));
                MatrixDesc a_desc = matrix(a_device.get(), a_rows, a_cols), b_desc = matrix(b_device.get(), b_rows, b_cols), out_desc = matrix(out.get(), M, N);
                a_desc.ld += gap, b_desc.ld += 2 * gap, out_desc.ld += gap;
                a_desc.transposed = transposed_a, b_desc.transposed = transposed_b;
                matmul(context(), out_desc, a_desc, b_desc, nullptr, accumulate, test_stream());
                Reference reference(
                    M, N, K, [&](int i, int k) { return a[transposed_a ? k * (a_cols + gap) + i : i * (a_cols + gap) + k]; },
                    [&](int k, int j) { return b[transposed_b ? j * (b_cols + 2 * gap) + k : k * (b_cols + 2 * gap) + j]; });
                // ... or written.
                std::vector<double> expected = before, size(before.size(), 0);
                for (int i = 0; i < M; i++)
                    for (int j = 0; j < N; j++) {
                        const size_t at = i * (N + gap) + j;
                        expected[at] = reference.out[i * N + j] + (accumulate ? before[at] : 0);
                        size[at] = reference.size[i * N + j] + (accumulate ? std::abs(before[at]) : 0);
                    }
                expect_close("out", out.values(), expected, [&](size_t i) { return size[i] == 0 ? 0 : product_bound<float>(expected[i], size[i], K + 1); });
            }
        }
    }
}

TEST(Matmul, TwoRunsGiveTheSameBits) {
    const int N = 127, C = 264, OC = 96;
    const DeviceBuffer<floatX> inp(to_storage<floatX>(random_values<floatX>(N * C, 1))), weight(to_storage<floatX>(random_values<floatX>(OC * C, 2)));
    const DeviceBuffer<floatX> first(N * OC), second(N * OC);
    matmul_forward(context(), first, inp, weight, nullptr, N, C, OC, test_stream());
    matmul_forward(context(), second, inp, weight, nullptr, N, C, OC, test_stream());
    expect_same_bits("out", second.download(), first.download());
}

// The message of the error that a call throws; "" if it throws none.
template <typename Function>
std::string message_of(Function&& function) {
    try {
        function();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

void expect_message(const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << "the message is \"" << message << "\", without \"" << part << "\"";
}

TEST(Matmul, RefusesWithWords) {
    const DeviceBuffer<floatX> buffer(64 * 64);
    floatX* const p = buffer;
    const auto forward = [&](floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int C, int OC) {
        return message_of([&] { matmul_forward(context(), out, inp, weight, bias, N, C, OC, test_stream()); });
    };
    expect_message(forward(p, p, p, nullptr, 4, 12, 16), "multiples of 8 elements");
    expect_message(forward(p, p, p, nullptr, 4, 12, 16), "a (4 x 12");
    expect_message(forward(p, p, p, nullptr, 4, 16, 20), "multiples of 8 elements");
    expect_message(forward(p, p, p, nullptr, 0, 16, 16), "shapes do not fit");
    expect_message(forward(p + 1, p, p, nullptr, 4, 16, 16), "out is at");
    expect_message(forward(p, p + 1, p, nullptr, 4, 16, 16), "a is at");
    expect_message(forward(p, p, p + 1, nullptr, 4, 16, 16), "b is at");
    expect_message(forward(p, p, p, p + 1, 4, 16, 16), "bias is at");
    expect_message(message_of([&] { matmul(context(), matrix(p, 8, 16), matrix(p, 8, 24), matrix(p, 16, 16), nullptr, false, test_stream()); }), "shapes do not fit");
    // fp32 and bf16 factors together: whatever the library says, with the shapes.
    const DeviceBuffer<float> floats(64 * 64);
    const DeviceBuffer<__nv_bfloat16> halves(64 * 64);
    const std::string mixed =
        message_of([&] { matmul(context(), matrix(floats.get(), 8, 8), matrix(floats.get(), 8, 8), matrix(halves.get(), 8, 8), nullptr, false, test_stream()); });
    expect_message(mixed, "(8 x 8 bf16");
    // Two streams would share the workspace.
    cudaStream_t other;
    CUDA_CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    MatmulContext own;
    const DeviceBuffer<floatX> inp(to_storage<floatX>(random_values<floatX>(64, 1))), out(64);
    matmul_forward(own, out, inp, inp, nullptr, 8, 8, 8, test_stream());
    expect_message(message_of([&] { matmul_forward(own, out, inp, inp, nullptr, 8, 8, 8, other); }), "share one workspace");
    synchronize();
    CUDA_CHECK(cudaStreamDestroy(other));
}

TEST(MatmulChoices, TravelAsBytes) {
    const int N = 32, C = 64, OC = 96;
    const DeviceBuffer<floatX> inp(to_storage<floatX>(random_values<floatX>(N * C, 1))), weight(to_storage<floatX>(random_values<floatX>(OC * C, 2)));
    const DeviceBuffer<floatX> planned(N * OC), first(N * OC), second(N * OC);
    MatmulContext rank0, rank1, dry;
    matmul_forward(rank0, first, inp, weight, nullptr, N, C, OC, test_stream());
    matmul_backward_input(rank0, planned, first, weight, N, C, OC, test_stream());
    EXPECT_EQ(rank0.num_choices(), 2u);
    EXPECT_EQ(rank1.num_choices(), 0u);
    const std::vector<unsigned char> bytes = rank0.export_choices();
    rank1.import_choices(bytes);
    EXPECT_EQ(rank1.num_choices(), 2u);
    EXPECT_EQ(rank1.export_choices(), bytes);
    matmul_forward(rank1, second, inp, weight, nullptr, N, C, OC, test_stream());
    EXPECT_EQ(rank1.export_choices(), bytes);
    expect_same_bits("out", second.download(), first.download());

    // A dry pass chooses and computes nothing.
    const DeviceBuffer<floatX> untouched(N * OC);
    const std::vector<floatX> before = untouched.download();
    dry.plan_only = true;
    matmul_backward_input(dry, planned, untouched, weight, N, C, OC, test_stream());
    matmul_forward(dry, untouched, inp, weight, nullptr, N, C, OC, test_stream());
    EXPECT_EQ(dry.export_choices(), bytes);
    expect_same_bits("out of a dry pass", untouched.download(), before);
}

TEST(MatmulChoices, BrokenOnesAreRefused) {
    const DeviceBuffer<floatX> inp(to_storage<floatX>(random_values<floatX>(64, 1))), out(64);
    MatmulContext source;
    matmul_forward(source, out, inp, inp, nullptr, 8, 8, 8, test_stream());
    const std::vector<unsigned char> good = source.export_choices();
    MatmulContext target;
    const auto import = [&](std::vector<unsigned char> bytes) { return message_of([&] { target.import_choices(bytes); }); };
    expect_message(import({}), "cut off");
    expect_message(import(std::vector<unsigned char>(good.begin(), good.begin() + 20)), "cut off");
    expect_message(import(std::vector<unsigned char>(good.begin(), good.end() - 1)), "cut off");
    const auto changed = [&](size_t at) {
        std::vector<unsigned char> bytes = good;
        bytes[at] ^= 1;
        return bytes;
    };
    expect_message(import(changed(0)), "something else");
    expect_message(import(changed(8)), "choose again");    // library version
    expect_message(import(changed(16)), "choose again");   // architecture
    expect_message(import(changed(24)), "another version of this program");
    expect_message(import(changed(32)), "0 entries");  // one follows
    std::vector<unsigned char> huge = good;
    huge.at(huge.size() - 1) = 0x7f;  // bytes of workspace
    expect_message(import(huge), "workspace");
    EXPECT_EQ(target.num_choices(), 0u) << "a refused import must leave nothing behind";

    // An algorithm the library does not know: found at its first use.
    std::vector<unsigned char> foreign = good;
    for (size_t i = foreign.size() - 8 - sizeof(cublasLtMatmulAlgo_t); i < foreign.size() - 8; i++) foreign[i] = 0xff;
    target.import_choices(foreign);
    const std::string message = message_of([&] { matmul_forward(target, out, inp, inp, nullptr, 8, 8, 8, test_stream()); });
    expect_message(message, "imported");
    expect_message(message, "8 x 8");
}

// Sum of N values in fp32: partial sums of a slice, then of the slices: each value passes at most slice rows + slices additions, u each, relative to the
// sum of magnitudes; one rounding to floatX.
TEST(BiasBackward, SumsColumns) {
    for (const auto& [N, OC] : std::vector<std::pair<int, int>>{{1, 8}, {1, 1032}, {63, 24}, {64, 8}, {65, 200}, {127, 1024}, {1000, 16}, {8193, 8}, {20000, 24}}) {
        SCOPED_TRACE(format("N %d OC %d", N, OC));
        const size_t width = OC;
        const auto dout = random_values<floatX>(N * width, 1);
        const DeviceBuffer<floatX> dout_device(to_storage<floatX>(dout)), dbias(OC), again(OC);
        const DeviceBuffer<float> scratch(bias_backward_scratch_count(N, OC));
        bias_backward(dbias, scratch, dout_device, N, OC, test_stream());
        std::vector<double> expected(OC), size(OC);
        for (int i = 0; i < N; i++)
            for (int j = 0; j < OC; j++) {
                expected[j] += dout[i * width + j];
                size[j] += std::abs(dout[i * width + j]);
            }
        const int slices = bias_backward_slices(N), additions = ceil_div(N, slices) + slices;
        expect_close("dbias", dbias.values(), expected, [&](size_t j) { return product_bound<floatX>(expected[j], size[j], additions); });
        bias_backward(again, scratch, dout_device, N, OC, test_stream());
        expect_same_bits("dbias", again.download(), dbias.download());
    }
    const std::string message = message_of([] { bias_backward(nullptr, nullptr, nullptr, 4, 12, test_stream()); });
    expect_message(message, "multiple of 8");
}

}  // namespace
