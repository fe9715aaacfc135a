#include "llmc/mapped_file.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/error.h"

MappedFile::MappedFile(const std::string& path) : path_(path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // non-blocking: a named pipe must not hang the start
    if (fd < 0) fail("%s: cannot be opened: %s; check the path and its permissions", path.c_str(), strerror(errno));
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(fd);
        fail("%s: is not a regular file; give the path of a file", path.c_str());
    }
    size_ = static_cast<size_t>(info.st_size);
    if (size_ > 0) {
        void* mapped = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
        const int reason = errno;
        close(fd);
        if (mapped == MAP_FAILED) fail("%s: cannot be mapped into memory: %s", path.c_str(), strerror(reason));
        data_ = static_cast<const unsigned char*>(mapped);
    } else {
        close(fd);
    }
}

MappedFile::~MappedFile() {
    if (data_) munmap(const_cast<unsigned char*>(data_), size_);
}
