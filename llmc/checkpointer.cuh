// Saves what is on the device into checkpoints (checkpoint.h) and brings it back.
//
// Every rank writes its slices of the optimizer's state, in every stage the same, and the files of weights are dealt out over the ranks, so all write at once and each byte
// once. stream: through two small buffers while training waits. async: training waits for a copy in host memory, and a thread writes that. A checkpoint becomes complete
// only when all ranks have said that theirs is on the disk.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "llmc/checkpoint.h"
#include "llmc/checkpoint_tensors.h"
#include "llmc/trainer.cuh"

struct CheckpointSettings {
    std::string run_folder;
    bool async = false;
    int keep = 3;
    double timeout_seconds = 600;
    size_t max_weights_file_bytes = kMaxWeightsFileBytes;
};

class Checkpointer {
public:
    struct Saved {
        std::string folder;
        double bytes = 0, seconds = 0;     // seconds from save() on
        std::vector<std::string> removed;  // older ones
        std::string warning;               // older ones could not be removed
    };

    // Takes host memory: two buffers, or for async as much as this rank saves. Throws Error where there is not so much.
    Checkpointer(const Process& process, Trainer& trainer, const CheckpointSettings& settings)
        : process_(process), trainer_(trainer), settings_(settings), weights_(weights_files(trainer.table, sizeof(floatX), settings.max_weights_file_bytes)),
          optimizer_(optimizer_file(trainer.table, trainer.layout, process.rank)), host_memory_(there_are(host_bytes())) {
        for (cudaEvent_t& event : copied_) CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
    Checkpointer(const Checkpointer&) = delete;
    Checkpointer& operator=(const Checkpointer&) = delete;
    ~Checkpointer() {
        if (thread_.joinable()) thread_.join();
        for (const cudaEvent_t event : copied_) cudaEventDestroy(event);
    }

    // Host memory it takes: for async what the plan says.
    size_t host_bytes() const { return settings_.async ? largest_share_bytes(trainer_.layout, weights_) : 2 * kChunkBytes; }
    // Of a checkpoint, all ranks together, but for a few small files.
    size_t checkpoint_bytes() const { return checkpoint_data_bytes(trainer_.table, sizeof(floatX)); }

    // What one takes of a disk at most: headers have some 200 bytes for each tensor a rank writes, and every file ends within a block.
    size_t disk_bytes() const {
        const size_t files = static_cast<size_t>(process_.ranks) + weights_.size() + 8, headers = 4 * 256 * (trainer_.table.parameters.size() + 3 * static_cast<size_t>(process_.ranks));
        return checkpoint_bytes() + headers + files * (64 << 10);
    }

    // Collective, between steps: starts a checkpoint of the state as it is. Afterwards the state may change, and finish() is due: at once, or with async any time
    // later. `info` says all but its files. Throws AgreedError where it cannot begin.
    void save(const CheckpointInfo& info) {
        begun_ = std::chrono::steady_clock::now();
        info_ = info;
        info_.files.clear();
        report_ = {};
        run_on_all_ranks(process_, [&] {
            if (process_.rank != 0) return;
            remove_unfinished(settings_.run_folder);
            check_free_disk(settings_.run_folder, disk_bytes());
            begin_checkpoint(settings_.run_folder, info.step);
            choices_ = trainer_.matmuls.export_choices();  // now: training may add to them while a thread writes
        });
        folder_ = settings_.run_folder + "/" + unfinished_name(info.step);
        under_way_ = true;
        if (!settings_.async) {
            StreamSink sink(*this);
            give_state(sink);
            write_small_files();
            return;
        }
        SnapshotSink sink(*this);
        give_state(sink);
        CUDA_CHECK(cudaStreamSynchronize(trainer_.stream));
        written_ = false;
        thread_ = std::thread([this] {
            write_snapshot();
            write_small_files();
            written_ = true;
        });
    }

    bool under_way() const { return under_way_; }  // the same on every rank
    bool written() const { return written_; }      // this rank's part is on the disk, or has failed

    // Collective: waits until all ranks have written, then the checkpoint is complete and old ones go. Throws AgreedError where a rank failed; then nothing of it is left.
    Saved finish() {
        if (thread_.joinable()) thread_.join();
        under_way_ = false;
        Saved saved;
        try {
            run_on_all_ranks(process_, [&] { CHECK(report_.error.empty(), "%s", report_.error.c_str()); });
            std::string own;
            for (const auto& [name, file] : report_.files) own += format("%s %zu %s\n", name.c_str(), file.bytes, file.xxh3.c_str());
            const std::vector<std::string> reports = gather_texts(process_, own);
            run_on_all_ranks(process_, [&] {
                if (process_.rank != 0) return;
                for (const std::string& report : reports) add_files(report);
                saved.folder = complete_checkpoint(settings_.run_folder, info_);
            });
        } catch (const AgreedError&) {
            if (process_.rank == 0) remove_unfinished(settings_.run_folder);
            throw;
        }
        if (process_.rank == 0) {
            for (const auto& [name, file] : info_.files) saved.bytes += static_cast<double>(file.bytes);
            try {
                saved.removed = remove_old_checkpoints(settings_.run_folder, settings_.keep);
            } catch (const Error& error) {
                saved.warning = error.what();
            }
        }
        saved.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
        return saved;
    }

private:
    static constexpr size_t kChunkBytes = 16 << 20;  // long enough for a disk and for a bus

    // What this rank has written, or why not.
    struct Report {
        std::map<std::string, FileSummary> files;
        std::string error;
    };

    // Runs `body` unless something failed before. An error must not leave the collectives that follow: peers would wait in them.
    template <class Body>
    void guarded(Body&& body) {
        if (!report_.error.empty()) return;
        try {
            body();
        } catch (const std::exception& error) {
            report_.error = error.what();
        }
    }

    // Writes each file as it comes, a chunk behind the copies from the device.
    class StreamSink {
    public:
        explicit StreamSink(Checkpointer& owner) : owner_(owner) {}
        void begin(const StateFile& file) {
            owner_.guarded([&] {
                file_.emplace(owner_.folder_ + "/" + file.name);
                file_->write(file.header.data(), file.header.size());
            });
        }
        void add(const void* device, size_t bytes) {
            for (size_t done = 0; done < bytes;) {
                const size_t count = std::min(bytes - done, kChunkBytes);
                const int slot = next_++ % 2;
                unsigned char* const to = owner_.host_memory_.data() + slot * kChunkBytes;
                CUDA_CHECK(cudaMemcpyAsync(to, static_cast<const unsigned char*>(device) + done, count, cudaMemcpyDeviceToHost, owner_.trainer_.stream));
                CUDA_CHECK(cudaEventRecord(owner_.copied_[slot], owner_.trainer_.stream));
                write_waiting();
                waiting_ = {slot, count};
                done += count;
            }
        }
        void end(const StateFile& file) {
            write_waiting();
            owner_.guarded([&] { owner_.report_.files[file.name] = file_->finish(); });
            file_.reset();
        }

    private:
        struct Chunk { int slot = 0; size_t bytes = 0; };
        void write_waiting() {
            if (waiting_.bytes == 0) return;
            wait_for_event(owner_.copied_[waiting_.slot], owner_.trainer_.comm, owner_.settings_.timeout_seconds, "state to save");
            owner_.guarded([&] { file_->write(owner_.host_memory_.data() + waiting_.slot * kChunkBytes, waiting_.bytes); });
            waiting_ = {};
        }
        Checkpointer& owner_;
        std::optional<DurableFile> file_;
        Chunk waiting_;
        int next_ = 0;
    };

    // Puts the data of all files one after the other into host memory.
    class SnapshotSink {
    public:
        explicit SnapshotSink(Checkpointer& owner) : owner_(owner) { owner_.snapshot_.clear(); }
        void begin(const StateFile& file) { owner_.snapshot_.push_back(&file); }
        void add(const void* device, size_t bytes) {
            CHECK(at_ + bytes <= owner_.host_bytes(), "a copy of %zu bytes at %zu does not fit the %zu planned for it", bytes, at_, owner_.host_bytes());
            CUDA_CHECK(cudaMemcpyAsync(owner_.host_memory_.data() + at_, device, bytes, cudaMemcpyDeviceToHost, owner_.trainer_.stream));
            at_ += bytes;
        }
        void end(const StateFile&) {}

    private:
        Checkpointer& owner_;
        size_t at_ = 0;
    };

    // So much host memory, or an Error: a system that promises more than it has kills a process later.
    size_t there_are(size_t bytes) const {
        check_host_memory(bytes, process_.local_ranks, settings_.async ? "--save-mode async" : "--save-mode stream");
        return bytes;
    }

    bool writes(size_t weights_file) const { return static_cast<int>(weights_file % process_.ranks) == process_.rank; }

    // Everything this rank saves, file by file. Collective where parameters are sharded.
    template <class Sink>
    void give_state(Sink& sink) {
        ZeroEngine& zero = trainer_.zero;
        zero.synchronize();
        sink.begin(optimizer_);
        for (const StateArray array : kStateArrays) {
            const float* const whole = array == StateArray::kMaster ? zero.master() : array == StateArray::kFirstMoment ? zero.first_moments() : zero.second_moments();
            zero.read_state_slices(whole, [&](const ParameterPiece& piece, const float* address) { sink.add(address, piece.count * sizeof(float)); });
        }
        sink.end(optimizer_);
        size_t f = 0;
        zero.read_params([&](const Parameter& p, const floatX* address) {
            const int index = static_cast<int>(&p - trainer_.table.parameters.data());
            const WeightsFile& weights = weights_[f];
            if (writes(f)) {
                if (index == weights.first_parameter) sink.begin(weights.file);
                sink.add(address, p.count() * sizeof(floatX));
                if (index + 1 == weights.end_parameter) sink.end(weights.file);
            }
            if (index + 1 == weights.end_parameter) ++f;
        });
    }

    void write_snapshot() {
        const unsigned char* data = host_memory_.data();
        for (const StateFile* planned : snapshot_) {
            guarded([&] {
                DurableFile file(folder_ + "/" + planned->name);
                file.write(planned->header.data(), planned->header.size());
                file.write(data, planned->data_bytes);
                report_.files[planned->name] = file.finish();
            });
            data += planned->data_bytes;
        }
    }

    void write_small_files() {
        if (process_.rank != 0) return;
        guarded([&] {
            const auto write = [&](const char* name, const std::string& text) { report_.files[name] = write_durable_file(folder_ + "/" + name, text); };
            write("config.json", config_json_text(trainer_.config, sizeof(floatX) == 2 ? "bfloat16" : "float32"));
            if (weights_.size() > 1) write("model.safetensors.index.json", weights_index(trainer_.table, weights_, sizeof(floatX)));
            write("product_choices.bin", std::string(choices_.begin(), choices_.end()));
        });
    }

    // From finish()'s lines.
    void add_files(const std::string& report) {
        for (size_t begin = 0; begin < report.size();) {
            const size_t end = report.find('\n', begin), first = report.find(' ', begin), second = report.find(' ', first + 1);
            info_.files[report.substr(begin, first - begin)] = {std::stoull(report.substr(first + 1, second - first - 1)), report.substr(second + 1, end - second - 1)};
            begin = end + 1;
        }
    }

    const Process& process_;
    Trainer& trainer_;
    const CheckpointSettings settings_;
    const std::vector<WeightsFile> weights_;
    const StateFile optimizer_;
    PinnedArray<unsigned char> host_memory_;
    cudaEvent_t copied_[2];

    CheckpointInfo info_;
    std::string folder_;
    std::vector<unsigned char> choices_;
    Report report_;
    bool under_way_ = false;
    std::chrono::steady_clock::time_point begun_;
    std::vector<const StateFile*> snapshot_;  // in the order of their data
    std::thread thread_;
    std::atomic<bool> written_{true};
};

// Everything on the device as the checkpoint has it, to the bit, whoever wrote it. Parameters are the master weights rounded, as after every update; where the files of weights have
// the type of this build they must say the same. Collective. Throws Error.
inline void load_checkpoint(Trainer& trainer, const CheckpointTensors& tensors, const CheckpointInfo& info, bool same_precision) {
    constexpr size_t kChunk = 1 << 20;  // elements
    PinnedArray<float> state(3 * kChunk);
    PinnedArray<floatX> params(kChunk), saved(kChunk);
    trainer.zero.write_state([&](const ParameterPiece& piece, const ZeroEngine::StateAddresses& to) {
        for (size_t done = 0; done < piece.count; done += kChunk) {
            const size_t count = std::min(kChunk, piece.count - done), first = piece.first + done;
            float* const addresses[] = {to.master, to.m, to.v};
            for (const StateArray array : kStateArrays) {
                float* const values = state.data() + static_cast<int>(array) * kChunk;
                tensors.read_state(array, piece.parameter, first, count, values);
                CUDA_CHECK(cudaMemcpyAsync(addresses[static_cast<int>(array)] + done, values, count * sizeof(float), cudaMemcpyHostToDevice, trainer.stream));
            }
            for (size_t i = 0; i < count; ++i) params[i] = static_cast<floatX>(state[i]);
            CUDA_CHECK(cudaMemcpyAsync(to.params + done, params.data(), count * sizeof(floatX), cudaMemcpyHostToDevice, trainer.stream));
            if (same_precision) {
                tensors.read_weights(piece.parameter, first, count, saved.data());
                CHECK(memcmp(params.data(), saved.data(), count * sizeof(floatX)) == 0,
                      "the weights of `%s` are not its master weights rounded, between elements %zu and %zu: model.safetensors and optimizer files do not belong together",
                      trainer.table.parameters[piece.parameter].name.c_str(), first, first + count);
            }
            CUDA_CHECK(cudaStreamSynchronize(trainer.stream));  // before the buffers are filled again
        }
    });
    trainer.restore_counters(info.applied_steps, info.skipped_total, info.skipped_in_row);
    trainer.zero.synchronize();
}

// Collective: a run's state from a checkpoint that find_checkpoint() found whole. Returns, on rank 0, why the matrix products could not be chosen as before; else "".
inline std::string restore_checkpoint(const Process& process, Trainer& trainer, const std::string& folder, const CheckpointInfo& info, bool same_precision) {
    std::vector<unsigned char> products;
    std::unique_ptr<CheckpointTensors> tensors;
    run_on_all_ranks(process, [&] {
        std::vector<std::string> files;
        for (const auto& [name, summary] : info.files) files.push_back(name);
        tensors = std::make_unique<CheckpointTensors>(folder, files, trainer.table, info.precision == "bf16" ? TensorType::BF16 : TensorType::F32);
        if (process.rank != 0 || info.files.count("product_choices.bin") == 0) return;
        const MappedFile stored(folder + "/product_choices.bin");
        products.assign(stored.data(), stored.data() + stored.size());
    });
    const std::string other_products = trainer.choose_products(process, products);
    load_checkpoint(trainer, *tensors, info, same_precision);
    return other_products;
}
