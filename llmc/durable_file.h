// Files that a checkpoint can be built on: written once, hashed on the way, and on the disk, not only in the system's memory, before anyone relies on them.
#pragma once

#include <cstddef>
#include <future>
#include <memory>
#include <string>

#include "llmc/hash.h"

// Bytes and XXH3 (64 bits, 16 hexadecimal digits) of a file.
struct FileSummary {
    size_t bytes = 0;
    std::string xxh3;
    bool operator==(const FileSummary&) const = default;
};

// A file written once from start to end; it is on the disk when finish() returns. After an error nothing more can be written and the part that was stays there:
// whoever made the folder removes it.
//
// One buffer is filled and hashed while a thread writes the other past the system's cache (O_DIRECT, where the file system has it): through the cache the processor copies
// every byte once more, which on a machine of two cores took 0.36 to 0.6 GB/s of a disk that writes 1.3, and pushes out what others keep there.
class DurableFile {
public:
    // Creates the file; one that exists is refused, and so is a link. Throws Error with the system's reason and the fix.
    explicit DurableFile(const std::string& path);
    ~DurableFile();  // closes what was not finished
    DurableFile(const DurableFile&) = delete;
    DurableFile& operator=(const DurableFile&) = delete;

    // Appends. Throws Error naming the file, the system's reason and the fix.
    void write(const void* data, size_t bytes);
    // Waits until everything is on the disk and closes the file. Throws Error if the system could not do it.
    FileSummary finish();

    const std::string& path() const { return path_; }
    size_t bytes() const { return bytes_; }  // written so far

private:
    struct FreeBuffer { void operator()(unsigned char* buffer) const; };
    using Buffer = std::unique_ptr<unsigned char[], FreeBuffer>;

    void hand_over();  // the full buffer to a thread, when that has written the one before
    void await();      // that thread; throws what went wrong there
    [[noreturn]] void give_up(const char* what, int reason);

    std::string path_;
    int fd_ = -1;  // -1: finished, or given up after an error
    size_t bytes_ = 0;
    Hash64 hash_;
    Buffer buffers_[2];
    int filling_ = 0;            // which of them
    size_t filled_ = 0;          // bytes in it
    std::future<int> writing_;   // of the other one: 0, or the system's reason
};

// A whole small file.
FileSummary write_durable_file(const std::string& path, const std::string& text);

// Makes what was created, renamed and removed in a folder last. File systems that need no such call and refuse it are fine.
void sync_folder(const std::string& path);

// Of a file as it is now, by reading it: a disk that cannot be read is an Error, where a mapped file would end the process by a signal. Regular files only.
FileSummary summarize_file(const std::string& path);
