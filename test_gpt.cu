// test_gpt: the whole model against PyTorch. For each reference dump (dev/reference/README.md): logits, loss, every gradient, ten AdamW steps.
//
//   ./test_gpt [FOLDER ...]        default: llama, qwen2, qwen3 and llama64 in dev/reference
//
// FP32 build: first loss within 1e-5 relative, every one of the ten losses within 1e-4, every gradient within 1e-4 relative L2 of the float32
// reference. BF16 build: for every tensor the distance to the float32 reference may be at most twice that of PyTorch's own bf16 run.
// It runs the trainer's own step (llmc/trainer.cuh). Exit status 0: all within; 1: not.
#include <cmath>
#include <cstdio>

#include "llmc/device_setup.cuh"
#include "llmc/safetensors.h"
#include "llmc/trainer.cuh"
#include "llmc/weights.cuh"

namespace {

constexpr bool kBf16 = !std::is_same_v<floatX, float>;

// ||a - b|| / ||b||, in double.
double relative_distance(const std::vector<float>& a, const std::vector<float>& b) {
    CHECK(a.size() == b.size(), "comparing %zu values with %zu", a.size(), b.size());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        difference += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
        norm += static_cast<double>(b[i]) * b[i];
    }
    return std::sqrt(difference / norm);
}

class Comparison {
public:
    // note: ends the summary line.
    Comparison(const SafetensorsFile& reference, const std::string& folder, const char* note) : reference_(reference), folder_(folder), note_(note) {}

    // One tensor against float32.NAME. fp32_bound applies in an FP32 build; a BF16 build takes twice the distance of bfloat16.NAME.
    void tensor(const std::string& name, const std::vector<float>& ours, double fp32_bound) {
        const std::vector<float> expected = reference_.floats("float32." + name);
        judge(name, relative_distance(ours, expected), kBf16 ? 2 * relative_distance(reference_.floats("bfloat16." + name), expected) : fp32_bound);
    }

    // One number, relative.
    void number(const std::string& name, double ours, double expected, double bound) { judge(name, std::fabs(ours - expected) / std::fabs(expected), bound); }

    // Prints the summary line; true if everything was within its bound.
    bool finish() const {
        printf("%-24s %s: %d values within the bound, %d not; closest to it: %s at %.2f of the bound%s\n", folder_.c_str(), failed_ ? "FAILED" : "ok", passed_, failed_,
               worst_name_.c_str(), worst_, note_);
        return failed_ == 0 && passed_ > 0;
    }

private:
    void judge(const std::string& name, double distance, double bound) {
        const bool fine = distance <= bound;  // false for a NaN
        passed_ += fine;
        failed_ += !fine;
        if (bound > 0 && distance / bound > worst_) {
            worst_ = distance / bound;
            worst_name_ = name;
        }
        if (!fine) printf("  FAILED %s: distance %.3e, allowed %.3e\n", name.c_str(), distance, bound);
    }

    const SafetensorsFile& reference_;
    std::string folder_;
    const char* note_;
    int passed_ = 0, failed_ = 0;
    double worst_ = 0;
    std::string worst_name_;
};

double hyper_parameter(const SafetensorsFile& reference, const char* name) {
    const auto found = reference.metadata().find(name);
    CHECK(found != reference.metadata().end(), "%s: the metadata has no '%s'", reference.path().c_str(), name);
    return std::stod(found->second);
}

bool check_folder(const std::string& folder, const Process& process, const Communicator& comm) {
    const SafetensorsFile weights(folder + "/model.safetensors"), reference(folder + "/reference.safetensors");
    ModelConfig config = config_from_json_file(folder + "/config.json");
    config.validate();
    const std::vector<size_t> shape = reference.get("input_ids").shape;
    const int B = static_cast<int>(shape.at(0)), T = static_cast<int>(shape.at(1)), N = B * T;
    const int steps = static_cast<int>(hyper_parameter(reference, "steps"));

    ZeroConfig zero_config;
    zero_config.beta1 = hyper_parameter(reference, "beta1");
    zero_config.beta2 = hyper_parameter(reference, "beta2");
    zero_config.eps = hyper_parameter(reference, "eps");
    zero_config.weight_decay = hyper_parameter(reference, "weight_decay");
    Trainer trainer(comm, config, zero_config, Recompute::kNone, B, T, /*device_memory_bytes=*/0);
    trainer.choose_products(process);
    load_parameters(trainer.zero, weights, trainer.stream);
    trainer.zero.start_optimizer();

    HostBatch batch(N);
    const BatchBuffers ids = batch.buffers();
    const std::vector<int64_t> input_ids = reference.integers("input_ids"), targets = reference.integers("targets");
    for (int i = 0; i < N; ++i) {
        ids.inputs[i] = static_cast<int>(input_ids[i]);
        ids.targets[i] = static_cast<int>(targets[i]);
    }
    std::vector<size_t> scratch;
    sort_positions(ids.sorted_positions, ids.inputs, N, config.vocab_size, scratch);

    Comparison compare(reference, folder, attention_uses_tensor_cores(config.head_dim) ? "; attention on tensor cores" : "");
    // Logits before anything else, padded columns dropped.
    const int V = config.vocab_size, Vp = config.padded_vocab();
    trainer.copy_ids(ids, N);
    const floatX* device_logits = nullptr;
    trainer.queue_forward(B, [&] { device_logits = trainer.model.head_rows(trainer.zero, N, 0, N); });
    const std::vector<float> padded = read_floats(device_logits, static_cast<size_t>(N) * Vp, trainer.stream);
    std::vector<float> logits;
    for (int i = 0; i < N; ++i) logits.insert(logits.end(), padded.begin() + static_cast<size_t>(i) * Vp, padded.begin() + static_cast<size_t>(i) * Vp + V);
    compare.tensor("logits", logits, 1e-4);

    std::vector<float> losses, norms;
    for (int step = 0; step < steps; ++step) {
        StepInputs inputs;
        inputs.step = step;
        inputs.lr = hyper_parameter(reference, "lr");
        inputs.max_norm = hyper_parameter(reference, "clip");
        trainer.queue_step(inputs, ids);
        const StepState result = trainer.read_state();
        losses.push_back(result.loss);
        norms.push_back(result.grad_norm);
        if (step > 0) continue;
        for (const Parameter& p : trainer.table.parameters) {
            const int b = trainer.zero.layout().bucket_of_unit[p.unit];
            const ZeroEngine::Owned owned = trainer.zero.owned_by_this_rank(b);
            const size_t first = trainer.zero.layout().unit_begin[p.unit] + p.offset - owned.begin;
            compare.tensor("grad." + p.name, trainer.zero.gradients().read(b, first, p.count()), 1e-4);
        }
    }
    if (!kBf16) {
        compare.number("first loss", losses[0], reference.floats("float32.losses")[0], 1e-5);
        for (int step = 0; step < steps; ++step) compare.number("loss of step " + std::to_string(step), losses[step], reference.floats("float32.losses")[step], 1e-4);
    }
    compare.tensor("losses", losses, 1e-4);
    compare.tensor("grad_norms", norms, 1e-4);
    for (const Parameter& p : trainer.table.parameters) {
        const ZeroEngine::Owned owned = trainer.zero.owned_by_this_rank(trainer.zero.layout().bucket_of_unit[p.unit]);
        const size_t first = owned.state_begin + trainer.zero.layout().unit_begin[p.unit] + p.offset - owned.begin;
        compare.tensor("final." + p.name, read_floats(trainer.zero.master() + first, p.count(), trainer.stream), 1e-4);
    }
    return compare.finish();
}

}  // namespace

int main(int argc, char** argv) {
    return run_main(argc, argv, [&](const Process& process) {
        if (process.ranks != 1) throw UsageError("test_gpt runs on one rank: start it without mpirun");
        select_device(process);
        std::vector<std::string> folders(argv + 1, argv + argc);
        if (folders.empty()) folders = {"dev/reference/llama", "dev/reference/qwen2", "dev/reference/qwen3", "dev/reference/llama64"};
        const Communicator comm(process);
        printf("test_gpt: %s build against PyTorch\n", kBf16 ? "BF16" : "FP32");
        int failed = 0;
        for (const std::string& folder : folders) failed += !check_folder(folder, process, comm);
        printf("%zu passed, %d failed\n", folders.size() - failed, failed);
        return failed ? 1 : 0;
    });
}
