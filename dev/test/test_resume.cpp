// Which checkpoint a run goes on from: the newest whole one, and every other one says why it is not.
#include <functional>

#include "dev/test/host_test.h"
#include "llmc/resume.h"

namespace fs = std::filesystem;

namespace {

using Names = std::vector<std::string>;

// Saves a checkpoint whose model has `layers` layers; returns its folder.
std::string save(const std::string& run, long long step, long long steps = 100, int layers = 3) {
    begin_checkpoint(run, step);
    CheckpointInfo info;
    info.step = step;
    info.steps = steps;
    info.options = {{"lr", "0.5"}};
    ModelConfig config = small_config();
    config.num_layers = layers;
    const std::map<std::string, std::string> files = {{"config.json", config_json_text(config, "bfloat16")}, {"model.safetensors", "weights of step " + std::to_string(step)},
                                                      {"optimizer-00000-of-00001.safetensors", std::string(500, 'o')}};
    for (const auto& [name, bytes] : files) info.files[name] = write_durable_file(run + "/" + unfinished_name(step) + "/" + name, bytes);
    return complete_checkpoint(run, info);
}

struct Found { std::optional<ResumePoint> point; std::string printed; };

Found find(const std::string& resume, const std::string& run) {
    testing::internal::CaptureStdout();
    std::optional<ResumePoint> point;
    try {
        point = find_checkpoint(Process{}, resume, run);
    } catch (...) {
        testing::internal::GetCapturedStdout();
        throw;
    }
    return {point, testing::internal::GetCapturedStdout()};
}

void refused(const std::string& resume, const std::string& run, const Names& words) {
    expect_error<AgreedError>([&] {
        try {
            find(resume, run);
        } catch (const AgreedError& error) {
            EXPECT_EQ(error.exit_status, 1);
            throw;
        }
    }, words);
}

void flip_bit(const std::string& path) {
    std::string bytes = read_file(path);
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
    write_file(path, bytes);
}

// What can be wrong with a checkpoint's folder, and words of the message that says so.
struct Damage { std::function<void(const std::string& folder)> make; Names words; };
const std::vector<Damage> kDamages = {
    {[](const std::string& folder) { fs::remove(folder + "/trainer.json"); }, {"/trainer.json is missing"}},
    {[](const std::string& folder) { fs::resize_file(folder + "/trainer.json", 200); }, {"/trainer.json", "cut off"}},
    {[](const std::string& folder) { write_file(folder + "/trainer.json", ""); }, {"/trainer.json", "cut off"}},
    {[](const std::string& folder) { std::string text = read_file(folder + "/trainer.json"); text.replace(text.find("0.5"), 3, "0.6"); write_file(folder + "/trainer.json", text); },
     {"/trainer.json", "checksum"}},
    {[](const std::string& folder) { fs::remove(folder + "/model.safetensors"); }, {"/model.safetensors", "is missing"}},
    {[](const std::string& folder) { fs::resize_file(folder + "/model.safetensors", 3); }, {"/model.safetensors", "has 3 bytes"}},
    {[](const std::string& folder) { fs::resize_file(folder + "/model.safetensors", 3000); }, {"/model.safetensors", "has 3000 bytes"}},
    {[](const std::string& folder) { flip_bit(folder + "/model.safetensors"); }, {"/model.safetensors", "XXH3"}},
    {[](const std::string& folder) { flip_bit(folder + "/optimizer-00000-of-00001.safetensors"); }, {"/optimizer-00000-of-00001.safetensors", "XXH3"}},
    {[](const std::string& folder) { flip_bit(folder + "/config.json"); }, {"/config.json", "XXH3"}},
    {[](const std::string& folder) { fs::remove(folder + "/config.json"), fs::create_directory(folder + "/config.json"); }, {"/config.json", "regular file"}},
    {[](const std::string& folder) {  // whole, and without a model
         CheckpointInfo info = read_checkpoint_info(folder);
         info.files.erase("config.json");
         write_file(folder + "/trainer.json", checkpoint_json(info));
     }, {"names no config.json"}},
    {[](const std::string& folder) {  // whole, with a model this program does not compute
         CheckpointInfo info = read_checkpoint_info(folder);
         write_file(folder + "/config.json", R"({"model_type": "gpt2"})");
         info.files["config.json"] = summarize_file(folder + "/config.json");
         write_file(folder + "/trainer.json", checkpoint_json(info));
     }, {"/config.json", "gpt2"}},
};

TEST(Resume, AutoTakesTheNewestWholeOne) {
    const TempFolder run;
    save(run.path(), 4, 100, 2);
    save(run.path(), 12, 100, 4);
    save(run.path(), 8, 100, 3);
    fs::create_directory(run.file(".saving-step_00000020"));
    fs::create_directory(run.file(".removing-step_00000021"));
    const Found found = find("auto", run.path());
    ASSERT_TRUE(found.point);
    EXPECT_EQ(found.point->folder, run.file("step_00000012"));
    EXPECT_EQ(found.point->info.step, 12);
    EXPECT_EQ(found.point->info.options.at("lr"), "0.5");
    EXPECT_EQ(found.point->model.num_layers, 4);
    EXPECT_EQ(found.point->model.channels, small_config().channels);
    EXPECT_EQ(found.printed, "");
}

TEST(Resume, AutoPassesOverEachDamageAndSaysSo) {
    for (const Damage& damage : kDamages) {
        const TempFolder run;
        save(run.path(), 4);
        save(run.path(), 8, 100, 2);
        damage.make(save(run.path(), 12));
        const Found found = find("auto", run.path());
        ASSERT_TRUE(found.point);
        EXPECT_EQ(found.point->folder, run.file("step_00000008"));
        EXPECT_EQ(found.point->model.num_layers, 2);
        EXPECT_EQ(found.printed.find("passed over " + run.file("step_00000012") + ": "), 0u) << found.printed;
        for (const std::string& word : damage.words) EXPECT_NE(found.printed.find(word), std::string::npos) << word << " is not in: " << found.printed;
        EXPECT_EQ(std::count(found.printed.begin(), found.printed.end(), '\n'), 1) << found.printed;
        // Named, it is refused: nothing else is taken in its place.
        Names words = damage.words;
        words.push_back("--resume " + run.file("step_00000012") + ": ");
        refused(run.file("step_00000012"), run.path(), words);
    }
}

TEST(Resume, NoneAtAllIsANewRun) {
    const TempFolder run;
    EXPECT_FALSE(find("auto", run.path()).point);
    EXPECT_FALSE(find("auto", run.file("none")).point);
    fs::create_directory(run.file(".saving-step_00000004"));
    fs::create_directory(run.file("earlier.1"));
    save(run.file("earlier.1"), 8);
    fs::create_directory_symlink(run.file("earlier.1/step_00000008"), run.file("step_00000008"));
    write_file(run.file("metrics.jsonl"), "");
    const Found found = find("auto", run.path());
    EXPECT_FALSE(found.point);
    EXPECT_EQ(found.printed, "");
}

TEST(Resume, OnlyDamagedOnesAreNoReasonToBeginAnew) {
    const TempFolder run;
    Names words = {"--resume auto: no checkpoint in " + run.path() + " is whole", "another --out"};
    for (size_t i = 0; i < kDamages.size(); ++i) {
        const std::string folder = save(run.path(), static_cast<long long>(i) + 1);
        kDamages[i].make(folder);
        words.push_back(folder + "/");
        for (const std::string& word : kDamages[i].words) words.push_back(word);
    }
    refused("auto", run.path(), words);
}

TEST(Resume, AFolderThatIsNamed) {
    const TempFolder run, elsewhere;
    save(run.path(), 4, 100, 2);
    save(run.path(), 8);
    const Found found = find(run.file("step_00000004"), run.path());
    ASSERT_TRUE(found.point);
    EXPECT_EQ(found.point->folder, run.file("step_00000004"));
    EXPECT_EQ(found.point->info.step, 4);
    EXPECT_EQ(found.point->model.num_layers, 2);
    EXPECT_EQ(found.printed, "");
    // It may have any name, lie anywhere, and be reached by a link: the user says so.
    fs::rename(run.file("step_00000004"), elsewhere.file("the best"));
    EXPECT_EQ(find(elsewhere.file("the best"), run.path()).point->info.step, 4);
    fs::create_directory_symlink(elsewhere.file("the best"), elsewhere.file("link"));
    EXPECT_EQ(find(elsewhere.file("link"), run.path()).point->info.step, 4);

    refused(run.file("step_00000005"), run.path(), {"--resume " + run.file("step_00000005") + ": ", "/trainer.json is missing"});
    refused(elsewhere.path(), run.path(), {"--resume " + elsewhere.path(), "/trainer.json is missing", "no checkpoint"});
    write_file(elsewhere.file("a file"), "x");
    refused(elsewhere.file("a file"), run.path(), {"a file/trainer.json", "Not a directory"});
    // Another program's checkpoint.
    write_file(elsewhere.file("trainer.json"), R"({"global_step": 5})");
    refused(elsewhere.path(), run.path(), {"trainer.json", "`format` is missing"});
    // The folder of the run in place of one of its checkpoints.
    save(run.path(), 12);
    refused(run.path(), run.path(), {"--resume " + run.path() + ": ", "it is a run's folder", run.file("step_00000012"), "--resume auto --out " + run.path()});
}

TEST(Resume, ARunsFolderMayHaveAnyName) {
    const TempFolder folder;
    const std::string run = folder.file("two\nlines and a space");
    fs::create_directory(run);
    save(run, 4);
    flip_bit(save(run, 8) + "/model.safetensors");
    const Found found = find("auto", run);
    ASSERT_TRUE(found.point);
    EXPECT_EQ(found.point->folder, run + "/step_00000004");
}

TEST(Resume, ACheckpointLiesInItsRunFolderAndInNoOther) {
    const TempFolder run, other;
    const std::string checkpoint = save(run.path(), 4), link = other.file("newest");
    fs::create_directory_symlink(checkpoint, link);
    EXPECT_TRUE(lies_in(checkpoint, run.path()));
    EXPECT_TRUE(lies_in(checkpoint, run.path() + "/"));
    EXPECT_TRUE(lies_in(link, run.path()));  // where it is, not what it is called
    EXPECT_FALSE(lies_in(checkpoint, other.path()));
    EXPECT_FALSE(lies_in(link, other.path()));
    EXPECT_FALSE(lies_in(checkpoint, run.file("none")));
    EXPECT_FALSE(lies_in(run.file("none"), run.path()));
}

TEST(NewRun, DoesNotBuryAnUnfinishedOne) {
    const TempFolder run;
    EXPECT_NO_THROW(check_no_unfinished_run(run.path()));
    EXPECT_NO_THROW(check_no_unfinished_run(run.file("none")));
    save(run.path(), 4);
    save(run.path(), 8);
    const auto unfinished = [&](const std::string& where) {
        expect_error([&] { check_no_unfinished_run(run.path()); }, {"--out " + run.path(), "at step " + where + " of 100", "--resume auto", "another --out"});
    };
    unfinished("8");
    save(run.path(), 99);
    unfinished("99");
    // The newest that can be read decides.
    write_file(save(run.path(), 100) + "/trainer.json", "{");
    unfinished("99");
    save(run.path(), 101, 101);
    EXPECT_NO_THROW(check_no_unfinished_run(run.path()));
    save(run.path(), 102, 101);
    EXPECT_NO_THROW(check_no_unfinished_run(run.path()));
    // Nothing that can be read is nothing to go on with.
    const TempFolder damaged;
    fs::remove(save(damaged.path(), 4) + "/trainer.json");
    EXPECT_NO_THROW(check_no_unfinished_run(damaged.path()));
}

}  // namespace
