/* The least that restoring a tree costs: frames are decompressed and files written by THREADS
 * threads, with as few system calls as there can be, and nothing is verified or made durable.
 *
 *     floor PLAN BLOB TARGET THREADS
 *
 * PLAN is what bench/env/floor.py writes, in the byte order of the machine:
 *
 *     u32 counts: frames, directories, tasks, pieces, links; u32 bytes of the heap
 *     frames:      u64 offset in BLOB, u64 offset in the stream, u32 length, u32 stream length
 *     directories: u32 parent, u32 name, u32 mode, u32 0, i64 mtime in ns (0 is the root, no entry)
 *     tasks:       u32 first frame, u32 frames, u32 first piece, u32 pieces
 *     pieces:      u32 directory, u32 name, u32 mode, u32 kind (0 whole file, 1 part of a file that
 *                  the plan makes first), u64 stream offset, u64 length, u64 file offset,
 *                  u64 file size, i64 mtime in ns
 *     links:       u32 directory, u32 name, u32 target, u32 0, i64 mtime in ns
 *     heap:        names, each ended by a NUL; a name is its offset here
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

struct header { uint32_t frames, directories, tasks, pieces, links, heap; };
struct frame { uint64_t offset, stream; uint32_t length, stream_length; };
struct directory { uint32_t parent, name, mode, unused; int64_t mtime; };
struct task { uint32_t frame, frames, piece, pieces; };
struct piece {
    uint32_t directory, name, mode, kind;
    uint64_t stream, length, offset, size;
    int64_t mtime;
};
struct link { uint32_t directory, name, target, unused; int64_t mtime; };

static const struct header *header;
static const struct frame *frames;
static const struct directory *directories;
static const struct task *tasks;
static const struct piece *pieces;
static const struct link *links;
static const char *heap;
static const char *blob;
static int *folders;
static atomic_uint next_task;

static void fail(const char *what) { perror(what); exit(1); }

static const char *map(const char *path) {
    int fd = open(path, O_RDONLY);
    struct stat status;
    if (fd < 0 || fstat(fd, &status)) fail(path);
    void *data = mmap(NULL, status.st_size, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (data == MAP_FAILED) fail(path);
    close(fd);
    return data;
}

static void set_time(int fd, const char *name, int64_t mtime) {
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT},
                                {.tv_sec = mtime / 1000000000, .tv_nsec = mtime % 1000000000}};
    if (name ? utimensat(fd, name, times, AT_SYMLINK_NOFOLLOW) : futimens(fd, times)) fail("utime");
}

static void write_piece(const struct piece *piece, const char *content) {
    const char *name = heap + piece->name;
    int flags = piece->kind ? O_WRONLY : O_WRONLY | O_CREAT | O_EXCL;
    int fd = openat(folders[piece->directory], name, flags | O_NOFOLLOW, piece->mode & 07777);
    if (fd < 0) fail(name);
    for (uint64_t done = 0; done < piece->length;) {
        ssize_t count = pwrite(fd, content + done, piece->length - done, piece->offset + done);
        if (count < 0) fail(name);
        done += count;
    }
    if (!piece->kind) {
        if (piece->length != piece->size && ftruncate(fd, piece->size)) fail(name);
        set_time(fd, NULL, piece->mtime);
    }
    close(fd);
}

static void *work(void *unused) {
    ZSTD_DCtx *context = ZSTD_createDCtx();
    char *buffer = NULL;
    size_t capacity = 0;
    for (unsigned number; (number = atomic_fetch_add(&next_task, 1)) < header->tasks;) {
        const struct task *task = &tasks[number];
        size_t needed = 0;
        for (uint32_t i = 0; i < task->frames; i++) needed += frames[task->frame + i].stream_length;
        if (needed > capacity) {
            free(buffer);
            buffer = malloc(capacity = needed);
        }
        char *end = buffer;
        for (uint32_t i = 0; i < task->frames; i++) {
            const struct frame *frame = &frames[task->frame + i];
            size_t count = ZSTD_decompressDCtx(context, end, frame->stream_length,
                                               blob + frame->offset, frame->length);
            if (count != frame->stream_length) {
                fprintf(stderr, "frame %u is damaged\n", task->frame + i);
                exit(1);
            }
            end += count;
        }
        for (uint32_t i = 0; i < task->pieces; i++) {
            const struct piece *piece = &pieces[task->piece + i];
            uint64_t start = task->frames ? frames[task->frame].stream : piece->stream;
            write_piece(piece, buffer + (piece->stream - start));
        }
    }
    return unused;
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: floor PLAN BLOB TARGET THREADS\n");
        return 2;
    }
    const char *plan = map(argv[1]);
    blob = map(argv[2]);
    header = (const void *)plan;
    frames = (const void *)(header + 1);
    directories = (const void *)(frames + header->frames);
    tasks = (const void *)(directories + header->directories);
    pieces = (const void *)(tasks + header->tasks);
    links = (const void *)(pieces + header->pieces);
    heap = (const char *)(links + header->links);
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    umask(0);
    folders = malloc(sizeof(int) * (header->directories + 1));
    if (mkdir(argv[3], 0755) || (folders[0] = open(argv[3], O_RDONLY | O_DIRECTORY)) < 0)
        fail(argv[3]);
    for (uint32_t i = 0; i < header->directories; i++) {
        const struct directory *one = &directories[i];
        if (mkdirat(folders[one->parent], heap + one->name, one->mode & 07777) ||
            (folders[i + 1] = openat(folders[one->parent], heap + one->name,
                                     O_RDONLY | O_DIRECTORY)) < 0)
            fail(heap + one->name);
    }
    /* Files that are written in parts, at their full size. */
    for (uint32_t i = 0; i < header->pieces; i++) {
        const struct piece *one = &pieces[i];
        if (one->kind == 1 && one->offset == 0) {
            int fd = openat(folders[one->directory], heap + one->name, O_WRONLY | O_CREAT | O_EXCL,
                            one->mode & 07777);
            if (fd < 0 || ftruncate(fd, one->size)) fail(heap + one->name);
            close(fd);
        }
    }
    int count = atoi(argv[4]);
    pthread_t *threads = malloc(sizeof(pthread_t) * count);
    for (int i = 0; i < count; i++) pthread_create(&threads[i], NULL, work, NULL);
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < header->pieces; i++) {
        const struct piece *one = &pieces[i];
        if (one->kind == 1 && one->offset == 0)
            set_time(folders[one->directory], heap + one->name, one->mtime);
    }
    for (uint32_t i = 0; i < header->links; i++) {
        const struct link *one = &links[i];
        if (symlinkat(heap + one->target, folders[one->directory], heap + one->name))
            fail(heap + one->name);
        set_time(folders[one->directory], heap + one->name, one->mtime);
    }
    for (uint32_t i = header->directories; i-- > 0;) set_time(folders[i + 1], NULL, directories[i].mtime);
    return 0;
}
