// What a run does with the model between steps: validation loss, a sample of text, and the check that all ranks hold the same weights. All of it is
// collective in every stage, but for the sample, which one rank can make where it holds all parameters.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "llmc/data_loader.h"
#include "llmc/decode_table.h"
#include "llmc/options.h"
#include "llmc/replicas.h"
#include "llmc/sampler.h"
#include "llmc/trainer.cuh"

struct Evaluation {
    double loss = 0;       // mean over the valid targets, nats
    long long tokens = 0;  // valid targets
};

// Mean loss over exactly the loader's validation windows. Collective; every rank gets the same.
inline Evaluation evaluate(Trainer& trainer, const ValLoader& loader, double timeout_seconds) {
    const NvtxRange range("evaluate");
    const int ranks = trainer.comm.size();
    const size_t count = static_cast<size_t>(trainer.B) * trainer.T;
    HostBatch batch(count);
    BatchBuffers buffers = batch.buffers();
    buffers.sorted_positions = nullptr;
    PinnedArray<double> valid(1);
    valid[0] = 0;
    double* own = trainer.rank_numbers + 2 * ranks;
    for (long long step = 0; step < loader.num_steps(); ++step) {
        valid[0] += static_cast<double>(loader.fill(step, buffers.inputs, buffers.targets));
        trainer.copy_ids(buffers, count);
        trainer.queue_forward(trainer.B, [&] { trainer.model.head_losses(trainer.zero, trainer.targets); });
        trainer.model.add_losses(own, step == 0, trainer.B, trainer.T);
        wait_for_event(trainer.ids_copied, trainer.comm, timeout_seconds, "a validation batch");  // before it is filled again
    }
    CUDA_CHECK(cudaMemcpyAsync(own + 1, &valid[0], sizeof(double), cudaMemcpyHostToDevice, trainer.stream));
    const std::vector<double> sums = trainer.gather_numbers(2, timeout_seconds, "the sums of an evaluation");
    double loss_sum = 0, tokens = 0;
    for (int rank = 0; rank < ranks; ++rank) {
        loss_sum += sums[2 * rank];
        tokens += sums[2 * rank + 1];
    }
    return {tokens > 0 ? loss_sum / tokens : 0.0, static_cast<long long>(tokens)};
}

// What differs between the ranks of that which each of them holds whole (weights; in stage 0 the optimizer's state too), and what to do; "" if nothing does. Collective,
// the same on every rank.
inline std::string check_replicas(Trainer& trainer, double timeout_seconds) {
    const size_t count = trainer.zero.checksum_count() * trainer.comm.size();
    if (count == 0) return "";
    trainer.zero.queue_checksums(trainer.checksums, trainer.checksums + count);
    const std::string difference = replica_difference(trainer.read(trainer.checksums, count, timeout_seconds, "the checksums of the weights"), trainer.table, trainer.zero.layout());
    if (difference.empty()) return "";
    return difference + ": a bit flipped in memory or on a link, or the ranks' libraries or devices differ. What was trained since the last evaluation is wrong; start again without that machine";
}

// Text that the model continues `prompt` with. Each token is a full forward pass over the last T tokens. Where parameters are sharded all ranks take part
// (and take rank 0's tokens); otherwise one rank alone can.
inline std::string sample_text(Trainer& trainer, const DecodeTable& decode, const Options& options, long long step) {
    const NvtxRange range("sample");
    const int T = trainer.T, V = std::min(trainer.config.vocab_size, decode.vocab_size());
    const SamplerConfig config = {options.temperature, options.top_k, options.top_p};
    std::vector<int> ids = decode.encode(options.prompt);
    ids.insert(ids.begin(), decode.end_of_text());  // a document begins after the end of another
    const size_t prompt_count = ids.size();
    HostBatch batch(T);
    PinnedArray<double> chosen(1);
    BatchBuffers buffers = batch.buffers();
    buffers.sorted_positions = nullptr;
    std::fill(buffers.targets, buffers.targets + T, -1);
    for (int i = 0; i < options.sample_tokens; ++i) {
        const int known = static_cast<int>(std::min<size_t>(ids.size(), T));
        std::fill(std::copy(ids.end() - known, ids.end(), buffers.inputs), buffers.inputs + T, 0);
        trainer.copy_ids(buffers, T);
        const floatX* row = nullptr;
        trainer.queue_forward(1, [&] { row = trainer.model.head_rows(trainer.zero, T, known - 1, 1); });
        const std::vector<floatX> stored = trainer.read(row, V, options.comm_timeout, "the logits of a sample");
        int id = sample_token(std::vector<float>(stored.begin(), stored.end()), config, uniform_from_keys(options.seed, step, i));
        if (trainer.zero.sharding().parameters) {
            chosen[0] = id;
            CUDA_CHECK(cudaMemcpyAsync(trainer.rank_numbers + 2 * trainer.comm.size(), &chosen[0], sizeof(double), cudaMemcpyHostToDevice, trainer.stream));
            id = static_cast<int>(trainer.gather_numbers(1, options.comm_timeout, "the token of a sample")[0]);
        }
        ids.push_back(id);
        if (ids.back() == decode.end_of_text()) break;
    }
    return decode.decode(std::vector<int>(ids.begin() + prompt_count, ids.end()));
}
