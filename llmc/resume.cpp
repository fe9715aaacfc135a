#include "llmc/resume.h"

#include <cstdio>
#include <filesystem>

#include "llmc/error.h"
#include "llmc/hash.h"

namespace {

// "" where all ranks find the checkpoint whole, else why it is not.
std::string try_checkpoint(const Process& process, ResumePoint* point) {
    try {
        run_on_all_ranks(process, [&] {
            point->info = read_checkpoint_info(point->folder);
            check_checkpoint_sizes(point->folder, point->info);
            CHECK(point->info.files.count("config.json") == 1, "%s/trainer.json names no config.json", point->folder.c_str());
        });
        // On the hosts' own disks other checkpoints may have the same path, each whole in itself.
        const std::vector<std::string> infos = gather_texts(process, hash_of(checkpoint_json(point->info)));
        run_on_all_ranks(process, [&] {
            CHECK(infos[process.rank] == infos[0], "%s is another checkpoint here (step %lld) than the one that rank 0 sees; every rank must see the same files", point->folder.c_str(),
                  point->info.step);
        });
        // After everybody knows its size: a rank that found it cut off reads nothing.
        run_on_all_ranks(process, [&] {
            check_checkpoint_bytes(point->folder, point->info, process.rank, process.ranks);
            point->model = config_from_json_file(point->folder + "/config.json");
        });
        return "";
    } catch (const AgreedError& error) {
        return error.what();
    }
}

}  // namespace

std::optional<ResumePoint> find_checkpoint(const Process& process, const std::string& resume, const std::string& run_folder) {
    const bool newest = resume == "auto";
    std::vector<std::string> candidates = newest ? list_checkpoints(run_folder) : std::vector<std::string>{resume};
    // Rank 0's list for all: on a shared file system one rank may see a folder a moment later than another.
    std::string joined;
    for (const std::string& folder : candidates) joined += folder + '\0';
    std::vector<unsigned char> bytes(joined.begin(), joined.end());
    broadcast_bytes(process, &bytes);
    joined.assign(bytes.begin(), bytes.end());
    std::string passed_over;
    for (size_t begin = 0; begin < joined.size();) {
        const size_t end = joined.find('\0', begin);
        ResumePoint point;
        point.folder = joined.substr(begin, end - begin);
        begin = end + 1;
        const std::string why = try_checkpoint(process, &point);
        if (why.empty()) return point;
        if (!newest) {
            const std::vector<std::string> inside = list_checkpoints(resume);
            throw AgreedError("--resume " + resume + ": " + why + (inside.empty() ? "" : "; it is a run's folder: give one of its checkpoints, such as " + inside[0] + ", or --resume auto --out " + resume), 1);
        }
        if (process.rank == 0) {
            printf("passed over %s: %s\n", point.folder.c_str(), why.c_str());
            fflush(stdout);
        }
        passed_over += "\n  " + why;
    }
    if (!passed_over.empty()) {
        throw AgreedError("--resume auto: no checkpoint in " + run_folder + " is whole:" + passed_over + "\nto begin anew give another --out, or move them away", 1);
    }
    return std::nullopt;
}

bool lies_in(const std::string& checkpoint, const std::string& run_folder) {
    std::error_code error;
    return std::filesystem::equivalent(std::filesystem::path(checkpoint) / "..", run_folder, error) && !error;
}

void check_no_unfinished_run(const std::string& run_folder) {
    for (const std::string& folder : list_checkpoints(run_folder)) {
        CheckpointInfo info;
        try {
            info = read_checkpoint_info(folder);
        } catch (const Error&) {
            continue;
        }
        CHECK(info.finished(), "--out %s holds a run that stands at step %lld of %lld (%s): --resume auto goes on with it; for a new run give another --out, or move that one away", run_folder.c_str(),
              info.step, info.steps, folder.c_str());
        return;
    }
}
