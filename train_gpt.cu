// train_gpt: trains a GPT/Llama-style language model, on one GPU, many, or none.
//
//   make train_gpt && mpirun -np 4 ./train_gpt            (all options: ./train_gpt --help)
//
// This file is the recipe of a run and the table of contents of the program: what happens when, and above each include what it brings.

// Error, fail, CHECK, format
#include "llmc/error.h"
// Process, start_processes, run_on_all_ranks, gather_texts, broadcast_bytes, run_main
#include "llmc/process.h"
// ModelConfig, preset_config, config_from_json_file
#include "llmc/model_config.h"
// Options, parse_options, options_help, option_rows, plan_batch, total_steps, make_lr_schedule
#include "llmc/options.h"
// LrSchedule: the learning rate of a step
#include "llmc/lr_schedule.h"
// DataLoader, ValLoader, sort_positions: batches from token shards
#include "llmc/data_loader.h"
// CheckpointInfo, list_checkpoints, set_newer_checkpoints_aside: the folders of a run's checkpoints
#include "llmc/checkpoint.h"
// CheckpointTensors, weights_files, optimizer_file: which file of a checkpoint holds what
#include "llmc/checkpoint_tensors.h"
// find_checkpoint, check_no_unfinished_run: what --resume means
#include "llmc/resume.h"
// DecodeTable: token ids to text
#include "llmc/decode_table.h"
// sample_token, uniform_from_keys
#include "llmc/sampler.h"
// RunFolder, MetricsWriter, TrainMetrics
#include "llmc/metrics.h"
// start_report, step_line, datasheet_flops
#include "llmc/report.h"
// params_plan_text: the arithmetic of --plan --params
#include "llmc/params_plan.h"
// Link, parse_links, collective_seconds: how long a collective takes
#include "llmc/network.h"
// flops_per_token, simulate_step: how long a step takes, from its schedule
#include "llmc/step_time.h"
// Plan, make_plan: a run's memory, bytes sent and time before it starts, and what would make it fit
#include "llmc/plan.h"
// plan_request, ask_for_cost, run_shape: what the options ask of a plan
#include "llmc/plan_request.h"
// plan_text, refusal_text, failed_allocation_text
#include "llmc/plan_report.h"
// floatX, launch, Float8, reductions: what every kernel stands on
#include "llmc/device.cuh"
// DeviceMemory (named allocations with a budget), PinnedArray, read_floats
#include "llmc/device_memory.cuh"
// select_device, measure_product_flops, measure_link
#include "llmc/device_setup.cuh"
// check_started_alike, check_same_files, replica_difference
#include "llmc/replicas.h"
// Communicator (reduce-scatter, all-gather over NCCL), wait_for_event
#include "llmc/comm.cuh"
// StepState and the kernels that fill it: count_valid_targets, set_inv_valid, decide_step
#include "llmc/step_state.cuh"
// matmul_forward, matmul_backward_input, matmul_backward_weight, bias_backward: every product, over cuBLASLt
#include "llmc/matmul.cuh"
// attention_forward, attention_backward
#include "llmc/attention.cuh"
// embedding_forward, embedding_backward
#include "llmc/embedding.cuh"
// rmsnorm_forward, fused_residual_rmsnorm_forward, rmsnorm_backward
#include "llmc/rmsnorm.cuh"
// qk_norm_forward, qk_norm_backward
#include "llmc/qk_norm.cuh"
// rope_table, rope_forward, rope_backward
#include "llmc/rope.cuh"
// swiglu_forward, swiglu_backward
#include "llmc/swiglu.cuh"
// cross_entropy: loss, and logit gradients in place
#include "llmc/cross_entropy.cuh"
// adamw_update
#include "llmc/adamw.cuh"
// sum_of_squares: the global gradient norm
#include "llmc/global_norm.cuh"
// accumulate_gradient: a later micro-step's gradients, with stochastic rounding (llmc/random.cuh)
#include "llmc/accumulate.cuh"
// init_normal, fill, copy_to_float
#include "llmc/init.cuh"
// ParamTable, FlatLayout: every parameter, its unit, its bucket
#include "llmc/param_table.h"
// Schedule: the order of a step, as data: gather, compute, drop, reduce, step
#include "llmc/schedule.h"
// checksum: the bits of a buffer in one number
#include "llmc/checksum.cuh"
// Gradients: where they are written, accumulated and reduced
#include "llmc/gradients.cuh"
// ZeroEngine: who holds which slice; queues what the schedule says
#include "llmc/zero.cuh"
// SpanTimer, PhaseTimers: how long the compute stream spends in each phase of a step, or waits
#include "llmc/span_timer.cuh"
// ModelMemory, MemoryLevers: activations, and which of them are computed again
#include "llmc/model_memory.cuh"
// Model: forward, backward, unit by unit
#include "llmc/model.cuh"
// Trainer: everything on the device, and the recipe of one step
#include "llmc/trainer.cuh"
// count_run: the trainer's allocations without a device
#include "llmc/memory_plan.cuh"
// evaluate, sample_text, check_replicas
#include "llmc/evaluate.cuh"
// load_parameters, hash_parameters: between host tensors and the flat buffer
#include "llmc/weights.cuh"
// Checkpointer, restore_checkpoint: between checkpoints and the device
#include "llmc/checkpointer.cuh"
// RunSaver: when a run saves
#include "llmc/run_saver.cuh"
// RunPlan: what a run is; check_fit, checkpoint_info
#include "llmc/run_plan.cuh"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>

static std::string folder_of(const std::string& path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash);
}

// --plan
static void print_plan(Options options, int ranks) {
    if (options.ranks > 0) ranks = options.ranks;
    if (options.params > 0) {
        printf("%s", (options.plan_json ? params_plan_json(options, ranks) : params_plan_text(options, ranks)).c_str());
        return;
    }
    const ModelConfig config = model_config_from_options(options);
    const BatchPlan batch = plan_batch(options.total_batch, options.micro_batch, options.seq_len, ranks, options.grad_accum);
    PlanRequest request = plan_request(options, run_shape(options, config, batch.grad_accum, ranks), sizeof(floatX));
    ask_for_cost(&request, options, batch);
    const Plan plan = make_plan(request, count_run);
    printf("%s", (options.plan_json ? plan_json(plan) : plan_text(plan)).c_str());
}

// Collective: rank 0 makes and locks the run folder, all make sure that it is theirs too.
static std::unique_ptr<RunFolder> open_run_folder(const Process& process, const std::string& path) {
    std::unique_ptr<RunFolder> folder;
    run_on_all_ranks(process, [&] {
        if (process.rank == 0) folder = std::make_unique<RunFolder>(path);
    });
    const std::string owner = gather_texts(process, folder ? folder->owner() : "")[0];
    run_on_all_ranks(process, [&] {
        if (process.rank != 0) check_run_folder_is_shared(path, owner);
    });
    return folder;
}

static int run(int argc, char** argv, const Process& process) {
    // ---- everything that can be refused without a device ----
    RunPlan plan;
    run_on_all_ranks(process, [&] { plan.options = parse_options(argc, argv); });
    const Options& options = plan.options;
    check_started_alike(process, options);
    if (options.help) {
        if (process.rank == 0) printf("%s", options_help().c_str());
        return 0;
    }
    if (options.plan) {
        run_on_all_ranks(process, [&] {
            if (process.rank == 0) print_plan(options, process.ranks);
        });
        return 0;
    }
    std::unique_ptr<RunFolder> folder;
    if (!options.resume.empty()) {
        const bool by_name = options.resume != "auto";
        if (!by_name) folder = open_run_folder(process, options.out);
        plan.resume = find_checkpoint(process, options.resume, options.out);
        if (by_name) folder = open_run_folder(process, options.out);  // a name that is wrong makes no folder
        run_on_all_ranks(process, [&] {
            const std::string out = options.out;
            if (plan.resume) plan.options = parse_options(argc, argv, plan.resume->info.options);
            plan.options.out = out;  // which may follow from the preset
            plan.in_place = plan.resume && lies_in(plan.resume->folder, out);
        });
    }
    Device device;
    std::vector<std::unique_ptr<HostBatch>> batches;
    std::unique_ptr<DataLoader> loader;  // after the batches, so that its thread is gone before the memory it fills
    run_on_all_ranks(process, [&] {
        plan.config = model_config_from_options(plan.options, plan.resume ? &plan.resume->model : nullptr);
        plan.batch = plan_batch(options.total_batch, options.micro_batch, options.seq_len, process.ranks);
        plan.zero = zero_config(options, run_shape(options, plan.config, plan.batch.grad_accum, process.ranks));
        device = select_device(process);
    });
    const std::vector<std::string> places = gather_texts(process, process.host + ", " + device.bus_id);
    if (!kRanksMayShareDevice) run_on_all_ranks(process, [&] { check_places_differ(places); });
    if (!options.ignore_plan && options.show_batch < 0) run_on_all_ranks(process, [&] { check_fit(plan, device, process.ranks); });
    run_on_all_ranks(process, [&] {
        std::vector<BatchBuffers> slots;
        for (int slot = 0; slot < 2; ++slot) {
            batches.push_back(std::make_unique<HostBatch>(static_cast<size_t>(plan.batch.grad_accum) * options.micro_batch * options.seq_len));
            slots.push_back(batches.back()->buffers());
        }
        loader = std::make_unique<DataLoader>(options.train_data, loader_settings(plan, process), slots);
        const long long val_windows = options.val_batches * options.micro_batch;
        if (!options.val_data.empty()) plan.val_loader = std::make_unique<ValLoader>(options.val_data, loader_settings(plan, process), val_windows);
        plan.steps = total_steps(options, loader->windows(), loader->windows_per_step());
        plan.schedule = make_lr_schedule(options, plan.steps);
    });
    // Ranks that see other files would train on other data, or wait for one another in an evaluation or a sample.
    check_same_files(process, "shards of --train-data " + options.train_data, data_fingerprint(loader->shards()));
    check_same_files(process, "shards of --val-data " + options.val_data, plan.val_loader ? data_fingerprint(plan.val_loader->shards()) : "none");
    if (options.show_batch >= 0) {
        if (process.rank == 0) {
            for (const WindowOrigin& w : loader->describe(options.show_batch)) {
                printf("position %lld epoch %lld rank %d micro-step %d row %d: %s token %zu\n", w.position, w.epoch, w.rank, w.micro_step, w.row, w.shard.c_str(), w.first_token);
            }
        }
        return 0;
    }
    if (plan.resume) {
        const CheckpointInfo& info = plan.resume->info;
        run_on_all_ranks(process, [&] {
            plan.changes = check_changes({info.options, info.data_fingerprint, info.precision, plan.resume->model}, meaning_of(plan, *loader), options.allow_change);
            CHECK(info.step <= plan.steps, "%s stands at step %lld, beyond the %lld steps of this run; give more --steps", plan.resume->folder.c_str(), info.step, plan.steps);
        });
        if (info.step == plan.steps) {
            if (process.rank == 0) {
                printf("nothing to do: %s is the last of the run's %lld steps. To train on: --steps MORE --allow-change steps\n", plan.resume->folder.c_str(), plan.steps);
            }
            return 0;
        }
    }
    std::unique_ptr<DecodeTable> decode;
    const std::string decode_path = folder_of(loader->shards().shards[0].path()) + "/decode.bin";
    run_on_all_ranks(process, [&] {
        if (access(decode_path.c_str(), R_OK) == 0) decode = std::make_unique<DecodeTable>(decode_path);
    });
    check_same_files(process, "bytes in " + decode_path, decode ? file_hash(decode_path) : "missing");
    run_on_all_ranks(process, [&] {
        for (const int id : decode ? decode->encode(options.prompt) : std::vector<int>()) {  // a prompt that does not fit is refused now
            CHECK(id < plan.config.vocab_size, "--prompt has token id %d, outside the model's vocabulary of %d; use another prompt", id, plan.config.vocab_size);
        }
    });
    if (options.resume.empty()) folder = open_run_folder(process, options.out);
    run_on_all_ranks(process, [&] {
        if (process.rank == 0 && !plan.in_place) check_no_unfinished_run(options.out);
    });
    run_on_all_ranks(process, [&] {  // after that: its logs stay too
        if (process.rank == 0) return;
        const std::string log = options.out + "/log.rank" + std::to_string(process.rank);
        CHECK(freopen(log.c_str(), plan.in_place ? "a" : "w", stdout), "cannot write %s: %s; see whether --out can be written", log.c_str(), strerror(errno));
    });

    // ---- the device ----
    const Communicator comm(process);
    double product_flops = 0;
    std::unique_ptr<Trainer> trainer_owner;
    run_on_all_ranks(process, [&] { product_flops = measure_product_flops(); });
    const double link_bytes_per_s = measure_link(comm, options.comm_timeout);
    run_on_all_ranks(process, [&] {
        try {
            trainer_owner = std::make_unique<Trainer>(comm, plan.config, plan.zero, recompute_from_name(options.recompute), options.micro_batch, options.seq_len,
                                                      static_cast<size_t>(options.device_memory));
        } catch (const OutOfDeviceMemory& error) {
            fail("%s\n%s", error.what(), failed_allocation_text(make_plan(request_of_run(plan, device, process.ranks), count_run), error.taken).c_str());
        }
    });
    Trainer& trainer = *trainer_owner;
    std::string other_products;  // why products could not be chosen as before
    if (plan.resume) {
        other_products = restore_checkpoint(process, trainer, plan.resume->folder, plan.resume->info, plan.resume->info.precision == kPrecision);
    } else if (!options.allocate_only) {
        trainer.choose_products(process);
        trainer.zero.init_params(options.seed, plan.config.num_layers);
        trainer.zero.start_optimizer();
    }
    std::unique_ptr<MetricsWriter> metrics;
    RunSaver saver(process, trainer, options, plan.steps, metrics);
    std::string aside;
    run_on_all_ranks(process, [&] {  // nothing can be refused any more: what an earlier run left is moved out of the way
        if (process.rank != 0 || options.allocate_only) return;
        remove_unfinished(options.out);
        aside = set_newer_checkpoints_aside(options.out, plan.in_place ? plan.first_step() : -1);
        metrics = std::make_unique<MetricsWriter>(*folder, plan.in_place);
    });
    const std::vector<std::string> ranks = gather_texts(process, format("%s, pid %d, %s, %d multiprocessors (threads on a CPU)", process.host.c_str(), process.pid,
                                                                        device.name.c_str(), device.multiprocessors));
    for (const std::string& warning : loader->shards().warnings) printf("warning: %s\n", warning.c_str());
    std::vector<std::pair<std::string, std::string>> checkpoint_rows = resume_rows(plan);
    for (const auto& row : saver.rows()) checkpoint_rows.push_back(row);
    printf("%s", start_report({options, plan.config, plan.batch, plan.steps, ranks, trainer.table, trainer.zero.layout(), trainer.zero.schedule(), *loader, plan.val_loader.get(),
                               trainer.memory.bill(), checkpoint_rows, product_flops, link_bytes_per_s, sizeof(floatX)}).c_str());
    fflush(stdout);
    if (options.allocate_only) {
        printf("allocated %s of device memory on this rank, as --allocate-only asks; nothing was computed\n", format_bytes(trainer.memory.total_bytes()).c_str());
        return 0;
    }
    if (!aside.empty()) printf("checkpoints of an earlier run were moved to %s\n", aside.c_str());
    if (!other_products.empty()) printf("matrix products are chosen anew, so the last bits may differ from a run that was not interrupted: %s\n", other_products.c_str());
    if (metrics) {
        JsonLine start("event");
        start.add("step", plan.first_step() - 1).add("event", "start").add("device", device.name).add("ranks", process.ranks).add("product_flops", product_flops);
        if (process.ranks > 1) start.add("link_bytes_per_s", link_bytes_per_s);
        metrics->write(start.add("devices_shared", kDeviceIsCpu));
        if (plan.resume) {
            metrics->write(JsonLine("event").add("step", plan.first_step() - 1).add("event", "resume").add("from", plan.resume->folder).add("written_by_ranks", plan.resume->info.ranks)
                               .add("written_in_stage", plan.resume->info.stage));
        }
    }

    // ---- the loop: queue step s, then read what step s-1 gave ----
    const double step_flops = flops_per_token(plan.config, options.seq_len) * plan.batch.tokens_per_step;
    const double peak_flops = datasheet_flops(device.name) * process.ranks;
    double data_ms[kStepSlots] = {}, epochs[kStepSlots] = {};
    long long windows_consumed = 0;
    unsigned asked = 0;         // StepRequest bits that the ranks have agreed on
    long long finished = plan.first_step();     // steps whose results were read
    long long fresh_start = plan.first_step();  // the first step after a pause: its time counts from its own beginning, not from the end of the step before
    // Rank 0 alone, or where parameters are sharded all ranks, since they are gathered.
    const bool reads_params = process.rank == 0 || trainer.zero.sharding().parameters;
    // What every rank has found out and ends for.
    const auto end_run = [&](long long step, const char* reason, const std::string& message) {
        printf("ended after step %lld: %s\n", step + 1, message.c_str());
        if (metrics) metrics->write(JsonLine("event").add("step", step).add("event", "error").add("reason", reason));
        saver.take_written();  // what is being written is of an earlier step, and whole
        throw AgreedError(message, 1);
    };
    const auto finish_step = [&](long long step) {
        const int slot = step % kStepSlots;
        finished = step + 1;
        wait_for_event(trainer.step_done[slot], comm, options.comm_timeout, format("step %lld", step + 1).c_str());
        const StepState& state = trainer.read_back[slot];
        float step_ms = 0;
        const bool fresh = step == fresh_start;
        CUDA_CHECK(cudaEventElapsedTime(&step_ms, fresh ? trainer.step_begun[slot] : trainer.step_done[(step - 1) % kStepSlots], trainer.step_done[slot]));
        TrainMetrics m;
        m.step = step;
        m.epoch = epochs[slot];
        m.tokens = plan.tokens_after(step);
        m.loss = state.loss;
        m.grad_norm = state.grad_norm;
        m.lr = plan.schedule.at(step);
        m.step_ms = step_ms + (fresh ? data_ms[slot] : 0);
        m.tokens_per_s = plan.batch.tokens_per_step / (m.step_ms * 1e-3);
        m.mfu = peak_flops > 0 ? step_flops / (m.step_ms * 1e-3) / peak_flops : std::nan("");
        m.mfu_measured = step_flops / (m.step_ms * 1e-3) / (product_flops * process.ranks);
        m.skipped = static_cast<long long>(state.skipped_total);
        m.mem_bytes = trainer.memory.total_bytes();
        m.data_ms = data_ms[slot];
        m.exposed_comm_ms = trainer.zero.stalls().total_ms(slot);
        m.comm_bytes = trainer.sent_bytes[slot];
        m.forward_ms = trainer.phases.forward.total_ms(slot);
        m.head_ms = trainer.phases.head.total_ms(slot);
        m.backward_ms = trainer.phases.backward.total_ms(slot);
        m.update_ms = trainer.phases.update.total_ms(slot);
        printf("%s\n", step_line(m, plan.steps).c_str());
        if (metrics) metrics->train(m);
        if (state.skip) {
            printf("step %lld skipped: the gradient norm is not finite\n", step + 1);
            if (metrics) metrics->write(JsonLine("event").add("step", step).add("event", "skip").add("skipped_in_row", state.skipped_in_row));
        }
        if (state.skipped_in_row > static_cast<unsigned long long>(options.max_skipped)) {
            end_run(step, "max-skipped", format("%llu steps in a row had a gradient norm that is not finite (--max-skipped %d): try a lower --lr, a longer --warmup, a smaller --clip, or look at "
                                                "the data with --show-batch %lld", state.skipped_in_row, options.max_skipped, step));
        }
        fflush(stdout);
        asked |= state.requests_any & (kRequestStop | kRequestSave);
        asked |= state.requests_all & kSaveWritten;
    };
    const auto compare_replicas = [&](long long step) {
        const std::string difference = check_replicas(trainer, options.comm_timeout);
        if (!difference.empty()) end_run(step, "replicas", difference);
    };
    const auto evaluate_and_print = [&](long long step) {
        if (!plan.val_loader) return;
        const Evaluation result = evaluate(trainer, *plan.val_loader, options.comm_timeout);
        printf("step %lld/%lld | validation loss %.4f nats a token over %lld tokens\n", step + 1, plan.steps, result.loss, result.tokens);
        if (metrics) metrics->val(step, result.loss, result.tokens);
    };
    const auto sample_and_print = [&](long long step) {
        if (!reads_params) return;
        if (!decode) {
            printf("no sample: there is no decode.bin beside the training shards\n");
            return;
        }
        printf("step %lld/%lld | sample: %s%s\n", step + 1, plan.steps, options.prompt.c_str(), sample_text(trainer, *decode, options, step).c_str());
    };
    const auto is_due = [&](long long step, long long every, bool at_end) { return (every > 0 && (step + 1) % every == 0) || (at_end && step + 1 == plan.steps); };

    long long stopped_after = -1;
    compare_replicas(plan.first_step() - 1);
    for (long long step = plan.first_step(); step < plan.steps; ++step) {
        const int slot = step % kStepSlots;
        const StepBatch& batch = loader->next();
        data_ms[slot] = batch.wait_ms;
        epochs[slot] = batch.epoch;
        windows_consumed = batch.windows_consumed;
        trainer.queue_step({step, plan.schedule.at(step), options.clip, options.seed, slot, saver.requests()}, batch.buffers);
        if (finished < step) finish_step(step - 1);
        wait_for_event(trainer.ids_copied, comm, options.comm_timeout, "a batch");  // before the loader reuses its buffers
        const bool eval_due = is_due(step, options.val_every, true), sample_due = is_due(step, options.sample_every, options.sample_every > 0);
        if (!eval_due && !sample_due && !saver.due(step, asked) && asked == 0) continue;
        finish_step(step);  // which may bring more that is asked for
        const bool save_due = saver.due(step, asked);
        if (eval_due || save_due) compare_replicas(step);
        if (eval_due) evaluate_and_print(step);
        if (sample_due) sample_and_print(step);
        if (asked & kSaveWritten) saver.take_written();
        if (save_due) saver.save(checkpoint_info(plan, process, *loader, trainer.read_back[slot], step, windows_consumed));
        fflush(stdout);
        fresh_start = step + 1;
        if (asked & kRequestStop) {
            stopped_after = step;
            break;
        }
        asked = 0;
    }
    saver.end();
    const std::string hash = reads_params ? hash_parameters(trainer.zero, trainer.stream) : "";
    if (process.rank == 0) {
        size_t free_bytes = 0, device_bytes = 0;
        CUDA_CHECK(cudaMemGetInfo(&free_bytes, &device_bytes));
        const bool stopped = stopped_after >= 0 && stopped_after + 1 < plan.steps;
        if (stopped) printf("stopped by SIGUSR1 after step %lld/%lld%s, weights %s\n", stopped_after + 1, plan.steps, saver.saves() ? "; --resume auto goes on" : ", not saved (--no-save)", hash.c_str());
        else printf("done: %lld steps, weights %s, metrics in %s\n", plan.steps, hash.c_str(), metrics->path().c_str());
        metrics->write(JsonLine("event").add("step", stopped ? stopped_after : plan.steps - 1).add("event", stopped ? "stop" : "done").add("weights", hash)
                           .add("device_used_bytes", device_bytes - free_bytes));  // by everybody: contexts, libraries and other processes too
    }
    trainer.zero.synchronize();
    return 0;
}

int main(int argc, char** argv) {
    remember_stop_signal();  // before MPI starts: one that comes early ends the run after its first step
    // Alone, these two want no peers: no MPI, which takes longer to start than they do.
    const bool alone = std::any_of(argv, argv + argc, [](const char* word) { return strcmp(word, "--plan") == 0 || strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0; });
    return run_main(argc, argv, [&](const Process& process) { return run(argc, argv, process); }, alone);
}
