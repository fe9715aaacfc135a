// Attention forward and backward against a loop in double precision that follows the definition and bounds, along the way, what fp32 arithmetic may
// make of it.
#include "dev/test/kernel_test.cuh"

#include <memory>
#include <string>

#include "llmc/attention.cuh"

namespace {

constexpr double kUnit = kRoundoff32;
constexpr double kStored = kRoundoff<floatX>;
constexpr double kUnderflow = 1e-36;  // more than underflow to zero loses, in fp32 or bf16

// Where (batch, token, head, dim) lies: tokens `row` elements apart, sequences `batch`, heads side by side from `first`.
struct Layout {
    int B, T, heads, HD;
    size_t first, row, batch;
    size_t at(int b, int t, int h, int d) const { return first + b * batch + t * row + static_cast<size_t>(h) * HD + d; }
};

// A buffer in which every element that no tensor owns is a guard: a NaN with its own bits, which no kernel may read into a result or overwrite.
class Buffer {
public:
    Buffer(size_t count) : values_(count, to_storage<floatX>(std::nanf(""))), owned_(count, 0), device_(count) {}

    template <typename Function>
    void fill(const Layout& layout, Function&& value) {
        for (int b = 0; b < layout.B; b++)
            for (int t = 0; t < layout.T; t++)
                for (int h = 0; h < layout.heads; h++)
                    for (int d = 0; d < layout.HD; d++) {
                        values_[layout.at(b, t, h, d)] = to_storage<floatX>(value(b, t, h, d));
                        owned_[layout.at(b, t, h, d)] = 1;
                    }
    }
    void own(const Layout& layout) {
        fill(layout, [](int, int, int, int) { return std::nanf(""); });
    }
    void upload() { device_.upload(values_); }
    void download() { result_ = device_.download(); }
    floatX* device(const Layout& layout) { return device_.get() + layout.first; }
    double value(size_t i) const { return to_double(values_[i]); }
    double result(size_t i) const { return to_double(result_[i]); }
    const std::vector<floatX>& results() const { return result_; }

    void expect_guards_untouched(const char* name) const {
        for (size_t i = 0; i < values_.size(); i++) {
            if (!owned_[i] && memcmp(&values_[i], &result_[i], sizeof(floatX)) != 0) {
                ADD_FAILURE() << name << ": element " << i << " belongs to no output and was overwritten with " << to_double(result_[i]);
                return;
            }
        }
    }

private:
    std::vector<floatX> values_, result_;
    std::vector<char> owned_;
    DeviceBuffer<floatX> device_;
};

enum class Starts { kNone, kDocuments, kWindow, kBeyond };
enum class Values { kNormal, kExtreme };

struct Case {
    int B, Tq, Tkv, NH, NKV, HD;
    Starts starts = Starts::kNone;
    bool packed = true;  // q, k, v side by side in one row; else apart, with gaps everywhere and gradients in a layout of their own
    Values values = Values::kNormal;
};

std::ostream& operator<<(std::ostream& stream, const Case& c) {
    return stream << "B " << c.B << " Tq " << c.Tq << " Tkv " << c.Tkv << " NH " << c.NH << " NKV " << c.NKV << " HD " << c.HD << " starts "
                  << static_cast<int>(c.starts) << " packed " << c.packed << " values " << static_cast<int>(c.values);
}

// Worst error over its bound, for the report of a failure.
struct Worst {
    double ratio = 0;
    std::string where;
    void see(double got, double want, double bound, const char* name, int b, int t, int h, int d) {
        const double error = std::abs(got - want);
        const double r = got == want ? 0 : error / bound;
        if (!(r <= ratio)) {
            ratio = std::isnan(r) ? INFINITY : r;
            where = format("%s[b %d, t %d, head %d, d %d] is %.9g, not %.9g: error %.3g, bound %.3g", name, b, t, h, d, got, want, error, bound);
        }
    }
};

struct Problem {
    Case c;
    Layout q, k, v, out, dout, dq, dk, dv;
    std::vector<int> starts;  // (B, Tq)
    std::unique_ptr<Buffer> inputs, outs, douts, dqk, dvs;
    Buffer *q_in, *dq_out, *dk_out;
    std::unique_ptr<DeviceBuffer<float>> lse, scratch;
    std::unique_ptr<DeviceBuffer<int>> starts_device;
    AttentionArgs args = {};

    explicit Problem(const Case& c_) : c(c_) {
        const size_t NHD = static_cast<size_t>(c.NH) * c.HD, KVD = static_cast<size_t>(c.NKV) * c.HD;
        const size_t gap = c.packed ? 0 : 8;
        size_t input_count, dqk_count, dv_count;
        if (c.packed && c.Tq == c.Tkv) {
            const size_t row = NHD + 2 * KVD + 16, batch = row * c.Tq + 24;
            q = {c.B, c.Tq, c.NH, c.HD, 8, row, batch};
            k = {c.B, c.Tkv, c.NKV, c.HD, 8 + NHD, row, batch};
            v = {c.B, c.Tkv, c.NKV, c.HD, 8 + NHD + KVD, row, batch};
            input_count = c.B * batch + 8;
            dq = q, dk = k, dv = v;
            dqk_count = dv_count = input_count;
        } else {
            // v lies farther apart than k, as it does where q and k are normalised into a buffer of their own.
            const size_t q_row = NHD + gap, k_row = KVD + gap, v_row = KVD + 4 * gap;
            q = {c.B, c.Tq, c.NH, c.HD, 8, q_row, q_row * c.Tq + gap};
            k = {c.B, c.Tkv, c.NKV, c.HD, 8 + c.B * q.batch, k_row, k_row * c.Tkv + gap};
            v = {c.B, c.Tkv, c.NKV, c.HD, k.first + c.B * k.batch, v_row, v_row * c.Tkv + 2 * gap};
            input_count = v.first + c.B * v.batch + 8;
            dq = {c.B, c.Tq, c.NH, c.HD, 16, NHD + 2 * gap, (NHD + 2 * gap) * c.Tq};
            const size_t dkv = 16 + c.B * dq.batch;
            dk = {c.B, c.Tkv, c.NKV, c.HD, dkv, KVD + gap, (KVD + gap) * c.Tkv};
            dqk_count = dkv + c.B * dk.batch + 8;
            dv = {c.B, c.Tkv, c.NKV, c.HD, 8, KVD + 3 * gap, (KVD + 3 * gap) * c.Tkv + 8};
            dv_count = 8 + c.B * dv.batch + 8;
        }
        out = {c.B, c.Tq, c.NH, c.HD, 8, NHD + gap, (NHD + gap) * c.Tq};
        dout = {c.B, c.Tq, c.NH, c.HD, 16, NHD + 2 * gap, (NHD + 2 * gap) * c.Tq};

        std::mt19937 random(1);
        std::normal_distribution<float> normal;
        inputs = std::make_unique<Buffer>(input_count);
        if (c.values == Values::kNormal) {
            inputs->fill(q, [&](int, int, int, int) { return normal(random); });
            inputs->fill(k, [&](int, int, int, int) { return normal(random); });
        } else {
            // Logits of +-10^4 and 0 from one product each, so that the reference's bound on their error stays small.
            const float root = std::sqrt(1e4f * std::sqrt(static_cast<float>(c.HD)));
            inputs->fill(q, [&](int, int t, int, int d) { return d == t % c.HD ? (t % 3 == 0 ? -root : root) : 0.0f; });
            inputs->fill(k, [&](int, int t, int, int d) { return (t + d) % 4 == 0 ? 0.0f : (t + d) % 4 == 1 ? -root : root; });
        }
        inputs->fill(v, [&](int, int, int, int) { return normal(random); });
        outs = std::make_unique<Buffer>(out.first + c.B * out.batch + 8);
        outs->own(out);
        douts = std::make_unique<Buffer>(dout.first + c.B * dout.batch + 8);
        douts->fill(dout, [&](int, int, int, int) { return normal(random); });
        dqk = std::make_unique<Buffer>(dqk_count);
        dqk->own(dq);
        dqk->own(dk);
        if (c.packed && c.Tq == c.Tkv) {
            dqk->own(dv);
        } else {
            dvs = std::make_unique<Buffer>(dv_count);
            dvs->own(dv);
        }

        for (int b = 0; b < c.B; b++) {
            int document = -3;
            for (int i = 0; i < c.Tq; i++) {
                const int last = c.Tkv - c.Tq + i;
                if (random() % 19 == 0) document = last;
                switch (c.starts) {
                    case Starts::kNone: starts.push_back(0); break;
                    case Starts::kDocuments: starts.push_back(document); break;
                    case Starts::kWindow: starts.push_back(last - 20); break;
                    case Starts::kBeyond: starts.push_back(i % 5 == 2 || i < 3 ? last + 1 : i % 5 == 3 ? c.Tkv + 100 : last / 2); break;
                }
            }
        }
        starts_device = std::make_unique<DeviceBuffer<int>>(starts.size());
        starts_device->upload(starts);
        args.B = c.B, args.Tq = c.Tq, args.Tkv = c.Tkv, args.NH = c.NH, args.NKV = c.NKV, args.HD = c.HD;
        args.q_row = q.row, args.k_row = k.row, args.v_row = v.row, args.o_row = out.row;
        args.q_batch = q.batch, args.k_batch = k.batch, args.v_batch = v.batch, args.o_batch = out.batch;
        if (!(c.packed && c.Tq == c.Tkv)) {
            args.dq_row = dq.row, args.dk_row = dk.row, args.dv_row = dv.row, args.dq_batch = dq.batch, args.dk_batch = dk.batch, args.dv_batch = dv.batch;
        }
        args.do_row = dout.row, args.do_batch = dout.batch;
        args.scale = 1.0f / std::sqrt(static_cast<float>(c.HD));
        args.key_start = c.starts == Starts::kNone ? nullptr : starts_device->get();
        lse = std::make_unique<DeviceBuffer<float>>(static_cast<size_t>(c.B) * c.NH * c.Tq);
        scratch = std::make_unique<DeviceBuffer<float>>(attention_backward_scratch_count(args));
    }

    Buffer& dv_buffer() { return dvs ? *dvs : *dqk; }

    void run() {
        for (Buffer* buffer : {inputs.get(), outs.get(), douts.get(), dqk.get(), dvs.get()})
            if (buffer != nullptr) buffer->upload();
        lse->upload(std::vector<float>(lse->count(), std::nanf("")));
        scratch->upload(std::vector<float>(scratch->count(), std::nanf("")));
        attention_forward(outs->device(out), lse->get(), inputs->device(q), inputs->device(k), inputs->device(v), args, test_stream());
        attention_backward(dqk->device(dq), dqk->device(dk), dv_buffer().device(dv), scratch->get(), douts->device(dout), inputs->device(q),
                           inputs->device(k), inputs->device(v), outs->device(out), lse->get(), args, test_stream());
        for (Buffer* buffer : {inputs.get(), outs.get(), douts.get(), dqk.get(), dvs.get()})
            if (buffer != nullptr) buffer->download();
    }

    // The definition, in double, with bounds. Names follow the header: s, p, dp, ds. u = 2^-24.
    //   score       q is scaled (1 rounding) and multiplied with k by HD fused multiply-adds in up to 4 chains, joined by 3 additions:
    //               |error of s_j| <= es_j = (HD + 4) u scale sum |q||k|
    //   weight      exp(s_j - m) against a running maximum m that later grows to the last one: the differences taken add up to R_j = max s - s_j, each
    //               rounded (R_j u); the exponential is within 2 ulp = 4 u, and so is each rescaling, applied with one rounding; a rescaling comes at
    //               most once every 16 keys (the smallest tile): relative error <= e^x - 1 =: r_j, x = es_j + (R_j + 4 + 6 tiles) u
    //   out         sum p_j v_j over sum p_j, with p normalised and beta = sum p_j r_j: |error| <= (sum p_j r_j |v_j| + beta |out|) / (1 - beta), plus
    //               2 Tkv + 4 roundings of the sums and the quotient relative to sum p_j |v_j|, plus the rounding to floatX
    //   lse         -log(1 - beta), plus roundings of the sum (Tkv), the logarithm (4 u |log|) and the last addition (u |lse|)
    //   backward    p again from s and lse: relative error rp_j = e^x - 1, x = es_j + error of lse + u |s_j - lse| + 4 u;
    //               dp: (HD + 4) u sum |dout||v|;  D: (HD + 8) u sum |dout||out| + sum |dout| (error of out);
    //               ds = p (dp - D): p (rp (|dp - D| + e) + e + 2 u |dp - D|), e the errors of dp and D together;
    //               dq, dk, dv: those errors times |k|, |q|, |dout|, plus one rounding for each term and 3 for the scalings, relative to the sum of
    //               magnitudes, plus the rounding to floatX
    // The bounds are first order in u except for the exponentials; 2 % are added for the rest.
    void check() {
        Worst worst;
        const int group = c.NH / c.NKV, tiles = ceil_div(c.Tkv, 16) + 1;
        const double scale = args.scale, slack = 1.02;
        const std::vector<float> lse_got = lse->download();
        const size_t kv_count = static_cast<size_t>(c.Tkv) * c.HD;
        for (int b = 0; b < c.B; b++) {
            for (int kvh = 0; kvh < c.NKV; kvh++) {
                std::vector<double> dk_want(kv_count), dk_error(kv_count), dk_size(kv_count), dv_want(kv_count), dv_error(kv_count), dv_size(kv_count);
                std::vector<double> kk(kv_count), vv(kv_count);
                for (int j = 0; j < c.Tkv; j++)
                    for (int d = 0; d < c.HD; d++) {
                        kk[static_cast<size_t>(j) * c.HD + d] = inputs->value(k.at(b, j, kvh, d));
                        vv[static_cast<size_t>(j) * c.HD + d] = inputs->value(v.at(b, j, kvh, d));
                    }
                for (int h = kvh * group; h < (kvh + 1) * group; h++) {
                    for (int i = 0; i < c.Tq; i++) {
                        const int begin = std::max(0, starts[static_cast<size_t>(b) * c.Tq + i]), end = std::min(c.Tkv, c.Tkv - c.Tq + i + 1);
                        const float got_lse = lse_got[(static_cast<size_t>(b) * c.NH + h) * c.Tq + i];
                        if (begin >= end) {  // sees no key
                            EXPECT_EQ(got_lse, -INFINITY) << c << ": lse of a query without keys, b " << b << " head " << h << " query " << i;
                            for (int d = 0; d < c.HD; d++) {
                                worst.see(outs->result(out.at(b, i, h, d)), 0, 0, "out without keys", b, i, h, d);
                                worst.see(dqk->result(dq.at(b, i, h, d)), 0, 0, "dq without keys", b, i, h, d);
                            }
                            continue;
                        }
                        std::vector<double> qq(c.HD), oo(c.HD), oo_error(c.HD), grad(c.HD);
                        for (int d = 0; d < c.HD; d++) {
                            qq[d] = inputs->value(q.at(b, i, h, d));
                            grad[d] = douts->value(dout.at(b, i, h, d));
                        }
                        std::vector<double> s(end), es(end), p(end), r(end);
                        double max = -INFINITY, sum = 0, beta = 0;
                        for (int j = begin; j < end; j++) {
                            for (int d = 0; d < c.HD; d++) {
                                const double term = scale * qq[d] * kk[static_cast<size_t>(j) * c.HD + d];
                                s[j] += term;
                                es[j] += std::abs(term);
                            }
                            es[j] *= (c.HD + 4) * kUnit;
                            max = std::max(max, s[j]);
                        }
                        for (int j = begin; j < end; j++) sum += std::exp(s[j] - max);
                        for (int j = begin; j < end; j++) {
                            p[j] = std::exp(s[j] - max) / sum;
                            r[j] = std::expm1(es[j] + (max - s[j] + 4 + 6 * tiles) * kUnit);
                            beta += p[j] * (p[j] > 0 ? r[j] : 0);
                        }
                        ASSERT_LT(beta, 0.9) << c << ": the bound has no meaning here";
                        const double lse_want = max + std::log(sum);
                        const double lse_error = slack * (-std::log1p(-beta) + kUnit * (std::abs(lse_want) + 4 * std::log(sum) + c.Tkv));
                        worst.see(got_lse, lse_want, lse_error, "lse", b, i, h, 0);
                        double D = 0, D_error = 0;
                        for (int d = 0; d < c.HD; d++) {
                            double size = 0, error = 0;
                            for (int j = begin; j < end; j++) {
                                const double pv = p[j] * vv[static_cast<size_t>(j) * c.HD + d];
                                oo[d] += pv;
                                size += std::abs(pv);
                                error += std::abs(pv) * (p[j] > 0 ? r[j] : 0);
                            }
                            oo_error[d] = slack * ((error + beta * std::abs(oo[d])) / (1 - beta) + (2 * c.Tkv + 4) * kUnit * size) + kUnderflow;
                            oo_error[d] += kStored * (std::abs(oo[d]) + oo_error[d]);
                            worst.see(outs->result(out.at(b, i, h, d)), oo[d], oo_error[d], "out", b, i, h, d);
                            D += grad[d] * oo[d];
                            D_error += std::abs(grad[d]) * oo_error[d] + (c.HD + 8) * kUnit * std::abs(grad[d] * oo[d]);
                        }
                        std::vector<double> dq_want(c.HD), dq_error(c.HD), dq_size(c.HD);
                        for (int j = begin; j < end; j++) {
                            const double* const kj = &kk[static_cast<size_t>(j) * c.HD];
                            const double* const vj = &vv[static_cast<size_t>(j) * c.HD];
                            double dp = 0, dp_error = 0;
                            for (int d = 0; d < c.HD; d++) {
                                dp += grad[d] * vj[d];
                                dp_error += std::abs(grad[d] * vj[d]);
                            }
                            const double e = dp_error * (c.HD + 4) * kUnit + D_error, difference = std::abs(dp - D);
                            const double rp = p[j] > 0 ? std::expm1(es[j] + lse_error + (std::abs(s[j] - lse_want) + 4) * kUnit) : 0;
                            const double ds = p[j] * (dp - D), ds_error = p[j] * (rp * (difference + e) + e + 2 * kUnit * difference) + kUnderflow;
                            for (int d = 0; d < c.HD; d++) {
                                const size_t jd = static_cast<size_t>(j) * c.HD + d;
                                dq_want[d] += scale * ds * kj[d];
                                dq_error[d] += scale * ds_error * std::abs(kj[d]);
                                dq_size[d] += scale * (std::abs(ds) + ds_error) * std::abs(kj[d]);
                                dk_want[jd] += scale * ds * qq[d];
                                dk_error[jd] += scale * ds_error * std::abs(qq[d]);
                                dk_size[jd] += scale * (std::abs(ds) + ds_error) * std::abs(qq[d]);
                                dv_want[jd] += p[j] * grad[d];
                                dv_error[jd] += (p[j] * rp + kUnderflow) * std::abs(grad[d]);
                                dv_size[jd] += p[j] * (1 + rp) * std::abs(grad[d]);
                            }
                        }
                        for (int d = 0; d < c.HD; d++) {
                            const double bound = slack * (dq_error[d] + (c.Tkv + 3) * kUnit * dq_size[d]) + kUnderflow;
                            worst.see(dqk->result(dq.at(b, i, h, d)), dq_want[d], bound + kStored * (std::abs(dq_want[d]) + bound), "dq", b, i, h, d);
                        }
                    }
                }
                const double terms = (static_cast<double>(group) * c.Tq + 3) * kUnit;
                for (int j = 0; j < c.Tkv; j++)
                    for (int d = 0; d < c.HD; d++) {
                        const size_t jd = static_cast<size_t>(j) * c.HD + d;
                        const double dk_bound = slack * (dk_error[jd] + terms * dk_size[jd]) + kUnderflow, dv_bound = slack * (dv_error[jd] + terms * dv_size[jd]) + kUnderflow;
                        worst.see(dqk->result(dk.at(b, j, kvh, d)), dk_want[jd], dk_bound + kStored * (std::abs(dk_want[jd]) + dk_bound), "dk", b, j, kvh, d);
                        worst.see(dv_buffer().result(dv.at(b, j, kvh, d)), dv_want[jd], dv_bound + kStored * (std::abs(dv_want[jd]) + dv_bound), "dv", b, j, kvh, d);
                    }
            }
        }
        EXPECT_LE(worst.ratio, 1) << c << ": " << worst.where;
        outs->expect_guards_untouched("out");
        dqk->expect_guards_untouched("dq, dk");
        dv_buffer().expect_guards_untouched("dv");
        largest_ratio = worst.ratio;
    }
    double largest_ratio = 0;
};

void run_and_check(const Case& c) {
    Problem problem(c);
    problem.run();
    problem.check();
    ::testing::Test::RecordProperty("largest_error_over_bound", std::to_string(problem.largest_ratio));
}

class AttentionTest : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionTest, MatchesTheDefinition) { run_and_check(GetParam()); }

// Every length with every kind of tile (head_dim up to 64, 128, 256), ratios of heads 1, 2 and 7.
INSTANTIATE_TEST_SUITE_P(Lengths, AttentionTest,
                         ::testing::Values(Case{2, 1, 1, 7, 1, 64}, Case{1, 17, 17, 2, 2, 64}, Case{2, 64, 64, 4, 2, 64}, Case{1, 127, 127, 7, 1, 64},
                                           Case{1, 200, 200, 2, 1, 64}, Case{3, 1, 1, 2, 2, 128}, Case{1, 17, 17, 14, 2, 128}, Case{1, 64, 64, 2, 1, 128},
                                           Case{1, 127, 127, 2, 2, 128}, Case{1, 200, 200, 2, 1, 128}, Case{1, 1, 1, 2, 1, 256}, Case{2, 17, 17, 2, 2, 256},
                                           Case{1, 64, 64, 2, 1, 256}, Case{1, 127, 127, 1, 1, 256}));
INSTANTIATE_TEST_SUITE_P(HeadDims, AttentionTest,
                         ::testing::Values(Case{2, 70, 70, 4, 2, 8}, Case{1, 70, 70, 3, 3, 16}, Case{2, 70, 70, 6, 3, 32}, Case{1, 70, 70, 4, 2, 80},
                                           Case{1, 70, 70, 4, 4, 96}, Case{1, 35, 35, 7, 1, 136}, Case{1, 35, 35, 2, 1, 192}));
INSTANTIATE_TEST_SUITE_P(Strides, AttentionTest,
                         ::testing::Values(Case{2, 65, 65, 4, 2, 64, Starts::kNone, false}, Case{2, 33, 33, 7, 1, 96, Starts::kNone, false},
                                           Case{2, 19, 19, 2, 2, 200, Starts::kNone, false}));
// Fewer queries than keys: a key/value cache. More: the first ones see no key.
INSTANTIATE_TEST_SUITE_P(QueriesAndKeys, AttentionTest,
                         ::testing::Values(Case{2, 1, 130, 4, 2, 64, Starts::kNone, false}, Case{1, 5, 70, 7, 1, 32, Starts::kNone, false},
                                           Case{1, 33, 100, 2, 2, 128, Starts::kWindow, false}, Case{2, 20, 12, 2, 1, 64, Starts::kNone, false},
                                           Case{1, 150, 70, 2, 1, 80, Starts::kNone, false}, Case{1, 40, 3, 2, 1, 256, Starts::kNone, false}));
INSTANTIATE_TEST_SUITE_P(KeyStart, AttentionTest,
                         ::testing::Values(Case{2, 127, 127, 4, 2, 64, Starts::kDocuments}, Case{2, 200, 200, 2, 1, 32, Starts::kWindow},
                                           Case{2, 90, 90, 4, 2, 64, Starts::kBeyond}, Case{1, 90, 90, 2, 1, 96, Starts::kDocuments},
                                           Case{1, 60, 60, 2, 1, 128, Starts::kBeyond, false}, Case{1, 60, 60, 2, 2, 256, Starts::kDocuments},
                                           Case{2, 1, 1, 2, 1, 64, Starts::kBeyond}));
INSTANTIATE_TEST_SUITE_P(ExtremeLogits, AttentionTest,
                         ::testing::Values(Case{1, 100, 100, 4, 2, 64, Starts::kNone, true, Values::kExtreme}, Case{1, 70, 70, 2, 1, 128, Starts::kDocuments, true, Values::kExtreme},
                                           Case{1, 40, 40, 2, 1, 256, Starts::kNone, false, Values::kExtreme}));

TEST(Attention, TwoRunsGiveTheSameBits) {
    for (const Case& c : {Case{2, 100, 100, 7, 1, 64}, Case{1, 70, 70, 4, 2, 128, Starts::kDocuments}, Case{1, 40, 40, 2, 1, 256}}) {
        Problem first(c), second(c);
        first.run();
        second.run();
        const auto same = [](const std::vector<floatX>& a, const std::vector<floatX>& b) { return memcmp(a.data(), b.data(), a.size() * sizeof(floatX)) == 0; };
        EXPECT_TRUE(same(first.outs->results(), second.outs->results())) << c;
        EXPECT_TRUE(same(first.dqk->results(), second.dqk->results())) << c;
        const std::vector<float> first_lse = first.lse->download(), second_lse = second.lse->download();
        EXPECT_EQ(memcmp(first_lse.data(), second_lse.data(), first_lse.size() * sizeof(float)), 0) << c;
    }
}

// A NaN in one head must come out of that head and of nobody else's: a hidden one would train on as if nothing had happened.
TEST(Attention, NanStaysVisibleAndInItsHead) {
    Problem problem(Case{1, 40, 40, 4, 2, 64});
    problem.inputs->fill(Layout{1, 1, 1, 1, problem.q.at(0, 33, 1, 5), 0, 0}, [](int, int, int, int) { return std::nanf(""); });
    problem.run();
    for (int h = 0; h < 4; h++)
        for (int t = 0; t < 40; t++)
            for (int d = 0; d < 64; d++) {
                const bool poisoned = h == 1 && t == 33;
                ASSERT_EQ(std::isnan(problem.outs->result(problem.out.at(0, t, h, d))), poisoned) << "out, head " << h << " token " << t;
                ASSERT_EQ(std::isnan(problem.dqk->result(problem.dq.at(0, t, h, d))), poisoned) << "dq, head " << h << " token " << t;
            }
    for (int t = 0; t < 40; t++)
        for (int h = 0; h < 2; h++) {
            // Key/value head 0 serves query heads 0 and 1. Query 33 sees keys 0 to 33.
            if (h == 0 && t <= 33) { ASSERT_TRUE(std::isnan(problem.dqk->result(problem.dk.at(0, t, h, 0)))) << "dk, token " << t; }
            if (h == 1) { ASSERT_FALSE(std::isnan(problem.dqk->result(problem.dk.at(0, t, h, 0)))) << "dk, head " << h << " token " << t; }
        }
}

template <typename Function>
void expect_refused(const char* text, Function&& change) {
    AttentionArgs args = packed_attention_args(1, 4, 4, 2, 64);
    change(args);
    try {
        checked_attention_args(args);
        ADD_FAILURE() << "not refused: " << text;
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
}

TEST(Attention, RefusesWhatItCannotDo) {
    expect_refused("head_dim 12", [](AttentionArgs& args) { args.HD = 12; });
    expect_refused("head_dim 264", [](AttentionArgs& args) { args.HD = 264; });
    expect_refused("4 query heads and 3 key/value heads", [](AttentionArgs& args) { args.NKV = 3; });
    expect_refused("rows of k are 100 elements", [](AttentionArgs& args) { args.k_row = 100; });
    expect_refused("rows of out are 248 elements", [](AttentionArgs& args) { args.o_row = 248; });
    expect_refused("rows of dv are 64 elements", [](AttentionArgs& args) { args.dv_row = 64; });
    expect_refused("batches 4", [](AttentionArgs& args) { args.v_batch = 4; });
    expect_refused("B = 0", [](AttentionArgs& args) { args.B = 0; });
    AttentionArgs args = packed_attention_args(1, 4, 4, 2, 64);
    EXPECT_THROW(attention_forward(reinterpret_cast<floatX*>(8), nullptr, nullptr, nullptr, nullptr, args, test_stream()), Error);
}

}  // namespace
