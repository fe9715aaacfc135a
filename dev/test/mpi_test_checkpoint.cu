// Checkpoints of what is on the device, on real ranks, to the bit:   mpirun -np N mpi_test_checkpoint MODE ...
//
//   all FOLDER                               every stage and several bucket sizes write random bits, every stage with other buckets reads them; async writes what stream writes,
//                                            although the state changes as soon as save() has returned. Prints `N passed, N failed`.
//   write FOLDER STAGE BUCKET_MB SAVE_MODE   saves the random bits, for `check` on other ranks
//   check FOLDER STAGE BUCKET_MB             loads the newest checkpoint of FOLDER and holds it against them
//   copy CHECKPOINT FOLDER STAGE BUCKET_MB SAVE_MODE   loads a checkpoint of the trainer and saves it again at the same step: nothing may be different, whoever writes
//
// The bits are a function of array, parameter and element. Moments may be anything: subnormal, -0, infinite, NaN with any payload. Master weights are never NaN, which has no
// one rounding. Files of weights are small, so that there are several and an index.
#include <filesystem>

#include "dev/test/zero_testing.cuh"
#include "llmc/checkpointer.cuh"

namespace {

constexpr long long kStep = 7;
constexpr size_t kSmallWeightsFile = 20'000;  // bytes; the embedding alone is larger
constexpr double kTimeoutSeconds = 60;
constexpr TensorType kWeightsType = sizeof(floatX) == 2 ? TensorType::BF16 : TensorType::F32;
constexpr const char* kPrecisionName = sizeof(floatX) == 2 ? "bf16" : "fp32";

uint64_t mixed(uint64_t x) {  // splitmix64's finaliser
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// The bits of one element. `generation`: another one has other bits.
uint32_t random_bits(int generation, StateArray array, int parameter, size_t element) {
    const uint64_t random = mixed(mixed(mixed(generation * 4 + static_cast<int>(array)) + parameter) + element);
    uint32_t bits = static_cast<uint32_t>(random);
    switch (random >> 60) {
        case 0: bits &= 0x807fffff; break;                        // subnormal
        case 1: bits = 0x80000000; break;                         // -0
        case 2: bits = (bits & 0x80000000) | 0x7f800000; break;   // an infinity
        case 3: bits |= 0x7f800000; break;                        // NaN
    }
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return is_nan && array == StateArray::kMaster ? bits & 0xbfffffff : bits;
}

float as_float(uint32_t bits) {
    float value = 0;
    memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T>
uint32_t bits_of(T value) {
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

// What must be on the device, by logical position; gaps and padding are 0.
struct Expected {
    std::vector<uint32_t> state[3], params;
};

Expected expected_bits(const ParamTable& table, int generation) {
    Expected expected;
    for (std::vector<uint32_t>* bits : {&expected.state[0], &expected.state[1], &expected.state[2], &expected.params}) bits->assign(logical_count(table), 0);
    for (size_t p = 0; p < table.parameters.size(); ++p) {
        const Parameter& parameter = table.parameters[p];
        const size_t begin = table.units[parameter.unit].logical_begin + parameter.offset;
        for (size_t i = 0; i < parameter.count(); ++i) {
            for (const StateArray array : kStateArrays) expected.state[static_cast<int>(array)][begin + i] = random_bits(generation, array, static_cast<int>(p), i);
            expected.params[begin + i] = bits_of(static_cast<floatX>(as_float(expected.state[0][begin + i])));
        }
    }
    return expected;
}

std::unique_ptr<Trainer> make_trainer(const Communicator& comm, const ModelConfig& model, int stage, double bucket_mb) {
    ZeroConfig config;
    config.stage = stage;
    config.bucket_mb = bucket_mb;
    return std::make_unique<Trainer>(comm, model, config, Recompute::kNone, /*B=*/1, /*T=*/8, 0);
}

// Puts the random bits on the device.
void fill_state(Trainer& trainer, int generation) {
    trainer.zero.write_state([&](const ParameterPiece& piece, const ZeroEngine::StateAddresses& to) {
        PinnedArray<float> values(piece.count);
        PinnedArray<floatX> params(piece.count);
        float* const addresses[] = {to.master, to.m, to.v};
        for (const StateArray array : kStateArrays) {
            for (size_t i = 0; i < piece.count; ++i) {
                const uint32_t bits = random_bits(generation, array, piece.parameter, piece.first + i);
                memcpy(&values[i], &bits, sizeof bits);
                if (array == StateArray::kMaster) params[i] = static_cast<floatX>(as_float(bits));
            }
            CUDA_CHECK(cudaMemcpyAsync(addresses[static_cast<int>(array)], values.data(), piece.count * sizeof(float), cudaMemcpyHostToDevice, trainer.stream));
            CUDA_CHECK(cudaStreamSynchronize(trainer.stream));
        }
        CUDA_CHECK(cudaMemcpyAsync(to.params, params.data(), piece.count * sizeof(floatX), cudaMemcpyHostToDevice, trainer.stream));
        CUDA_CHECK(cudaStreamSynchronize(trainer.stream));
    });
    trainer.zero.synchronize();
}

// Elements of what this rank steps that are not as expected: its slices, or in stage 0 everything, padding included.
template <class OwnedValues>
size_t wrong_elements(const Trainer& trainer, const std::vector<uint32_t>& expected, OwnedValues&& owned_values) {
    size_t wrong = 0;
    for (size_t b = 0; b < trainer.layout.buckets.size(); ++b) {
        const Bucket& bucket = trainer.layout.buckets[b];
        const ZeroEngine::Owned owned = trainer.zero.owned_by_this_rank(b);
        const auto* values = owned_values(owned);
        std::vector<std::remove_cv_t<std::remove_pointer_t<decltype(values)>>> own(owned.count);
        CUDA_CHECK(cudaMemcpyAsync(own.data(), values, owned.count * sizeof(own[0]), cudaMemcpyDeviceToHost, trainer.stream));
        CUDA_CHECK(cudaStreamSynchronize(trainer.stream));
        for (size_t i = 0; i < owned.count; ++i) {
            const size_t in_bucket = owned.begin - bucket.begin + i;
            wrong += bits_of(own[i]) != (in_bucket < bucket.unit_count ? expected[bucket.logical_begin + in_bucket] : 0u);
        }
    }
    return wrong;
}

// Everything is on the device as expected: each rank's own part of the state, all of it merged, and the whole parameters that every rank reads.
void check_state(Check& check, Trainer& trainer, const Expected& expected, const std::string& what) {
    const float* const arrays[] = {trainer.zero.master(), trainer.zero.first_moments(), trainer.zero.second_moments()};
    const char* const names[] = {"master weights", "first moments", "second moments"};
    trainer.zero.synchronize();
    for (int a = 0; a < 3; ++a) {
        const auto own = [&](const ZeroEngine::Owned& owned) { return arrays[a] + owned.state_begin; };
        const size_t wrong = wrong_elements(trainer, expected.state[a], own);
        const bool merged = gather_bits(trainer, own) == expected.state[a];
        check.expect(wrong == 0 && merged, format("%s: %s to the bit (%zu of this rank's are wrong)", what.c_str(), names[a], wrong));
    }
    const auto own = [](const ZeroEngine::Owned& owned) { return owned.params; };
    size_t wrong = wrong_elements(trainer, expected.params, own);
    const bool merged = gather_bits(trainer, own) == expected.params;
    trainer.zero.read_params([&](const Parameter& p, const floatX* address) {
        std::vector<floatX> values(p.stored_count());
        CUDA_CHECK(cudaMemcpyAsync(values.data(), address, values.size() * sizeof(floatX), cudaMemcpyDeviceToHost, trainer.stream));
        CUDA_CHECK(cudaStreamSynchronize(trainer.stream));
        const size_t begin = trainer.table.units[p.unit].logical_begin + p.offset;
        for (size_t i = 0; i < values.size(); ++i) wrong += bits_of(values[i]) != expected.params[begin + i];
    });
    check.expect(wrong == 0 && merged, format("%s: parameters are the master weights rounded, on every rank (%zu wrong)", what.c_str(), wrong));
}

CheckpointInfo info_of(const Process& process, int stage, long long step) {
    CheckpointInfo info;
    info.step = step;
    info.steps = 2 * step;
    info.tokens = 1000 * step;
    info.windows_consumed = 100 * step;
    info.data_fingerprint = "random";
    info.precision = kPrecisionName;
    info.applied_steps = 5;
    info.skipped_total = 2;
    info.skipped_in_row = 1;
    info.ranks = process.ranks;
    info.stage = stage;
    info.options = {{"seed", "1"}};
    return info;
}

CheckpointSettings settings_of(const std::string& folder, bool async) {
    CheckpointSettings settings;
    settings.run_folder = folder;
    settings.async = async;
    settings.keep = 1;
    settings.timeout_seconds = kTimeoutSeconds;
    settings.max_weights_file_bytes = kSmallWeightsFile;
    return settings;
}

void make_folder(const Process& process, const std::string& folder, bool empty = false) {
    run_on_all_ranks(process, [&] {
        if (process.rank != 0) return;
        std::filesystem::create_directories(folder);
        if (empty) remove_old_checkpoints(folder, 0);
    });
}

// Random bits to FOLDER/step_...; what is on the device changes before the checkpoint is complete where that is promised to do no harm.
CheckpointInfo write_random(const Process& process, const Communicator& comm, const ModelConfig& model, const std::string& folder, int stage, double bucket_mb, bool async, long long step) {
    const auto trainer = make_trainer(comm, model, stage, bucket_mb);
    fill_state(*trainer, /*generation=*/1);
    Checkpointer checkpointer(process, *trainer, settings_of(folder, async));
    checkpointer.save(info_of(process, stage, step));
    if (async) fill_state(*trainer, /*generation=*/2);
    return read_checkpoint_info(gather_texts(process, checkpointer.finish().folder)[0]);
}

// Collective: this trainer as the checkpoint says.
CheckpointInfo load(const Process& process, Trainer& trainer, const std::string& checkpoint) {
    CheckpointInfo info;
    std::unique_ptr<CheckpointTensors> tensors;
    run_on_all_ranks(process, [&] {
        info = read_checkpoint_info(checkpoint);
        check_checkpoint_sizes(checkpoint, info);
        check_checkpoint_bytes(checkpoint, info, process.rank, process.ranks);
        std::vector<std::string> files;
        for (const auto& [name, summary] : info.files) files.push_back(name);
        tensors = std::make_unique<CheckpointTensors>(checkpoint, files, trainer.table, kWeightsType);
    });
    load_checkpoint(trainer, *tensors, info, /*same_precision=*/true);
    return info;
}

void check_random(Check& check, const Process& process, const Communicator& comm, const ModelConfig& model, const std::string& folder, int stage, double bucket_mb, const std::string& what) {
    const auto trainer = make_trainer(comm, model, stage, bucket_mb);
    const std::vector<std::string> checkpoints = list_checkpoints(folder);
    check.expect(checkpoints.size() == 1, format("%s: there is one checkpoint in %s", what.c_str(), folder.c_str()));
    if (checkpoints.empty()) return;
    fill_state(*trainer, /*generation=*/3);  // nothing of it may stay
    load(process, *trainer, checkpoints[0]);
    check_state(check, *trainer, expected_bits(trainer->table, /*generation=*/1), what);
    const StepState state = trainer->read_state();
    check.expect(state.applied_steps == 5 && state.skipped_total == 2 && state.skipped_in_row == 1, what + ": the counters");
}

void run_all(Check& check, const Process& process, const Communicator& comm, const std::string& folder) {
    const double buckets[] = {0.0, 0.02, 25.0};
    long long step = kStep;
    for (const bool tied : {false, true}) {
        const ModelConfig model = small_model(tied, 3, 600);
        for (int b = 0; b < 3; ++b) {
            const double bucket_mb = buckets[b];
            CheckpointInfo first;
            for (const int stage : {0, 1, 2, 3}) {
                const std::string written = format("%s, written in stage %d with bucket-mb %g", tied ? "tied" : "untied", stage, bucket_mb);
                const CheckpointInfo info = write_random(process, comm, model, folder, stage, bucket_mb, /*async=*/false, ++step);
                if (stage == 0) first = info;
                check.expect(info.files == first.files, written + ": the same files as stage 0 writes");
                size_t weights = 0;
                for (const auto& [name, file] : info.files) weights += name.rfind("model-", 0) == 0;
                check.expect(weights > 2 && info.files.count("model.safetensors.index.json") == 1, written + format(": %zu files of weights and an index", weights));
                for (const int further : {1, 2}) {  // with each of the other bucket sizes, in two stages
                    const int reads = (stage + further) % 4;
                    const double reads_mb = buckets[(b + further) % 3];
                    check_random(check, process, comm, model, folder, reads, reads_mb, written + format(", read in stage %d with bucket-mb %g", reads, reads_mb));
                }
                const CheckpointInfo async = write_random(process, comm, model, folder, stage, bucket_mb, /*async=*/true, ++step);
                check.expect(async.files == info.files, written + ": async writes the same bytes");
            }
        }
    }
}

int copy(const Process& process, const Communicator& comm, const std::string& checkpoint, const std::string& folder, int stage, double bucket_mb, bool async) {
    const auto trainer = make_trainer(comm, config_from_json_file(checkpoint + "/config.json"), stage, bucket_mb);
    CheckpointInfo info = load(process, *trainer, checkpoint);
    make_folder(process, folder);
    const StepState state = trainer->read_state();
    info.applied_steps = state.applied_steps;
    info.skipped_total = state.skipped_total;
    info.skipped_in_row = state.skipped_in_row;
    info.ranks = process.ranks;
    info.stage = stage;
    Checkpointer checkpointer(process, *trainer, settings_of(folder, async));
    checkpointer.save(info);
    if (async) fill_state(*trainer, /*generation=*/2);
    const std::string saved = checkpointer.finish().folder;
    if (process.rank == 0) printf("%s\n", saved.c_str());
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    return run_main(argc, argv, [&](const Process& process) {
        const std::vector<std::string> words(argv + 1, argv + argc);
        const std::string mode = words.empty() ? "" : words[0];
        const size_t count = mode == "all" ? 2 : mode == "write" ? 5 : mode == "check" ? 4 : mode == "copy" ? 6 : 0;
        if (words.size() != count) throw UsageError("mpi_test_checkpoint: a mode and its words: all FOLDER | write FOLDER STAGE BUCKET_MB stream|async | check FOLDER STAGE BUCKET_MB | "
                                                    "copy CHECKPOINT FOLDER STAGE BUCKET_MB stream|async");
        select_device(process);
        const Communicator comm(process);
        const auto stage = [&](size_t word) { return std::stoi(words[word]); };
        const auto bucket_mb = [&](size_t word) { return std::stod(words[word]); };
        if (mode == "copy") return copy(process, comm, words[1], words[2], stage(3), bucket_mb(4), words[5] == "async");
        Check check{process};
        make_folder(process, words[1], /*empty=*/mode != "check");
        if (mode == "all") run_all(check, process, comm, words[1]);
        if (mode == "write") write_random(process, comm, small_model(true, 3, 600), words[1], stage(2), bucket_mb(3), words[4] == "async", kStep);
        if (mode == "check") check_random(check, process, comm, small_model(true, 3, 600), words[1], stage(2), bucket_mb(3), format("read by %d ranks", process.ranks));
        if (process.rank == 0) printf("%d passed, %d failed\n", check.passed, check.failed);
        return check.failed ? 1 : 0;
    });
}
