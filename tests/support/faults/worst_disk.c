/* Preloaded into a process: the worst disk that keeps its promises, for the log files of a store.
 *
 * What a file held when an fdatasync of it began stands in the folder WORST_DISK when that returns, and nothing newer. The call
 * number WORST_DISK_FAILS_AT fails; should another one follow, a file "again" tells. One thread at a time syncs a log. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int calls, failed;

static void touch(const char *disk, const char *name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", disk, name);
    close(open(path, O_WRONLY | O_CREAT, 0600));
}

static int keep(const char *disk, const char *name, int fd)
{
    struct stat now;
    char path[PATH_MAX], new[PATH_MAX];
    if (fstat(fd, &now) < 0)
        return -1;
    char *held = malloc((size_t)now.st_size);
    ssize_t length = pread(fd, held, (size_t)now.st_size, 0);
    nanosleep(&(struct timespec){0, 3000 * 1000}, NULL); /* others write meanwhile */
    snprintf(path, sizeof path, "%s/%s", disk, name);
    snprintf(new, sizeof new, "%s/new", disk);
    int to = open(new, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    int result = length == now.st_size && write(to, held, (size_t)length) == length ? rename(new, path) : -1;
    close(to);
    free(held);
    return result;
}

int fdatasync(int fd)
{
    char link[64], path[PATH_MAX];
    const char *disk = getenv("WORST_DISK"), *fails_at = getenv("WORST_DISK_FAILS_AT");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    if (disk == NULL || strstr(path, "/commitlog/") == NULL)
        return (int)syscall(SYS_fdatasync, fd);
    if (failed)
        touch(disk, "again");
    if (fails_at != NULL && ++calls == atoi(fails_at)) {
        failed = 1;
        errno = EIO;
        return -1;
    }
    return keep(disk, strrchr(path, '/') + 1, fd);
}
