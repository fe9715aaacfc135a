// More ranks must not change training: the same global batches on real data with any number of ranks.
//
//   mpirun -np 1 mpi_test_ranks 'SHARDS' FOLDER        writes the one-rank run and its controls to FOLDER
//   mpirun -np N mpi_test_ranks 'SHARDS' FOLDER        compares N ranks with it (N divides 12)
//
// Every global batch is the same 12 windows. Gradients: from the one-rank run's parameters at steps 0, 10 and 50, what N ranks reduce must equal the sum of
// the 12 windows' own gradients up to the counted roundings. Curves: rounding differs with the grouping of the sums, and training amplifies it, so the
// yardstick is a control: one-rank runs whose micro-batches are permuted, which change the rounding and nothing else. Distances are the root mean square
// over steps; N ranks may be at most twice as far from the one-rank curve as the farthest of three controls. Prints `N passed, N failed`.
#include "dev/test/zero_testing.cuh"

#include <fstream>
#include <numeric>
#include <random>

namespace {

constexpr int kB = 1, kT = 64, kWindows = 12, kSteps = 60;
constexpr int kGradientSteps[] = {0, 10, 50};
constexpr unsigned long long kSeed = 3;

ModelConfig small_model() {
    ModelConfig config;
    config.name = "test";
    config.num_layers = 2;
    config.channels = 64;
    config.num_heads = 4;
    config.num_kv_heads = 2;
    config.head_dim = 16;
    config.ffn_dim = 128;
    config.vocab_size = 257;
    config.max_seq_len = kT;
    config.validate();
    return config;
}

template <class T>
void write_values(const std::string& path, const std::vector<T>& values) {
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
    CHECK(file.good(), "cannot write %s", path.c_str());
}

template <class T>
std::vector<T> read_values(const std::string& path) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    CHECK(file.good(), "cannot read %s; run this test on one rank first", path.c_str());
    std::vector<T> values(static_cast<size_t>(file.tellg()) / sizeof(T));
    file.seekg(0);
    file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
    return values;
}

std::unique_ptr<Trainer> make_trainer(const Process& process, const Communicator& comm, int stage, int micro_steps) {
    ZeroConfig config;
    config.stage = stage;
    config.micro_steps = micro_steps;
    auto trainer = std::make_unique<Trainer>(comm, small_model(), config, Recompute::kNone, kB, kT, 0);
    trainer->choose_products(process);
    trainer->zero.init_params(kSeed, trainer->config.num_layers);
    trainer->zero.start_optimizer();
    return trainer;
}

LoaderSettings loader_settings(int rank, int ranks) {
    LoaderSettings settings;
    settings.micro_batch = kB;
    settings.seq_len = kT;
    settings.grad_accum = kWindows / (ranks * kB);
    settings.rank = rank;
    settings.ranks = ranks;
    settings.vocab_size = 257;
    settings.seed = kSeed;
    return settings;
}

// The micro-batches of a step in another order.
void permute(const BatchBuffers& batch, int micro_steps, unsigned permutation, int step) {
    std::vector<int> order(micro_steps);
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 random(permutation * 1000 + step);
    std::shuffle(order.begin(), order.end(), random);
    const size_t count = static_cast<size_t>(kB) * kT;
    for (int* ids : {batch.inputs, batch.targets, batch.sorted_positions}) {
        const std::vector<int> original(ids, ids + micro_steps * count);
        for (int m = 0; m < micro_steps; ++m) std::copy_n(original.begin() + order[m] * count, count, ids + m * count);
    }
}

// Called before each step with the trainer as it is then.
using BeforeStep = std::function<void(int step, Trainer& trainer, const BatchBuffers& batch)>;

std::vector<float> train(const Process& process, const Communicator& comm, const std::string& shards, int stage, unsigned permutation, const BeforeStep& before_step) {
    const LoaderSettings settings = loader_settings(process.rank, process.ranks);
    const auto trainer = make_trainer(process, comm, stage, settings.grad_accum);
    DataLoader loader(shards, settings);
    std::vector<float> losses;
    for (int step = 0; step < kSteps; ++step) {
        const BatchBuffers batch = loader.next().buffers;
        if (permutation) permute(batch, settings.grad_accum, permutation, step);
        if (before_step) before_step(step, *trainer, batch);
        trainer->queue_step({step, 3e-3, 1.0, kSeed, 0}, batch);
        losses.push_back(trainer->read_state().loss);
    }
    return losses;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double squares = 0;
    for (size_t i = 0; i < a.size(); ++i) squares += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    return std::sqrt(squares / a.size());
}

// All parameters as floats by logical position.
std::vector<float> read_parameters(Trainer& trainer) {
    std::vector<float> values(logical_count(trainer.table), 0);
    trainer.zero.read_params([&](const Parameter& p, const floatX* address) {
        const std::vector<float> own = read_floats(address, p.stored_count(), trainer.stream);
        std::copy(own.begin(), own.end(), values.begin() + trainer.table.units[p.unit].logical_begin + p.offset);
    });
    return values;
}

void write_parameters(Trainer& trainer, const std::vector<float>& values) {
    trainer.zero.write_params([&](const Parameter& p, floatX* address) {
        const float* first = values.data() + trainer.table.units[p.unit].logical_begin + p.offset;
        std::vector<floatX> stored(p.stored_count());
        for (size_t i = 0; i < stored.size(); ++i) stored[i] = static_cast<floatX>(first[i]);
        CUDA_CHECK(cudaMemcpyAsync(address, stored.data(), stored.size() * sizeof(floatX), cudaMemcpyHostToDevice, trainer.stream));
        CUDA_CHECK(cudaStreamSynchronize(trainer.stream));  // `stored` leaves scope
    });
    trainer.zero.start_optimizer();
}

void one_rank(Check& check, const Process& process, const Communicator& comm, const std::string& shards, const std::string& folder) {
    const auto alone = make_trainer(process, comm, 0, 1);
    const auto save_oracle = [&](int step, Trainer& trainer, const BatchBuffers& batch) {
        if (std::find(std::begin(kGradientSteps), std::end(kGradientSteps), step) == std::end(kGradientSteps)) return;
        const std::vector<float> parameters = read_parameters(trainer);
        write_parameters(*alone, parameters);
        std::vector<double> sum(logical_count(trainer.table), 0), magnitude(sum);
        set_valid_tokens(*alone, kWindows * kT);
        for (int window = 0; window < kWindows; ++window) {
            BatchBuffers part = batch;
            for (int** ids : {&part.inputs, &part.targets, &part.sorted_positions}) *ids += window * kT;
            add_micro_batch_gradients(*alone, part, &sum, &magnitude);
        }
        const std::string name = folder + "/step" + std::to_string(step);
        write_values(name + ".parameters", parameters);
        write_values(name + ".sum", sum);
        write_values(name + ".magnitude", magnitude);
    };
    const std::vector<float> losses = train(process, comm, shards, 1, 0, save_oracle);
    double control = 0;
    for (const unsigned permutation : {1u, 2u, 3u}) control = std::max(control, distance(train(process, comm, shards, 1, permutation, nullptr), losses));
    write_values(folder + "/losses", losses);
    write_values(folder + "/control", std::vector<double>{control});
    printf("one rank: loss %.4f to %.4f, controls within %.3e of it\n", losses.front(), losses.back(), control);
    check.expect(losses.back() < losses.front() - 1, "the run learns");
    check.expect(control > 0, "permuted micro-batches change the rounding");
}

void compare(Check& check, const Process& process, const Communicator& comm, const std::string& shards, const std::string& folder) {
    const std::vector<float> expected = read_values<float>(folder + "/losses");
    const double control = read_values<double>(folder + "/control").at(0);
    for (const int stage : {0, 1, 2, 3}) {
        const std::vector<float> losses = train(process, comm, shards, stage, 0, nullptr);
        // The first loss has seen no update: only the order of a sum of doubles differs.
        check.expect(std::fabs(losses[0] - expected[0]) <= 1e-6f * expected[0], format("stage %d: first loss %.7f, one rank %.7f", stage, losses[0], expected[0]));
        check.expect(distance(losses, expected) <= 2 * control, format("stage %d: curve %.3e from one rank's, controls %.3e", stage, distance(losses, expected), control));
    }
    for (const int stage : {0, 1, 2, 3}) {
        const LoaderSettings settings = loader_settings(process.rank, process.ranks);
        const auto trainer = make_trainer(process, comm, stage, settings.grad_accum);
        DataLoader loader(shards, settings);
        for (int step = 0; step < kSteps; ++step) {
            const BatchBuffers batch = loader.next().buffers;
            if (std::find(std::begin(kGradientSteps), std::end(kGradientSteps), step) == std::end(kGradientSteps)) continue;
            const std::string name = folder + "/step" + std::to_string(step);
            write_parameters(*trainer, read_values<float>(name + ".parameters"));
            trainer->queue_step({step, 0.0, 1.0, kSeed, 0}, batch);
            check_gradients(check, *trainer, trainer->read_state().grad_norm, read_values<double>(name + ".sum"), read_values<double>(name + ".magnitude"),
                            format("stage %d, step %d", stage, step));
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    return run_main(argc, argv, [&](const Process& process) {
        if (argc != 3) throw UsageError("usage: mpi_test_ranks 'SHARDS' FOLDER");
        CHECK(kWindows % (process.ranks * kB) == 0, "%d ranks do not divide %d windows", process.ranks, kWindows);
        select_device(process);
        const Communicator comm(process);
        Check check{process};
        if (process.ranks == 1) {
            one_rank(check, process, comm, argv[1], argv[2]);
        } else {
            compare(check, process, comm, argv[1], argv[2]);
        }
        if (process.rank == 0) printf("%d passed, %d failed\n", check.passed, check.failed);
        return check.failed ? 1 : 0;
    });
}
