/* Loaded before the C library: a file system that refuses flock and the fsync of folders with an errno.
 * FLOCK=N refuses every flock, FSYNC=N the fsync of folders; FSYNC_FROM=K only from the K-th one on.
 * HELD=PIPE: the fsync of a file waits until a writer opens this named pipe.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static int number(const char *name) {
    const char *value = getenv(name);
    return value ? atoi(value) : 0;
}

int flock(int file, int operation) {
    if (number("FLOCK")) {
        errno = number("FLOCK");
        return -1;
    }
    return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(file, operation);
}

int fsync(int file) {
    static atomic_int folders;
    struct stat status;
    if (number("FSYNC") && fstat(file, &status) == 0 && S_ISDIR(status.st_mode) && ++folders >= number("FSYNC_FROM")) {
        errno = number("FSYNC");
        return -1;
    }
    if (getenv("HELD") && fstat(file, &status) == 0 && S_ISREG(status.st_mode)) {
        close(open(getenv("HELD"), O_RDONLY));
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}
