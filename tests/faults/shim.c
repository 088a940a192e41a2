/* Stands between a process and the C library (LD_PRELOAD): fails its disk calls, and logs what it did in order.
 *
 * SHIM_UNDER  a directory: only calls on files under it count
 * SHIM_FAIL   sync:N or write:N, the N-th such call and all later ones fail with EIO; :once, that one only
 * SHIM_SLOW   milliseconds that each sync takes at least
 * SHIM_LOG    a file that gets a line for each event, in order: "P" a POST goes to a socket, "X path" a call was failed,
 *             "S path" a file was synced, "T path size" was cut, "W path offset length" was written; with SHIM_DATA
 *             set, the bytes follow that line
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static const char *under;
static int log_fd = -1, with_data, fails_syncs, fails_writes, once;
static long fail_at, syncs, writes, slow_ms;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void start(void) {
    const char *fail = getenv("SHIM_FAIL"), *path = getenv("SHIM_LOG"), *slow = getenv("SHIM_SLOW");
    under = getenv("SHIM_UNDER");
    with_data = getenv("SHIM_DATA") != NULL;
    slow_ms = slow ? atol(slow) : 0;
    if (path) log_fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (!fail || !strchr(fail, 58)) return;
    fails_syncs = !strncmp(fail, "sync:", 5);
    fails_writes = !strncmp(fail, "write:", 6);
    fail_at = atol(strchr(fail, ':') + 1);
    once = strstr(fail, ":once") != NULL;
}

static void say(const char *text, const void *data, size_t size) {
    if (log_fd < 0) return;
    struct iovec parts[2] = {{(void *)text, strlen(text)}, {(void *)data, data ? size : 0}};
    pthread_mutex_lock(&mutex);
    syscall(SYS_writev, log_fd, parts, 2);
    pthread_mutex_unlock(&mutex);
}

/* Whether fd is a file that counts; fills in its path. */
static int counts(int fd, char path[PATH_MAX]) {
    char link[40];
    int kept = errno;
    if (!under || fd == log_fd) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    errno = kept;
    if (length <= 0) return 0;
    path[length] = 0;
    return !strncmp(path, under, strlen(under));
}

static int fails(int kind, long *count, const char *path) {
    char line[PATH_MAX + 8];
    pthread_mutex_lock(&mutex);
    long n = ++*count;
    pthread_mutex_unlock(&mutex);
    if (!kind || (once ? n != fail_at : n < fail_at)) return 0;
    snprintf(line, sizeof line, "X %s\n", path);
    say(line, NULL, 0);
    errno = EIO;
    return 1;
}

static void note_write(const char *path, off_t offset, const void *data, ssize_t size) {
    char line[PATH_MAX + 64];
    if (size <= 0) return;
    snprintf(line, sizeof line, "W %s %lld %lld\n", path, (long long)offset, (long long)size);
    say(line, with_data ? data : NULL, (size_t)size);
}

static int synced(int fd, int (*real)(int)) {
    char path[PATH_MAX], line[PATH_MAX + 8];
    if (!counts(fd, path)) return real(fd);
    if (slow_ms) usleep((useconds_t)(1000 * slow_ms));
    if (fails(fails_syncs, &syncs, path)) return -1;
    int result = real(fd);
    snprintf(line, sizeof line, "S %s\n", path);
    if (!result) say(line, NULL, 0);
    return result;
}

int fsync(int fd) { return synced(fd, REAL(fsync)); }
int fdatasync(int fd) { return synced(fd, REAL(fdatasync)); }

static void note_post(int fd, const void *data, size_t size) {
    struct stat about;
    if (size >= 4 && !memcmp(data, "POST", 4) && !fstat(fd, &about) && S_ISSOCK(about.st_mode)) say("P\n", NULL, 0);
}

ssize_t write(int fd, const void *data, size_t size) {
    char path[PATH_MAX];
    note_post(fd, data, size);
    if (!counts(fd, path)) return REAL(write)(fd, data, size);
    if (fails(fails_writes, &writes, path)) return -1;
    off_t offset = lseek(fd, 0, SEEK_CUR);
    ssize_t result = REAL(write)(fd, data, size);
    note_write(path, offset, data, result);
    return result;
}

static ssize_t placed(int fd, const void *data, size_t size, off_t offset,
                      ssize_t (*real)(int, const void *, size_t, off_t)) {
    char path[PATH_MAX];
    if (!counts(fd, path)) return real(fd, data, size, offset);
    if (fails(fails_writes, &writes, path)) return -1;
    ssize_t result = real(fd, data, size, offset);
    note_write(path, offset, data, result);
    return result;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return placed(fd, data, size, at, REAL(pwrite)); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return placed(fd, data, size, at, REAL(pwrite64)); }

static int cut(int fd, off_t size, int (*real)(int, off_t)) {
    char path[PATH_MAX], line[PATH_MAX + 32];
    int result = real(fd, size);
    if (result || !counts(fd, path)) return result;
    snprintf(line, sizeof line, "T %s %lld\n", path, (long long)size);
    say(line, NULL, 0);
    return result;
}

int ftruncate(int fd, off_t size) { return cut(fd, size, REAL(ftruncate)); }
int ftruncate64(int fd, off_t size) { return cut(fd, size, REAL(ftruncate64)); }

ssize_t send(int fd, const void *data, size_t size, int flags) {
    note_post(fd, data, size);
    return REAL(send)(fd, data, size, flags);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    if (message->msg_iovlen) note_post(fd, message->msg_iov[0].iov_base, message->msg_iov[0].iov_len);
    return REAL(sendmsg)(fd, message, flags);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (count > 0) note_post(fd, parts[0].iov_base, parts[0].iov_len);
    return REAL(writev)(fd, parts, count);
}
