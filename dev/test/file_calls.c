// For checkpoint_faults.py, loaded with LD_PRELOAD: counts the calls by which a program changes a folder, and at each of them, or at one, does what a test asks.
//
//   FILE_CALLS_UNDER=DIR      counts calls on paths in it (absolute, without a link in it): open that creates, write, pwrite, fsync, fdatasync, ftruncate,
//                             rename, mkdir, unlink, unlinkat, rmdir
//   FILE_CALLS_NOT=a,b        leaves out paths that hold one of these words
//   FILE_CALLS_KILL_AT=N      the process ends by SIGKILL instead of making call N (from 1)
//   FILE_CALLS_FAIL_AT=N      call N is not made and reports FILE_CALLS_ERRNO, a number
//   FILE_CALLS_SNAPSHOTS=OUT  before each call N the folder is copied to OUT/N
//   FILE_CALLS_LOG=FILE       a line for each call: what and where
//
// One lock is held from the count to the end of the real call, so calls of several threads have an order, and a copy is what a kill at that moment would leave.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int calls;

static const char* setting(const char* name) {
    const char* const value = getenv(name);
    return value && *value ? value : NULL;
}

static int counted(const char* path) {
    const char* const under = setting("FILE_CALLS_UNDER");
    if (!under || strncmp(path, under, strlen(under)) != 0) return 0;
    char words[256] = "";
    if (setting("FILE_CALLS_NOT")) snprintf(words, sizeof words, "%s", setting("FILE_CALLS_NOT"));
    char* rest = NULL;
    for (char* word = strtok_r(words, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        if (strstr(path, word)) return 0;
    }
    return 1;
}

static void path_of(int fd, char* path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = '\0';
}

// Before a call, with the lock held. 1: it must not be made, errno is set.
static int fails(const char* what, const char* path) {
    if (!counted(path)) return 0;
    ++calls;
    const char *const log = setting("FILE_CALLS_LOG"), *const snapshots = setting("FILE_CALLS_SNAPSHOTS");
    if (log) {
        FILE* const file = fopen(log, "a");
        if (file) {
            fprintf(file, "%s %s\n", what, path);
            fclose(file);
        }
    }
    if (snapshots) {
        char command[3 * PATH_MAX];
        snprintf(command, sizeof command, "env -u LD_PRELOAD cp -a '%s' '%s/%05d'", setting("FILE_CALLS_UNDER"), snapshots, calls);
        if (system(command) != 0) abort();
    }
    if (setting("FILE_CALLS_KILL_AT") && calls == atoi(setting("FILE_CALLS_KILL_AT"))) {
        for (;;) kill(getpid(), SIGKILL);
    }
    if (!setting("FILE_CALLS_FAIL_AT") || calls != atoi(setting("FILE_CALLS_FAIL_AT"))) return 0;
    errno = atoi(setting("FILE_CALLS_ERRNO"));
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ONE_CALL(what, path, call)                          \
    pthread_mutex_lock(&lock);                              \
    __typeof__(call) result = -1;                           \
    if (!fails(what, path)) result = call;                  \
    const int reason = errno;                               \
    pthread_mutex_unlock(&lock);                            \
    errno = reason;                                         \
    return result;

int open(const char* path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list list;
        va_start(list, flags);
        mode = va_arg(list, mode_t);
        va_end(list);
    }
    if (!(flags & O_CREAT)) return REAL(open)(path, flags, mode);
    ONE_CALL("open", path, REAL(open)(path, flags, mode))
}
ssize_t write(int fd, const void* data, size_t bytes) {
    char path[PATH_MAX];
    path_of(fd, path);
    if (!counted(path)) return REAL(write)(fd, data, bytes);  // a pipe may block
    ONE_CALL("write", path, REAL(write)(fd, data, bytes))
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
    char path[PATH_MAX];
    path_of(fd, path);
    ONE_CALL("pwrite", path, REAL(pwrite)(fd, data, bytes, at))
}
int ftruncate(int fd, off_t bytes) {
    char path[PATH_MAX];
    path_of(fd, path);
    ONE_CALL("ftruncate", path, REAL(ftruncate)(fd, bytes))
}
int fsync(int fd) {
    char path[PATH_MAX];
    path_of(fd, path);
    ONE_CALL("fsync", path, REAL(fsync)(fd))
}
int fdatasync(int fd) {
    char path[PATH_MAX];
    path_of(fd, path);
    ONE_CALL("fdatasync", path, REAL(fdatasync)(fd))
}
int rename(const char* from, const char* to) { ONE_CALL("rename", to, REAL(rename)(from, to)) }
int mkdir(const char* path, mode_t mode) { ONE_CALL("mkdir", path, REAL(mkdir)(path, mode)) }
int rmdir(const char* path) { ONE_CALL("rmdir", path, REAL(rmdir)(path)) }
int unlink(const char* path) { ONE_CALL("unlink", path, REAL(unlink)(path)) }
int unlinkat(int fd, const char* name, int flags) {
    char path[2 * PATH_MAX];
    path_of(fd, path);
    snprintf(path + strlen(path), PATH_MAX, "/%s", name);
    ONE_CALL("unlinkat", path, REAL(unlinkat)(fd, name, flags))
}
