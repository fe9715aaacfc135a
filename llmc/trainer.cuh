// Everything on the device, and the recipe of one step: the schedule's operations, each queued where it belongs, to the model or to the ZeRO engine.
#pragma once

#include <vector>

#include "llmc/data_loader.h"
#include "llmc/device_memory.cuh"
#include "llmc/matmul.cuh"
#include "llmc/model.cuh"
#include "llmc/process.h"
#include "llmc/schedule.h"
#include "llmc/span_timer.cuh"
#include "llmc/step_state.cuh"
#include "llmc/zero.cuh"

// What the host decides about a step before it is queued.
struct StepInputs {
    long long step = 0;
    double lr = 0;
    double max_norm = 0;  // clip; 0 = off
    unsigned long long seed = 0;
    int slot = 0;         // of kStepSlots: steps are queued ahead of the host, so there are several of everything it touches
    unsigned requests = 0;  // StepRequest bits of this rank
};

// Token ids of `count` positions in pinned memory, from where they can be copied while the host goes on.
class HostBatch {
public:
    explicit HostBatch(size_t count) : count_(count), ids_(3 * count) {}
    BatchBuffers buffers() { return {ids_.data(), ids_.data() + count_, ids_.data() + 2 * count_}; }
    size_t count() const { return count_; }

private:
    size_t count_;
    PinnedArray<int> ids_;
};

// All device memory of a run on one rank, in the order it is taken; the plan of a run counts it with this same code. Takes memory, touches none.
struct TrainerMemory {
    unsigned char* workspace;             // (kMatmulWorkspaceBytes): of products
    ZeroMemory zero;
    ModelMemory model;
    StepState* state;                     // (1)
    int* ids;                             // (3, micro_steps, B, T): inputs, targets, sorted positions
    unsigned long long* rank_counts;      // (N + 1)
    double* rank_numbers;                 // (N + 1, 2)
    unsigned long long* checksums;        // (N + 1, checksum_count)

    // What it takes does not depend on how many micro-steps `schedule` has, but for one or several; zero_config says how many there are.
    TrainerMemory(const ModelConfig& config, const ParamTable& table, const FlatLayout& layout, const Schedule& schedule, const ZeroConfig& zero_config, Recompute recompute, int B,
                  int T, DeviceMemory& memory)
        : workspace(memory.allocate<unsigned char>("workspace", "the workspace of products", kMatmulWorkspaceBytes)), zero(table, layout, schedule, zero_config, memory),
          model(config, B, T, {recompute, zero_config.lmhead_chunks}, memory) {
        const size_t each_and_own = static_cast<size_t>(layout.num_ranks) + 1;
        state = memory.allocate<StepState>("other", "step state", 1);
        ids = memory.allocate<int>("other", "token ids", 3 * static_cast<size_t>(zero_config.micro_steps) * B * T);
        rank_counts = memory.allocate<unsigned long long>("other", "counts of each rank", each_and_own);
        rank_numbers = memory.allocate<double>("other", "numbers of each rank", 2 * each_and_own);
        checksums = memory.allocate<unsigned long long>("other", "checksums of each rank", checksum_count(layout, schedule.sharding) * each_and_own);
    }
};

struct Trainer {
    const Communicator& comm;
    const ModelConfig config;
    const ParamTable table;
    const FlatLayout layout;
    const Schedule schedule;
    const int B, T, micro_steps;
    DeviceMemory memory;
    const TrainerMemory buffers;
    const cudaStream_t stream;
    MatmulContext matmuls;
    ZeroEngine zero;
    Model model;
    StepState* const state;                            // in device memory
    int *const inputs, *const targets, *const sorted_positions;  // (micro_steps, B, T) each
    unsigned long long* const rank_counts;             // (N + 1): valid targets of each rank, then this rank's own
    double* const rank_numbers;                        // (N + 1, 2): what host decisions are made from, then this rank's own
    unsigned long long* const checksums;               // (N + 1, zero.checksum_count()): of each rank's replicas, then this rank's own
    PinnedArray<StepState> host_states{kStepSlots}, read_back{kStepSlots};
    PhaseTimers phases;
    unsigned long long sent_bytes[kStepSlots] = {};    // by this rank, counted where they are sent
    cudaEvent_t step_begun[kStepSlots], step_done[kStepSlots], ids_copied, host_read;

    // Throws OutOfDeviceMemory where it does not fit.
    Trainer(const Communicator& comm, const ModelConfig& config, const ZeroConfig& zero_config, Recompute recompute, int B, int T, size_t device_memory_bytes)
        : comm(comm), config(config), table(make_param_table(config)), layout(run_layout(table, comm.size(), zero_config)), schedule(run_schedule(table, layout, zero_config)),
          B(B), T(T), micro_steps(zero_config.micro_steps), memory(device_memory_bytes), buffers(config, table, layout, schedule, zero_config, recompute, B, T, memory),
          stream(make_stream()), matmuls(buffers.workspace), zero(table, layout, schedule, comm, zero_config, buffers.zero, stream),
          model(config, table, B, T, {recompute, zero_config.lmhead_chunks}, buffers.model, matmuls, stream), state(buffers.state), inputs(buffers.ids),
          targets(inputs + tokens_per_step()), sorted_positions(targets + tokens_per_step()), rank_counts(buffers.rank_counts), rank_numbers(buffers.rank_numbers),
          checksums(buffers.checksums), phases(stream) {
        CUDA_CHECK(cudaMemsetAsync(state, 0, sizeof(StepState), stream));
        for (int slot = 0; slot < kStepSlots; ++slot) {
            CUDA_CHECK(cudaEventCreate(&step_begun[slot]));
            CUDA_CHECK(cudaEventCreate(&step_done[slot]));
        }
        for (cudaEvent_t* event : {&ids_copied, &host_read}) CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
    Trainer(const Trainer&) = delete;
    Trainer& operator=(const Trainer&) = delete;
    ~Trainer() {
        for (int slot = 0; slot < kStepSlots; ++slot) {
            cudaEventDestroy(step_begun[slot]);
            cudaEventDestroy(step_done[slot]);
        }
        for (const cudaEvent_t event : {ids_copied, host_read}) cudaEventDestroy(event);
        cudaStreamDestroy(stream);
    }

    // Tokens this rank computes in a step.
    size_t tokens_per_step() const { return static_cast<size_t>(micro_steps) * B * T; }

    // Queues the copy of `count` positions; ids_copied tells when `batch` may be filled again. sorted_positions may be missing.
    void copy_ids(const BatchBuffers& batch, size_t count) {
        CUDA_CHECK(cudaMemcpyAsync(inputs, batch.inputs, count * sizeof(int), cudaMemcpyHostToDevice, stream));
        CUDA_CHECK(cudaMemcpyAsync(targets, batch.targets, count * sizeof(int), cudaMemcpyHostToDevice, stream));
        if (batch.sorted_positions) CUDA_CHECK(cudaMemcpyAsync(sorted_positions, batch.sorted_positions, count * sizeof(int), cudaMemcpyHostToDevice, stream));
        CUDA_CHECK(cudaEventRecord(ids_copied, stream));
    }

    // Queues one optimizer step: begin_step(), every operation of the schedule, end_step(). The host waits for nothing; the results come to read_back[slot] when
    // step_done[slot] has happened.
    void queue_step(const StepInputs& step, const BatchBuffers& batch) {
        const NvtxRange range("step");
        const unsigned long long sent_before = comm.sent_bytes();
        begin_step(step, batch);
        for (const ScheduleOp& op : zero.schedule().step) queue(op);
        end_step(step.slot);
        sent_bytes[step.slot] = comm.sent_bytes() - sent_before;
    }

    void begin_step(const StepInputs& step, const BatchBuffers& batch) {
        StepState& host = host_states[step.slot];
        host.lr = static_cast<float>(step.lr);
        host.max_norm = static_cast<float>(step.max_norm);
        host.step = step.step;
        host.seed = step.seed;
        host.requests = step.requests;
        CUDA_CHECK(cudaEventRecord(step_begun[step.slot], stream));
        CUDA_CHECK(cudaMemcpyAsync(state, &host, offsetof(StepState, valid_tokens), cudaMemcpyHostToDevice, stream));
        copy_ids(batch, tokens_per_step());
        zero.stalls().begin_step(step.slot);
        phases.begin_step(step.slot);
    }

    void queue(const ScheduleOp& op) {
        const size_t first = static_cast<size_t>(op.micro_step) * B * T;
        switch (op.kind) {
            case OpKind::kCountTargets:  // the loss is the mean over all valid targets of the global batch, so they are counted before the first gradient
                count_valid_targets(rank_counts + comm.size(), targets, tokens_per_step(), stream);
                zero.start_gather(rank_counts, rank_counts + comm.size(), 1);
                break;
            case OpKind::kForward:
                if (op.index == table.embedding_unit()) zero.gradients().begin_micro_step(op.micro_step, state);
                phases.enter(&phases.forward);
                model.forward_unit(zero, op.index, inputs + first, B, T);
                break;
            case OpKind::kHead:
                phases.enter(&phases.head);
                if (op.micro_step == 0) {
                    zero.finish_gather();
                    set_inv_valid(state, rank_counts, comm.size(), stream);
                }
                model.head_forward_backward(zero, targets + first, &state->inv_valid_tokens);
                model.add_losses(&state->loss_sum, op.micro_step == 0, B, T);
                break;
            case OpKind::kBackward:
                phases.enter(&phases.backward);
                model.backward_unit(zero, op.index, inputs + first, sorted_positions + first);
                break;
            case OpKind::kDecide: phases.enter(&phases.update); [[fallthrough]];
            case OpKind::kGather: case OpKind::kDrop: case OpKind::kReduce: case OpKind::kGatherGradients: case OpKind::kStep: zero.queue(op, state);
        }
    }

    void end_step(int slot) {
        phases.enter(nullptr);
        CUDA_CHECK(cudaMemcpyAsync(&read_back[slot], state, sizeof(StepState), cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaEventRecord(step_done[slot], stream));
    }

    // Queues a forward pass of `B` sequences whose ids were copied; head() queues what comes of it (one of the model's heads). Collective where parameters are sharded.
    template <class Head>
    void queue_forward(int B, Head&& head) {
        for (const ScheduleOp& op : zero.schedule().forward) {
            if (op.kind == OpKind::kForward) {
                model.forward_unit(zero, op.index, inputs, B, T);
            } else if (op.kind == OpKind::kHead) {
                head();
            } else {
                zero.queue(op, state);
            }
        }
    }

    // The first `count` (at most 2) of every rank's rank_numbers, on the host, in rank order. Collective.
    std::vector<double> gather_numbers(size_t count, double timeout_seconds, const char* what) {
        zero.start_gather(rank_numbers, rank_numbers + 2 * comm.size(), count);
        zero.finish_gather();
        return read(rank_numbers, count * comm.size(), timeout_seconds, what);
    }

    // Device memory on the host, after what is queued on the stream.
    template <class T>
    std::vector<T> read(const T* address, size_t count, double timeout_seconds, const char* what) {
        PinnedArray<T> values(count);
        CUDA_CHECK(cudaMemcpyAsync(values.data(), address, count * sizeof(T), cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaEventRecord(host_read, stream));
        wait_for_event(host_read, comm, timeout_seconds, what);
        return std::vector<T>(values.data(), values.data() + count);
    }

    // Counters of a run that goes on; before its first step.
    void restore_counters(unsigned long long applied_steps, unsigned long long skipped_total, unsigned long long skipped_in_row) {
        StepState restored = {};
        restored.applied_steps = applied_steps;
        restored.skipped_total = skipped_total;
        restored.skipped_in_row = skipped_in_row;
        host_states[0] = restored;
        CUDA_CHECK(cudaMemcpyAsync(state, &host_states[0], sizeof(StepState), cudaMemcpyHostToDevice, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
    }

    // The state as it is after all that is queued; waits.
    StepState read_state() {
        zero.synchronize();
        CUDA_CHECK(cudaMemcpyAsync(&read_back[0], state, sizeof(StepState), cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        return read_back[0];
    }

    // Collective: rank 0 chooses an algorithm for every product of the model, everybody takes its choices: the same sums on all ranks. `stored`: choices of an earlier run, to be
    // taken again where this library and device can. Returns why they could not, on rank 0; else "".
    std::string choose_products(const Process& process, const std::vector<unsigned char>& stored = {}) {
        std::vector<unsigned char> choices;
        std::string why_not;
        if (process.rank == 0) {
            try {
                if (!stored.empty()) matmuls.import_choices(stored);
            } catch (const Error& error) {
                why_not = error.what();
            }
            model.choose_products(zero.any_params());
            choices = matmuls.export_choices();
        }
        if (process.ranks > 1) broadcast_bytes(process, &choices);
        if (process.rank != 0) matmuls.import_choices(choices);
        return why_not;
    }

private:
    static cudaStream_t make_stream() {
        cudaStream_t stream = nullptr;
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        return stream;
    }
};
