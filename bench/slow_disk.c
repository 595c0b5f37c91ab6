/* Preloaded into a process: each fdatasync takes SLOW_DISK_MS longer, in every caller. */

#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int fdatasync(int fd)
{
    const char *delay_ms = getenv("SLOW_DISK_MS");
    double delay_s = delay_ms == NULL ? 0 : atof(delay_ms) / 1e3;
    struct timespec delay = {(time_t)delay_s, (long)((delay_s - (double)(time_t)delay_s) * 1e9)};
    nanosleep(&delay, NULL);
    return (int)syscall(SYS_fdatasync, fd);
}
