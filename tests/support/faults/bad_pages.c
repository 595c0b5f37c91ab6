/* Preloaded into a process: a disk that cannot read some pages. The file BAD_PAGES has a line for each: inode and number of the page.
 * A read that touches one fails with EIO. The file is read once, before the first read. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

#define PAGE_BYTES 4096
#define PAGES_MAX 64

static struct {
    unsigned long inode, page;
} bad[PAGES_MAX];
static int count;
static ssize_t (*next_pread)(int, void *, size_t, off64_t);
static ssize_t (*next_preadv)(int, const struct iovec *, int, off64_t);
static ssize_t (*next_preadv2)(int, const struct iovec *, int, off64_t, int);
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void begin(void)
{
    const char *path = getenv("BAD_PAGES");
    FILE *file = path == NULL ? NULL : fopen(path, "r");
    while (file != NULL && count < PAGES_MAX && fscanf(file, "%lu %lu", &bad[count].inode, &bad[count].page) == 2)
        count++;
    if (file != NULL)
        fclose(file);
    next_pread = dlsym(RTLD_NEXT, "pread64");
    next_preadv = dlsym(RTLD_NEXT, "preadv64");
    next_preadv2 = dlsym(RTLD_NEXT, "preadv64v2");
}

static int is_bad(int fd, size_t size, off64_t offset)
{
    struct stat now;
    pthread_once(&once, begin);
    if (count == 0 || size == 0 || fstat(fd, &now) < 0)
        return 0;
    for (int i = 0; i < count; i++)
        if (bad[i].inode == now.st_ino && offset < (off64_t)(bad[i].page + 1) * PAGE_BYTES &&
            offset + (off64_t)size > (off64_t)bad[i].page * PAGE_BYTES) {
            errno = EIO;
            return 1;
        }
    return 0;
}

static size_t size_of(const struct iovec *rooms, int number)
{
    size_t size = 0;
    for (int i = 0; i < number; i++)
        size += rooms[i].iov_len;
    return size;
}

ssize_t pread64(int fd, void *room, size_t size, off64_t offset)
{
    return is_bad(fd, size, offset) ? -1 : next_pread(fd, room, size, offset);
}

ssize_t pread(int fd, void *room, size_t size, off_t offset)
{
    return pread64(fd, room, size, offset);
}

ssize_t preadv64(int fd, const struct iovec *rooms, int number, off64_t offset)
{
    return is_bad(fd, size_of(rooms, number), offset) ? -1 : next_preadv(fd, rooms, number, offset);
}

ssize_t preadv64v2(int fd, const struct iovec *rooms, int number, off64_t offset, int flags)
{
    return is_bad(fd, size_of(rooms, number), offset) ? -1 : next_preadv2(fd, rooms, number, offset, flags);
}
