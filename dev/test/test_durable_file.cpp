// Files that are on the disk before anyone relies on them: their hash, what is refused, and what happens when the system says no.
//
// write, fsync and close are defined here and go before the C library's, so that a test can let one fail or look at what was asked for.
#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "dev/test/host_test.h"
#include "llmc/durable_file.h"
#include "llmc/replicas.h"

namespace {

// What the calls below do instead of their work, and what they saw. Errors are errno values, 0 for none.
struct {
    int fsync_error = 0, close_error = 0;
    int interrupted_fsyncs = 0;      // so many calls of fsync end with EINTR first
    size_t most_bytes = 0;           // a write takes no more than these, and every second one ends with EINTR; 0: as usual
    int writes = 0, fsyncs = 0;
    size_t written = 0;
    bool direct_refused = false;     // a write past the cache ends with EINVAL
} system_calls;

template <typename Result>
Result with_errno(Result result, int reason) {
    errno = reason;
    return result;
}

}  // namespace

extern "C" {
ssize_t write(int fd, const void* data, size_t bytes) {
    if (fd > 2 && system_calls.direct_refused && (fcntl(fd, F_GETFL) & O_DIRECT)) return with_errno<ssize_t>(-1, EINVAL);
    if (fd > 2 && system_calls.most_bytes) {
        if (++system_calls.writes % 2) return with_errno<ssize_t>(-1, EINTR);
        bytes = std::min(bytes, system_calls.most_bytes);
    }
    const ssize_t count = syscall(SYS_write, fd, data, bytes);
    if (fd > 2 && count > 0) system_calls.written += count;
    return count;
}

int fsync(int fd) {
    ++system_calls.fsyncs;
    if (system_calls.interrupted_fsyncs-- > 0) return with_errno(-1, EINTR);
    if (system_calls.fsync_error) return with_errno(-1, system_calls.fsync_error);
    return static_cast<int>(syscall(SYS_fsync, fd));
}

int close(int fd) {
    const int status = static_cast<int>(syscall(SYS_close, fd));
    return system_calls.close_error ? with_errno(-1, system_calls.close_error) : status;
}
}

namespace {

std::string some_bytes(size_t count) {
    std::string bytes(count, '\0');
    for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>(i * 2654435761u >> 13);
    return bytes;
}

std::string hash_of(const std::string& bytes) {
    Hash64 hash;
    hash.add(bytes.data(), bytes.size());
    return hash.hex();
}

int open_files() {
    int count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
    return count;
}

class Durable : public testing::Test {
protected:
    void SetUp() override {
        system_calls = {};
        open_before_ = open_files();
    }
    void TearDown() override {
        system_calls = {};
        EXPECT_EQ(open_files(), open_before_) << "a file was left open";
    }
    std::string path() const { return folder_.file("f.bin"); }
    TempFolder folder_;
    int open_before_ = 0;
};

TEST_F(Durable, WhatIsWrittenIsWhatIsReadAndItsHash) {
    const size_t chunk = size_t{1} << 20;
    for (const size_t size : {size_t{0}, size_t{1}, size_t{239}, size_t{240}, size_t{241}, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 17})
        for (const size_t piece : {size == 0 ? size_t{1} : size, size_t{65537}}) {
            SCOPED_TRACE(format("%zu bytes in pieces of %zu", size, piece));
            const std::string bytes = some_bytes(size);
            std::filesystem::remove(path());
            DurableFile file(path());
            for (size_t at = 0; at < size; at += piece) file.write(bytes.data() + at, std::min(piece, size - at));
            EXPECT_EQ(file.bytes(), size);
            const FileSummary summary = file.finish();
            EXPECT_EQ(summary, (FileSummary{size, hash_of(bytes)}));
            EXPECT_TRUE(read_file(path()) == bytes);
            EXPECT_EQ(summarize_file(path()), summary);
            EXPECT_EQ(file_hash(path()), summary.xxh3);
        }
}

TEST_F(Durable, OneByteMoreOrLessIsAnotherSummary) {
    const std::string bytes = some_bytes(5000);
    const FileSummary summary = write_durable_file(path(), bytes);
    EXPECT_EQ(summary, (FileSummary{5000, hash_of(bytes)}));
    std::string other = bytes;
    other[4999] ^= 1;
    write_file(path(), other);
    EXPECT_NE(summarize_file(path()), summary);
    EXPECT_EQ(summarize_file(path()).bytes, summary.bytes);
    write_file(path(), bytes.substr(0, 4999));
    EXPECT_NE(summarize_file(path()), summary);
}

TEST_F(Durable, PartialAndInterruptedCallsAreContinued) {
    const std::string bytes = some_bytes(10000);
    system_calls.most_bytes = 777;
    system_calls.interrupted_fsyncs = 3;
    const FileSummary summary = write_durable_file(path(), bytes);
    EXPECT_GT(system_calls.writes, 20);
    EXPECT_EQ(system_calls.fsyncs, 4);
    EXPECT_EQ(summary, (FileSummary{10000, hash_of(bytes)}));
    EXPECT_TRUE(read_file(path()) == bytes);
}

TEST_F(Durable, TheDiskWritesBeforeTheEndAndIsWaitedFor) {
    const size_t mib = size_t{1} << 20;
    const std::string bytes(7 * mib + 3, 'x');
    DurableFile file(path());
    for (int i = 0; i < 10; ++i) file.write(bytes.data(), bytes.size());  // 70 MiB and a few bytes
    EXPECT_GE(system_calls.written, 56 * mib);  // all but the buffer being written and the one being filled, 8 MiB each
    EXPECT_EQ(system_calls.fsyncs, 0);
    file.finish();
    EXPECT_EQ(system_calls.written, 10 * bytes.size());
    EXPECT_EQ(system_calls.fsyncs, 1);
    write_durable_file(folder_.file("small"), "a");
    EXPECT_EQ(system_calls.fsyncs, 2);
}

TEST_F(Durable, AFileSystemThatCannotGoPastItsCacheIsWrittenThroughIt) {
    const std::string bytes = some_bytes((size_t{20} << 20) + 5);
    system_calls.direct_refused = true;
    DurableFile file(path());
    file.write(bytes.data(), bytes.size());
    const FileSummary summary = file.finish();
    EXPECT_EQ(summary.bytes, bytes.size());
    EXPECT_EQ(read_file(path()), bytes);
    EXPECT_EQ(summarize_file(path()), summary);
}

TEST_F(Durable, WhatIsThereIsNotWrittenOver) {
    write_file(path(), "old");
    expect_error([&] { DurableFile file(path()); }, {path(), "File exists", "remove it"});
    EXPECT_EQ(read_file(path()), "old");
    const std::string link = folder_.file("link"), target = folder_.file("target");
    std::filesystem::create_symlink(target, link);  // to nothing: without O_EXCL the file would be made where the link points
    expect_error([&] { DurableFile file(link); }, {link, "File exists"});
    EXPECT_FALSE(std::filesystem::exists(target));
    std::filesystem::remove(link);
    std::filesystem::create_symlink(path(), link);
    expect_error([&] { write_durable_file(link, "new"); }, {link, "File exists"});
    EXPECT_EQ(read_file(path()), "old");
    expect_error([&] { DurableFile file(folder_.path()); }, {folder_.path(), "cannot be created"});
}

TEST_F(Durable, APlaceThatIsNotThereIsNamed) {
    expect_error([&] { DurableFile file(folder_.file("no/f")); }, {folder_.file("no/f"), "No such file", "create its folder"});
    write_file(path(), "");
    expect_error([&] { DurableFile file(path() + "/f"); }, {path() + "/f", "Not a directory"});
    expect_error([&] { DurableFile file(folder_.file(std::string(300, 'x'))); }, {"too long", "shorter"});
    expect_error([&] { DurableFile file("/proc/f"); }, {"/proc/f", "cannot be created"});
}

TEST_F(Durable, AFailureMidWayNamesTheFileAndIsFinal) {
    rlimit limit;
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
    const size_t mib = size_t{1} << 20;
    const rlimit small = {10 * mib, limit.rlim_max};
    const auto old = std::signal(SIGXFSZ, SIG_IGN);
    DurableFile file(path());
    const std::string bytes = some_bytes(8 * mib);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    for (int i = 0; i < 2; ++i) file.write(bytes.data(), bytes.size());
    expect_error([&] { file.write(bytes.data(), bytes.size()); }, {path(), "cannot be written", "File too large", "ulimit -f"});  // of the second
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    std::signal(SIGXFSZ, old);
    // There would be room now, but the file lacks what failed.
    expect_error([&] { file.write("x", 1); }, {path(), "has failed"});
    expect_error([&] { file.finish(); }, {path(), "has failed"});
    EXPECT_EQ(system_calls.fsyncs, 0);
}

TEST_F(Durable, ADiskThatFailsAtTheEndIsReported) {
    for (const int reason : {EIO, ENOSPC, EDQUOT}) {
        std::filesystem::remove(path());
        system_calls.fsync_error = reason;
        DurableFile file(path());
        file.write("abc", 3);
        expect_error([&] { file.finish(); }, {path(), "brought to the disk", strerror(reason)});
        system_calls.fsync_error = 0;
        expect_error([&] { file.finish(); }, {path(), "has failed"});  // a second fsync would say that all is well
    }
    system_calls = {};
    DurableFile file(folder_.file("closed"));
    file.write("abc", 3);
    system_calls.close_error = EDQUOT;
    expect_error([&] { file.finish(); }, {"closed", strerror(EDQUOT), "quota"});
    system_calls.close_error = EINTR;  // the file is closed and was synced before
    EXPECT_EQ(write_durable_file(folder_.file("interrupted"), "abc").bytes, 3u);
    system_calls.close_error = 0;
}

TEST_F(Durable, AFinishedFileStaysAsItIs) {
    DurableFile file(path());
    file.write("abc", 3);
    file.finish();
    expect_error([&] { file.write("d", 1); }, {path(), "finished"});
    expect_error([&] { file.finish(); }, {path(), "finished"});
    EXPECT_EQ(read_file(path()), "abc");
    { DurableFile left(folder_.file("left")); }  // closed without an error; TearDown looks for files left open
    EXPECT_EQ(read_file(folder_.file("left")), "");
}

TEST_F(Durable, FoldersAreSynced) {
    sync_folder(folder_.path());
    EXPECT_EQ(system_calls.fsyncs, 1);
    system_calls.fsync_error = EINVAL;  // a file system whose folders need none
    EXPECT_NO_THROW(sync_folder(folder_.path()));
    system_calls.fsync_error = EIO;
    expect_error([&] { sync_folder(folder_.path()); }, {folder_.path(), "folder", strerror(EIO)});
    system_calls.fsync_error = 0;
    expect_error([&] { sync_folder(folder_.file("none")); }, {"none", "No such file"});
    write_file(path(), "");
    expect_error([&] { sync_folder(path()); }, {path(), "Not a directory"});
}

TEST_F(Durable, OnlyReadableRegularFilesAreSummarized) {
    expect_error([&] { summarize_file(folder_.file("none")); }, {"none", "No such file"});
    expect_error([&] { summarize_file(folder_.path()); }, {folder_.path(), "regular file"});
    ASSERT_EQ(mkfifo(path().c_str(), 0600), 0);
    expect_error([&] { summarize_file(path()); }, {path(), "regular file"});
    expect_error([&] { summarize_file("/dev/zero"); }, {"/dev/zero", "regular file"});
    // Its first page is never mapped, so reading it fails as a broken disk does.
    expect_error([&] { summarize_file("/proc/self/mem"); }, {"/proc/self/mem", "cannot be read after 0 bytes", strerror(EIO), "dmesg"});
}

}  // namespace
