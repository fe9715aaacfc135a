#include "llmc/metrics.h"

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/error.h"

namespace {

// `text` as a JSON string. Bytes that are not valid UTF-8 become U+FFFD: generated text may end inside a character.
std::string json_string(const std::string& text) {
    std::string out = "\"";
    for (size_t i = 0; i < text.size();) {
        const unsigned char c = text[i];
        if (c < 0x80) {
            if (c == '"' || c == '\\') {
                out += '\\';
                out += static_cast<char>(c);
            } else if (c == '\n') {
                out += "\\n";
            } else if (c < 0x20 || c == 0x7f) {
                out += format("\\u%04x", c);
            } else {
                out += static_cast<char>(c);
            }
            ++i;
            continue;
        }
        const size_t length = c >= 0xf0 && c < 0xf5 ? 4 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xc2 && c < 0xe0 ? 2 : 0;
        bool valid = length != 0 && i + length <= text.size();
        uint32_t code = length == 4 ? c & 7 : length == 3 ? c & 15 : c & 31;
        for (size_t k = 1; valid && k < length; ++k) {
            const unsigned char next = text[i + k];
            valid = (next & 0xc0) == 0x80;
            code = code << 6 | (next & 0x3f);
        }
        // Overlong forms, surrogates and values beyond Unicode are not UTF-8 either.
        if (valid && length == 3) valid = code >= 0x800 && !(code >= 0xd800 && code < 0xe000);
        if (valid && length == 4) valid = code >= 0x10000 && code < 0x110000;
        if (valid) {
            out.append(text, i, length);
            i += length;
        } else {
            out += "\xef\xbf\xbd";
            ++i;
        }
    }
    return out + "\"";
}

template <typename T>
std::string json_number(T value) {
    if (std::isnan(value)) return "\"nan\"";
    if (std::isinf(value)) return value > 0 ? "\"inf\"" : "\"-inf\"";
    char buffer[64];
    const auto end = std::to_chars(buffer, buffer + sizeof buffer, value);
    return std::string(buffer, end.ptr);
}

// Where the last line of the file that has its end ends; -1 with errno if it cannot be read.
off_t end_of_whole_lines(int fd, off_t size) {
    char chunk[4096];
    while (size > 0) {
        const off_t begin = size > static_cast<off_t>(sizeof chunk) ? size - static_cast<off_t>(sizeof chunk) : 0;
        const size_t wanted = static_cast<size_t>(size - begin);
        size_t got = 0;
        while (got < wanted) {
            const ssize_t now = pread(fd, chunk + got, wanted - got, begin + static_cast<off_t>(got));
            if (now < 0 && errno == EINTR) continue;
            if (now == 0) errno = EIO;  // shorter than it was a moment ago
            if (now <= 0) return -1;
            got += static_cast<size_t>(now);
        }
        if (const void* newline = memrchr(chunk, '\n', wanted)) return begin + (static_cast<const char*>(newline) - chunk) + 1;
        size = begin;
    }
    return 0;
}

std::string without_trailing_slashes(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path;
}

}  // namespace

JsonLine& JsonLine::add_raw(const char* name, const std::string& json) {
    if (text_.size() > 1) text_ += ", ";
    text_ += json_string(name) + ": " + json;
    return *this;
}

JsonLine& JsonLine::add(const char* name, const std::string& value) { return add_raw(name, json_string(value)); }
JsonLine& JsonLine::add(const char* name, float value) { return add_raw(name, json_number(value)); }
JsonLine& JsonLine::add(const char* name, double value) { return add_raw(name, json_number(value)); }

RunFolder::RunFolder(const std::string& path) : path_(without_trailing_slashes(path)) {
    CHECK(!path.empty(), "--out is empty; give a folder for the run");
    std::error_code error;
    std::filesystem::create_directories(path_, error);
    if (error) fail("--out %s: the folder cannot be made: %s; give a folder that can be written", path_.c_str(), error.message().c_str());
    const std::string lock = file(".lock");
    lock_fd_ = open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (lock_fd_ < 0) fail("--out %s: a file cannot be written there: %s; give a folder that can be written", path_.c_str(), strerror(errno));
    if (flock(lock_fd_, LOCK_EX | LOCK_NB) != 0) {
        const int reason = errno;
        char holder[256] = {};
        const ssize_t got = read(lock_fd_, holder, sizeof holder - 1);
        close(lock_fd_);
        lock_fd_ = -1;
        if (char* end_of_line = strchr(holder, '\n')) *end_of_line = '\0';
        if (reason != EWOULDBLOCK) fail("--out %s: the folder cannot be locked: %s; give a folder on another file system", path_.c_str(), strerror(reason));
        fail("--out %s is in use by another run (%s); give another folder, or end that run", path_.c_str(), got > 0 ? holder : "process unknown");
    }
    // The lock is the open file, not this text; the first line is for the message above, the second for check_run_folder_is_shared: process numbers and host names come again.
    // Synced, so that another host of a network file system sees it.
    char host[128] = {};
    gethostname(host, sizeof host - 1);
    unsigned char digits[16] = {};
    const bool random = getrandom(digits, sizeof digits, 0) == static_cast<ssize_t>(sizeof digits);
    owner_ = format("process %d on %s\n", static_cast<int>(getpid()), host);
    for (const unsigned char digit : digits) owner_ += format("%02x", digit);
    owner_ += '\n';
    if (!random || ftruncate(lock_fd_, 0) != 0 || pwrite(lock_fd_, owner_.data(), owner_.size(), 0) != static_cast<ssize_t>(owner_.size()) || fsync(lock_fd_) != 0) {
        const int reason = errno;
        close(lock_fd_);
        lock_fd_ = -1;
        fail("--out %s: a file cannot be written there: %s; free some space or give another folder", path_.c_str(), strerror(reason));
    }
}

RunFolder::~RunFolder() {
    // The file stays: removing it would let a third run lock a new one while a second still waits on the old.
    if (lock_fd_ >= 0) close(lock_fd_);
}

void check_run_folder_is_shared(const std::string& path, const std::string& owner) {
    const std::string folder = without_trailing_slashes(path), lock = folder + "/.lock";
    const auto other = [&](const char* reason) {
        fail("--out %s is not the folder that rank 0 sees: every rank must see one file system (%s: %s); give a folder that all hosts share", folder.c_str(), lock.c_str(), reason);
    };
    const int fd = open(lock.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);  // not blocking: a named pipe in its place is refused below
    if (fd < 0) other(strerror(errno));
    std::string text(owner.size() + 1, '\0');  // one more than expected: a longer file is not the same text
    const ssize_t got = pread(fd, text.data(), text.size(), 0);
    const int reason = errno;
    close(fd);
    if (got < 0) other(strerror(reason));
    text.resize(static_cast<size_t>(got));
    if (text != owner) other("written by another run");
}

MetricsWriter::MetricsWriter(const RunFolder& folder, bool append) : path_(folder.file("metrics.jsonl")) {
    struct stat info;
    if (append) {
        const auto refuse = [&](const char* reason) {
            if (fd_ >= 0) close(fd_);
            fail("%s: cannot be continued: %s; move it away, or give another --out", path_.c_str(), reason);
        };
        fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
        if (fd_ < 0) refuse(errno == ELOOP ? "it is a symbolic link" : strerror(errno));
        if (fstat(fd_, &info) != 0) refuse(strerror(errno));
        if (!S_ISREG(info.st_mode)) refuse("it is not a regular file");
        const off_t end = end_of_whole_lines(fd_, info.st_size);
        if (end < 0 || (end < info.st_size && ftruncate(fd_, end) != 0)) refuse(strerror(errno));
        return;
    }
    if (lstat(path_.c_str(), &info) == 0) {
        int n = 1;
        do kept_ = folder.file(format("metrics.%d.jsonl", n++));
        while (lstat(kept_.c_str(), &info) == 0);
        if (rename(path_.c_str(), kept_.c_str()) != 0)
            fail("%s: cannot be renamed to %s: %s; move it away, or give another --out", path_.c_str(), kept_.c_str(), strerror(errno));
    }
    fd_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    if (fd_ < 0) fail("%s: cannot be written: %s; give another --out", path_.c_str(), strerror(errno));
}

MetricsWriter::~MetricsWriter() {
    if (fd_ >= 0) close(fd_);
}

void MetricsWriter::write(const JsonLine& line) {
    const std::string text = line.text() + "\n";
    const off_t before = lseek(fd_, 0, SEEK_END);
    size_t done = 0;
    while (done < text.size()) {
        const ssize_t wrote = ::write(fd_, text.data() + done, text.size() - done);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) {
            const int reason = wrote < 0 ? errno : ENOSPC;
            // A reader of the file must not trip over half a line.
            if (done > 0 && before >= 0 && ftruncate(fd_, before) != 0) {}
            fail("%s: cannot be written: %s; free some space", path_.c_str(), strerror(reason));
        }
        done += static_cast<size_t>(wrote);
    }
}

void MetricsWriter::sync() {
    while (fsync(fd_) != 0) {
        if (errno != EINTR) fail("%s: cannot be written to disk: %s; free some space, or give another --out", path_.c_str(), strerror(errno));
    }
}

void MetricsWriter::train(const TrainMetrics& m) {
    write(JsonLine("train").add("step", m.step).add("epoch", m.epoch).add("tokens", m.tokens).add("loss", m.loss).add("grad_norm", m.grad_norm)
              .add("lr", m.lr).add("step_ms", m.step_ms).add("tokens_per_s", m.tokens_per_s).add("mfu", m.mfu).add("mfu_measured", m.mfu_measured)
              .add("skipped", m.skipped).add("mem_bytes", m.mem_bytes).add("data_ms", m.data_ms).add("exposed_comm_ms", m.exposed_comm_ms)
              .add("comm_bytes", m.comm_bytes).add("forward_ms", m.forward_ms).add("head_ms", m.head_ms).add("backward_ms", m.backward_ms).add("update_ms", m.update_ms));
}

void MetricsWriter::val(long long step, double val_loss, long long val_tokens) {
    write(JsonLine("val").add("step", step).add("val_loss", val_loss).add("val_tokens", val_tokens));
}
