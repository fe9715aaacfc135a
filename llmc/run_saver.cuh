// When a run saves, what it says about it, and when it ends for it: the policy over Checkpointer.
#pragma once

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "llmc/checkpointer.cuh"
#include "llmc/metrics.h"
#include "llmc/options.h"
#include "llmc/units.h"

class RunSaver {
public:
    // Collective. Takes host memory and looks at the disk, so that neither ends a run after hours. `metrics` may be made later; it is rank 0's alone. Throws AgreedError.
    RunSaver(const Process& process, Trainer& trainer, const Options& options, long long steps, const std::unique_ptr<MetricsWriter>& metrics)
        : process_(process), options_(options), steps_(steps), metrics_(metrics), last_save_(std::chrono::steady_clock::now()) {
        if (options.no_save || options.allocate_only) return;
        run_on_all_ranks(process, [&] {
            checkpointer_ = std::make_unique<Checkpointer>(process, trainer, CheckpointSettings{options.out, options.save_async(), options.keep, options.comm_timeout});
            if (process.rank == 0) check_free_disk(options.out, checkpointer_->disk_bytes());
        });
    }

    bool saves() const { return checkpointer_ != nullptr; }

    // Rows of the start-up table.
    std::vector<std::pair<std::string, std::string>> rows() const {
        if (!saves()) return {{"saved", "never"}};
        std::string when = "at the end and on SIGUSR1";
        if (options_.save_minutes > 0) when = format("every %.6g minutes, ", options_.save_minutes) + when;
        if (options_.save_every > 0) when = format("every %lld steps, ", options_.save_every) + when;
        return {{"saved", format("%s; %s each, the newest %d are kept", when.c_str(), format_bytes(checkpointer_->checkpoint_bytes()).c_str(), options_.keep)},
                {"host memory", format("%s of a rank (--save-mode %s)", format_bytes(checkpointer_->host_bytes()).c_str(), options_.save_mode.c_str())}};
    }

    // StepRequest bits of this rank, for the next step that is queued.
    unsigned requests() const {
        unsigned bits = 0;
        if (stop_requested()) bits |= kRequestStop;
        const double minutes = std::chrono::duration<double>(std::chrono::steady_clock::now() - last_save_).count() / 60;
        if (process_.rank == 0 && saves() && options_.save_minutes > 0 && minutes >= options_.save_minutes) bits |= kRequestSave;
        if (saves() && checkpointer_->under_way() && checkpointer_->written()) bits |= kSaveWritten;
        return bits;
    }

    // `asked`: bits that the ranks agreed on after this step.
    bool due(long long step, unsigned asked) const {
        return saves() && ((options_.save_every > 0 && (step + 1) % options_.save_every == 0) || step + 1 == steps_ || (asked & (kRequestSave | kRequestStop)) != 0);
    }

    // Collective, with no step queued. A checkpoint that could not be written is no reason to lose the run: it goes on, and the next one may fit again.
    void save(const CheckpointInfo& info) {
        if (checkpointer_->under_way()) complete();
        if (metrics_) metrics_->sync();  // no checkpoint tells of steps that the metrics have lost
        step_ = info.step;
        guarded([&] { checkpointer_->save(info); });
        if (checkpointer_->under_way() && !options_.save_async()) complete();
        last_save_ = std::chrono::steady_clock::now();
    }

    // Collective: all ranks have written the checkpoint under way (kSaveWritten).
    void take_written() {
        if (saves() && checkpointer_->under_way()) complete();
    }

    // Collective, at the end of the run: throws AgreedError where its last checkpoint was not written.
    void end() {
        take_written();
        if (!error_.empty()) throw AgreedError("the last checkpoint of this run was not written: " + error_, 1);
    }

private:
    void complete() {
        guarded([&] {
            const Checkpointer::Saved saved = checkpointer_->finish();
            if (!metrics_) return;
            printf("step %lld/%lld | saved %s, %s in %.1f s\n", step_, steps_, saved.folder.c_str(), format_bytes(saved.bytes).c_str(), saved.seconds);
            if (!saved.warning.empty()) printf("warning: an old checkpoint could not be removed: %s\n", saved.warning.c_str());
            metrics_->write(JsonLine("event").add("step", step_ - 1).add("event", "save").add("folder", saved.folder).add("bytes", saved.bytes).add("seconds", saved.seconds));
        });
    }

    template <class Body>
    void guarded(Body&& body) {
        error_.clear();
        try {
            body();
        } catch (const AgreedError& error) {
            error_ = error.what();
            printf("step %lld/%lld | checkpoint NOT written: %s\n", step_, steps_, error.what());
            if (process_.rank == 0) fprintf(stderr, "warning: the checkpoint of step %lld was not written: %s\n", step_, error.what());
            if (metrics_) metrics_->write(JsonLine("event").add("step", step_ - 1).add("event", "save_failed").add("reason", error.what()));
        }
        fflush(stdout);
    }

    const Process& process_;
    const Options& options_;
    const long long steps_;  // of the run
    const std::unique_ptr<MetricsWriter>& metrics_;
    std::unique_ptr<Checkpointer> checkpointer_;
    std::chrono::steady_clock::time_point last_save_;
    long long step_ = 0;     // steps done, of the checkpoint under way
    std::string error_;      // of the last one
};
