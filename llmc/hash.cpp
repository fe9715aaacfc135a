#include "llmc/hash.h"

#include <xxhash.h>

#include "llmc/error.h"

Hash64::Hash64() : state_(XXH3_createState()) {
    CHECK(state_, "out of host memory for a hash state");
    XXH3_64bits_reset(static_cast<XXH3_state_t*>(state_));
}

Hash64::~Hash64() { XXH3_freeState(static_cast<XXH3_state_t*>(state_)); }

void Hash64::add(const void* data, size_t bytes) { XXH3_64bits_update(static_cast<XXH3_state_t*>(state_), data, bytes); }

std::string Hash64::hex() const { return format("%016llx", static_cast<unsigned long long>(XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state_)))); }

std::string hash_of(const std::string& text) {
    Hash64 hash;
    hash.add(text.data(), text.size());
    return hash.hex();
}
