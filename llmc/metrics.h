// The run folder (`--out`) and its metrics.jsonl: one JSON object a line, `kind` = train, val or event.
//
// Numbers are written with the fewest digits that read back as the same value. JSON has no NaN and no infinity; they are written as
// the strings "nan", "inf" and "-inf", which Python's float() and numpy take as they are.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

// One line under construction: JsonLine("train").add("step", 3).add("loss", 2.5f)
class JsonLine {
public:
    explicit JsonLine(const std::string& kind) { add("kind", kind); }

    JsonLine& add(const char* name, const std::string& value);
    JsonLine& add(const char* name, const char* value) { return add(name, std::string(value)); }
    JsonLine& add(const char* name, bool value) { return add_raw(name, value ? "true" : "false"); }
    JsonLine& add(const char* name, float value);
    JsonLine& add(const char* name, double value);
    template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>>
    JsonLine& add(const char* name, T value) { return add_raw(name, std::to_string(value)); }

    std::string text() const { return text_ + "}"; }

private:
    JsonLine& add_raw(const char* name, const std::string& json);
    std::string text_ = "{";
};

// What every train line holds.
struct TrainMetrics {
    long long step = 0;          // of the step that was just done, from 0
    double epoch = 0.0;          // epochs seen after it
    long long tokens = 0;        // trained on since the start of the run, all ranks
    double loss = 0.0;           // mean over the valid targets of the global batch
    double grad_norm = 0.0;      // global, before clipping
    double lr = 0.0;
    double step_ms = 0.0;
    double tokens_per_s = 0.0;   // all ranks
    double mfu = 0.0;            // against the datasheet; NaN where there is none
    double mfu_measured = 0.0;   // against the measured peak of the matrix products
    long long skipped = 0;       // steps skipped so far
    size_t mem_bytes = 0;        // device memory in use on this rank
    double data_ms = 0.0;        // of the step, waiting for data
    double exposed_comm_ms = 0.0;// of the step, waiting for communication
    size_t comm_bytes = 0;       // sent by this rank in the step
    double forward_ms = 0.0, head_ms = 0.0, backward_ms = 0.0, update_ms = 0.0;  // of the step, in each phase (waiting within it counts)
};

// A run's folder, held by one run at a time. Only rank 0 makes one.
class RunFolder {
public:
    // Creates the folder and its parents, locks it, and checks that it can be written. Throws Error with the system's reason, or
    // with the process that holds the lock.
    explicit RunFolder(const std::string& path);
    ~RunFolder();
    RunFolder(const RunFolder&) = delete;
    RunFolder& operator=(const RunFolder&) = delete;

    const std::string& path() const { return path_; }
    std::string file(const std::string& name) const { return path_ + "/" + name; }
    // What the lock file holds: who has the folder, and random digits that no other run has.
    const std::string& owner() const { return owner_; }

private:
    std::string path_, owner_;
    int lock_fd_ = -1;
};

// What every other rank calls once rank 0 has made its RunFolder and sent its owner(): throws Error unless `path` is that same folder here, which a folder of the same name
// on another host's own disk is not.
void check_run_folder_is_shared(const std::string& path, const std::string& owner);

class MetricsWriter {
public:
    // Starts folder/metrics.jsonl. One that an earlier run left is renamed to metrics.<n>.jsonl with the first n that is free.
    // With `append` it is continued instead, as a resumed run does: a last line without its end, which a process killed in mid-write leaves, is cut off; all before it stays.
    explicit MetricsWriter(const RunFolder& folder, bool append = false);
    ~MetricsWriter();
    MetricsWriter(const MetricsWriter&) = delete;
    MetricsWriter& operator=(const MetricsWriter&) = delete;

    // Each writes one line, complete when the call returns. Throws Error (disk full) and leaves no part of the line behind.
    void write(const JsonLine& line);
    void train(const TrainMetrics& metrics);
    void val(long long step, double val_loss, long long val_tokens);
    // On disk when it returns, so that a checkpoint never tells of steps whose metrics are lost. The file's name in the folder is synced by whoever publishes the checkpoint there.
    void sync();

    const std::string& path() const { return path_; }
    const std::string& kept() const { return kept_; }  // new name of an earlier run's file, "" if there was none

private:
    std::string path_, kept_;
    int fd_ = -1;
};
