#include "llmc/token_shard.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <glob.h>
#include <sys/stat.h>

#include "llmc/error.h"

namespace {

constexpr struct { int32_t magic, version; int token_bytes; } kFormats[] = {{20240520, 1, 2}, {20240801, 7, 4}};

int32_t header_field(const MappedFile& file, int index) {
    int32_t value;
    memcpy(&value, file.data() + index * sizeof(int32_t), sizeof value);
    return value;
}

bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

TokenShard::TokenShard(const std::string& path) : file_(path) {
    const char* name = path.c_str();
    CHECK(file_.size() >= kHeaderBytes,
          "%s: has %zu bytes, less than the %zu of a shard's header; the file is truncated or is no token shard, make it again with dev/data/prepare.py",
          name, file_.size(), kHeaderBytes);
    const int32_t magic = header_field(file_, 0), version = header_field(file_, 1), count = header_field(file_, 2);
    int32_t expected_version = 0;
    for (const auto& f : kFormats) {
        if (magic != f.magic) continue;
        expected_version = f.version;
        token_bytes_ = f.token_bytes;
    }
    CHECK(token_bytes_ != 0, "%s: the magic number at offset 0 is %d; a token shard has %d (uint16) or %d (uint32), make the file with dev/data/prepare.py",
          name, magic, kFormats[0].magic, kFormats[1].magic);
    CHECK(version == expected_version, "%s: the version at offset 4 is %d; magic number %d goes with version %d, make the file with dev/data/prepare.py",
          name, version, magic, expected_version);
    CHECK(count >= 0, "%s: the token count at offset 8 is %d; it must not be negative (a shard holds at most 2147483647 tokens)", name, count);
    count_ = static_cast<size_t>(count);
    const size_t expected_size = kHeaderBytes + count_ * token_bytes_;
    CHECK(file_.size() == expected_size,
          "%s: has %zu bytes, but the header (offset 8) says %d tokens of %d bytes, which makes %zu; the file is %s, copy or make it again", name,
          file_.size(), count, token_bytes_, expected_size, file_.size() < expected_size ? "truncated" : "longer than its header says");

    const std::string mask_path = path + ".mask";
    struct stat info;
    if (stat(mask_path.c_str(), &info) != 0) {
        // Only "it is not there" means there is none: a mask that cannot be read must not turn into training on prompts.
        if (errno != ENOENT) fail("%s: cannot be examined: %s", mask_path.c_str(), strerror(errno));
        return;
    }
    if (count_ == 0) return;
    mask_ = MappedFile(mask_path);
    const size_t mask_bytes = (count_ + 7) / 8;
    CHECK(mask_.size() == mask_bytes, "%s: has %zu bytes; a mask for the %zu tokens of its shard has %zu (one bit a token), make both again",
          mask_path.c_str(), mask_.size(), count_, mask_bytes);
}

std::vector<std::string> expand_glob(const std::string& pattern) {
    CHECK(!pattern.empty(), "the data pattern is empty; give the path of token shards, such as data/python-stdlib/train_*.bin");
    glob_t found;
    const int status = glob(pattern.c_str(), GLOB_ERR | GLOB_NOSORT | GLOB_BRACE | GLOB_TILDE, nullptr, &found);
    std::vector<std::string> paths;
    if (status == 0) {
        paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
        globfree(&found);
    }
    if (status == GLOB_ABORTED) fail("`%s`: a folder of the pattern cannot be read: %s", pattern.c_str(), strerror(errno));
    if (status == GLOB_NOSPACE) fail("`%s`: out of memory while listing the files", pattern.c_str());
    paths.erase(std::remove_if(paths.begin(), paths.end(), [](const std::string& p) { return ends_with(p, ".mask"); }), paths.end());
    CHECK(!paths.empty(), "no file matches `%s`; check the path (quote the pattern so that the shell leaves it alone), or make the data with dev/data/prepare.py",
          pattern.c_str());
    std::sort(paths.begin(), paths.end());  // bytewise; glob's own order follows the locale
    paths.erase(std::unique(paths.begin(), paths.end()), paths.end());
    return paths;
}

ShardSet open_shards(const std::string& pattern) {
    ShardSet set;
    set.pattern = pattern;
    for (const std::string& path : expand_glob(pattern)) {
        TokenShard shard(path);
        if (shard.count() == 0) {
            set.warnings.push_back(path + ": holds no tokens; skipped");
            continue;
        }
        set.count += shard.count();
        set.shards.push_back(std::move(shard));
    }
    CHECK(!set.shards.empty(), "`%s`: all %zu files that match are empty; make the data again with dev/data/prepare.py", pattern.c_str(), set.warnings.size());
    return set;
}
