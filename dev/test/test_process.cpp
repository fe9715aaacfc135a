#include "llmc/process.h"

#include <gtest/gtest.h>

namespace {

TEST(Process, RanksOnOneDeviceAreNamed) {
    EXPECT_NO_THROW(check_places_differ({"a, 0000:01:00.0", "a, 0000:02:00.0", "b, 0000:01:00.0"}));
    try {
        check_places_differ({"a, 0000:01:00.0", "a, 0000:02:00.0", "a, 0000:01:00.0"});
        FAIL() << "two ranks on one GPU went unnoticed";
    } catch (const Error& error) {
        const std::string text = error.what();
        for (const char* word : {"ranks 0 and 2", "a, 0000:01:00.0", "NCCL=mpi"}) EXPECT_NE(text.find(word), std::string::npos) << text;
    }
}

TEST(Process, NumbersThatDoNotFitAnIntAreRefused) {
    EXPECT_EQ(narrow_int(7, "a count"), 7);
    EXPECT_THROW(narrow_int(size_t{1} << 31, "a count"), Error);
}

}  // namespace
