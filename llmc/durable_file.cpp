#include "llmc/durable_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "llmc/error.h"

namespace {

constexpr size_t kChunkBytes = size_t{1} << 20;   // read and hashed at once: the second use finds it in the processor's cache
constexpr size_t kBufferBytes = size_t{8} << 20;  // one request to the disk; large enough that a request, and a thread for it, cost nothing
constexpr size_t kDirectAlign = 4096;             // what O_DIRECT wants of addresses, offsets and sizes: a page is enough for every disk

// What the user can do about a reason.
const char* fix(int reason) {
    switch (reason) {
        case ENOSPC: return "free space on that disk, or use a folder on another one";
        case EDQUOT: return "the user's quota there is used up; free space, or use a folder on another disk";
        case EFBIG: return "raise the limit on a file's size (ulimit -f), or use a file system that takes larger files";
        case EIO: return "the disk or its connection is failing; look at the system's log (dmesg)";
        case EEXIST: return "remove it, or give another path";
        case ENOENT: return "create its folder first, or check the path";
        case ENOTDIR: return "a part of the path before the last is no folder; check the path";
        case ENAMETOOLONG: return "give a shorter path";
        case EROFS: return "the file system is mounted read-only; use a folder elsewhere";
        case EMFILE:
        case ENFILE: return "raise the limit on open files (ulimit -n)";
        default: return "check the path and its permissions";
    }
}

// An open file or folder that is only looked at.
struct OpenFile {
    int fd;
    OpenFile(const std::string& path, int flags) : fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | flags)) {
        const int reason = errno;
        if (fd < 0) fail("%s: cannot be opened: %s; %s", path.c_str(), strerror(reason), fix(reason));
    }
    ~OpenFile() { close(fd); }
    OpenFile(const OpenFile&) = delete;
    OpenFile& operator=(const OpenFile&) = delete;
};

int sync_fd(int fd) {
    int status;
    do status = fsync(fd);
    while (status != 0 && errno == EINTR);
    return status;
}

void stop_direct(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_DIRECT); }

// Appends. 0, or the system's reason.
int write_all(int fd, const unsigned char* data, size_t bytes) {
    while (bytes > 0) {
        const ssize_t written = ::write(fd, data, bytes);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0 && errno == EINVAL && (fcntl(fd, F_GETFL) & O_DIRECT)) {  // opened with it, but not written: some network file systems
            stop_direct(fd);
            continue;
        }
        if (written <= 0) return written < 0 ? errno : EIO;
        if (written % kDirectAlign != 0) stop_direct(fd);  // a write cut short: what follows starts anywhere
        data += written;
        bytes -= static_cast<size_t>(written);
    }
    return 0;
}

}  // namespace

void DurableFile::FreeBuffer::operator()(unsigned char* buffer) const { free(buffer); }

DurableFile::DurableFile(const std::string& path) : path_(path) {
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
    fd_ = open(path.c_str(), flags | O_DIRECT, 0666);
    if (fd_ < 0 && errno == EINVAL) {  // a file system without it, which may have made the file all the same
        unlink(path.c_str());
        fd_ = open(path.c_str(), flags, 0666);
    }
    const int reason = errno;
    if (fd_ < 0) fail("%s: cannot be created: %s; %s", path.c_str(), strerror(reason), fix(reason));
    for (Buffer& buffer : buffers_) buffer.reset(static_cast<unsigned char*>(aligned_alloc(kDirectAlign, kBufferBytes)));
    if (!buffers_[0] || !buffers_[1]) give_up("cannot be written", ENOMEM);
}

DurableFile::~DurableFile() {
    if (writing_.valid()) writing_.wait();
    if (fd_ >= 0) close(fd_);
}

void DurableFile::give_up(const char* what, int reason) {
    if (writing_.valid()) writing_.wait();
    if (fd_ >= 0) close(fd_);
    fd_ = -1;  // a later write or finish() must not make a whole file of this
    fail("%s: %s: %s; %s", path_.c_str(), what, strerror(reason), fix(reason));
}

void DurableFile::await() {
    if (!writing_.valid()) return;
    const int reason = writing_.get();
    if (reason != 0) give_up("cannot be written", reason);
}

void DurableFile::hand_over() {
    await();
    writing_ = std::async(std::launch::async, write_all, fd_, buffers_[filling_].get(), filled_);
    filling_ = 1 - filling_;
    filled_ = 0;
}

void DurableFile::write(const void* data, size_t bytes) {
    CHECK(fd_ >= 0, "%s: is finished or has failed; nothing more can be written to it", path_.c_str());
    hash_.add(data, bytes);
    for (const unsigned char* at = static_cast<const unsigned char*>(data); bytes > 0;) {
        const size_t count = std::min(bytes, kBufferBytes - filled_);
        memcpy(buffers_[filling_].get() + filled_, at, count);
        filled_ += count;
        bytes_ += count;
        at += count;
        bytes -= count;
        if (filled_ == kBufferBytes) hand_over();
    }
}

FileSummary DurableFile::finish() {
    CHECK(fd_ >= 0, "%s: is finished or has failed; it cannot be finished again", path_.c_str());
    await();
    stop_direct(fd_);  // the last part is no whole page
    hand_over();
    await();
    if (sync_fd(fd_) != 0) give_up("could not be brought to the disk", errno);  // never tried again: the system forgets what it could not write
    const int status = close(fd_), reason = errno;
    fd_ = -1;
    if (status != 0 && reason != EINTR) give_up("could not be closed", reason);  // network file systems report the last errors here; EINTR has closed it
    return {bytes_, hash_.hex()};
}

FileSummary write_durable_file(const std::string& path, const std::string& text) {
    DurableFile file(path);
    file.write(text.data(), text.size());
    return file.finish();
}

void sync_folder(const std::string& path) {
    const OpenFile folder(path, O_DIRECTORY);
    if (sync_fd(folder.fd) == 0 || errno == EINVAL) return;
    const int reason = errno;
    fail("%s: the folder could not be brought to the disk: %s; %s", path.c_str(), strerror(reason), fix(reason));
}

FileSummary summarize_file(const std::string& path) {
    const OpenFile file(path, O_NONBLOCK);  // non-blocking: a named pipe must not hang the start
    struct stat info;
    if (fstat(file.fd, &info) != 0 || !S_ISREG(info.st_mode)) fail("%s: is not a regular file; give the path of a file", path.c_str());
    (void)posix_fadvise(file.fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    std::vector<unsigned char> chunk(kChunkBytes);
    FileSummary summary;
    Hash64 hash;
    for (;;) {
        const ssize_t got = read(file.fd, chunk.data(), kChunkBytes);
        if (got < 0 && errno == EINTR) continue;
        const int reason = errno;
        if (got < 0) fail("%s: cannot be read after %zu bytes: %s; %s", path.c_str(), summary.bytes, strerror(reason), fix(reason));
        if (got == 0) break;
        hash.add(chunk.data(), static_cast<size_t>(got));
        summary.bytes += static_cast<size_t>(got);
    }
    summary.xxh3 = hash.hex();
    return summary;
}
