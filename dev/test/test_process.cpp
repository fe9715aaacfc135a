#include "llmc/process.h"

#include <cerrno>
#include <csignal>
#include <cstring>

#include <sys/wait.h>
#include <unistd.h>

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

TEST(Process, AStopSignalIsRememberedAndCutsNothingShort) {
    EXPECT_FALSE(stop_requested());
    remember_stop_signal();
    EXPECT_FALSE(stop_requested());
    struct sigaction action = {};
    ASSERT_EQ(sigaction(SIGUSR1, nullptr, &action), 0);
    EXPECT_TRUE(action.sa_flags & SA_RESTART);
    // A read that waits goes on waiting: the signal comes in the middle of it, the byte after it.
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        for (int i = 0; i < 20; ++i) {
            kill(getppid(), SIGUSR1);
            usleep(1000);
        }
        _exit(write(ends[1], "x", 1) == 1 ? 0 : 1);
    }
    close(ends[1]);
    char byte = 0;
    EXPECT_EQ(read(ends[0], &byte, 1), 1) << strerror(errno);
    EXPECT_EQ(byte, 'x');
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    close(ends[0]);
    EXPECT_TRUE(stop_requested());
    raise(SIGUSR1);
    EXPECT_TRUE(stop_requested());  // and stays so
}

}  // namespace
