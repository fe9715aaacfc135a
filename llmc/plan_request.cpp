#include "llmc/plan_request.h"

#include <sys/statvfs.h>

#include "llmc/data_loader.h"
#include "llmc/error.h"

namespace {

constexpr size_t kUsualDeviceBytes = 80'000'000'000;
// A CUDA context with cuBLAS's kernels is about 0.5 to 1 GB, NCCL's buffers and channels up to another one.
constexpr size_t kGpuReserveBytes = 2'000'000'000;

// 0 where nobody can know yet.
long long steps_of(const Options& options, const ModelConfig& config, const BatchPlan& batch) {
    if (options.steps > 0) return options.steps;
    try {
        const ShardSet shards = open_shards(options.train_data);
        return total_steps(options, WindowIndex(shards, std::min(options.seq_len, config.max_seq_len)).count(), batch.windows_per_step);
    } catch (const Error&) {
        if (options.given("epochs") || options.given("train-data")) throw;
        return 0;  // the default data, which a plan does not need
    }
}

}  // namespace

FreeDisk free_disk(const std::string& folder) {
    std::string existing = folder;
    struct statvfs disk = {};
    while (statvfs(existing.c_str(), &disk) != 0) {
        const size_t slash = existing.find_last_of('/');
        existing = slash == std::string::npos ? "." : slash == 0 ? "/" : existing.substr(0, slash);
        if (existing == "/" || existing == ".") {
            CHECK(statvfs(existing.c_str(), &disk) == 0, "cannot ask how much disk is free in %s", existing.c_str());
            break;
        }
    }
    return {existing, static_cast<size_t>(disk.f_bavail) * disk.f_frsize};
}

RunShape run_shape(const Options& options, const ModelConfig& config, int micro_steps, int ranks) {
    RunShape shape;
    shape.config = config;
    shape.ranks = ranks;
    shape.micro_batch = options.micro_batch;
    shape.seq_len = options.seq_len;
    shape.micro_steps = micro_steps;
    shape.stage = options.zero_stage;
    shape.bucket_mb = options.bucket_mb;
    shape.overlap = options.overlap();
    shape.sync_every_micro_step = options.sync_every_micro_step != 0;
    shape.fp32_gradients = options.grad_dtype == "fp32";
    shape.recompute = options.recompute;
    shape.lmhead_chunks = options.lmhead_chunks;
    return shape;
}

PlanRequest plan_request(const Options& options, const RunShape& shape, size_t element_bytes) {
    const ModelConfig& config = shape.config;
    PlanRequest request;
    request.shape = shape;
    request.element_bytes = element_bytes;
    request.device_bytes = options.device_memory > 0 ? static_cast<size_t>(options.device_memory) : kUsualDeviceBytes;
    request.device_text = options.device_memory > 0 ? "" : " (a usual card's; --device-memory says another)";
    request.reserve_bytes = options.memory_reserve >= 0 ? static_cast<size_t>(options.memory_reserve) : kGpuReserveBytes;
    request.links = parse_links(options.link);
    request.ranks_per_node = options.ranks_per_node;
    if (options.step_seconds > 0) {
        const double token_flops = flops_per_token(config, options.seq_len) + recompute_flops(config, options.seq_len, options.recompute) * (config.num_layers - 1);
        request.flops_per_s = token_flops * request.shape.rank_tokens() / options.step_seconds;
        request.flops_text = "from --step-seconds";
    } else {
        request.flops_per_s = options.device_tflops * 1e12 * options.mfu;
        request.flops_text = format("%.4g %% of --device-tflops %g", 100 * options.mfu, options.device_tflops);
    }
    // Beyond these, times and rates are infinite or no numbers.
    constexpr double kSlowest = 1e-30, kFastest = 1e30;
    CHECK(request.flops_per_s >= kSlowest && request.flops_per_s <= kFastest,
          "computation at %g operations a second (%s), of which nothing can be planned; give another %s", request.flops_per_s, request.flops_text.c_str(),
          options.step_seconds > 0 ? "--step-seconds" : "--device-tflops or --mfu");
    return request;
}

void ask_for_cost(PlanRequest* request, const Options& options, const BatchPlan& batch) {
    request->steps = steps_of(options, request->shape.config, batch);
    request->price = options.price;
    request->keep = options.keep;
    const FreeDisk disk = free_disk(options.out);
    request->folder = disk.folder;
    request->free_disk_bytes = disk.bytes;
}
