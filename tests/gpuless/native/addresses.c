/* This process's device addresses: one large region, reserved once and backed only where something is written. The lowest
 * gap that fits is taken, so that a program gets the same addresses each time that it runs. */
#define _GNU_SOURCE
#include "gpuless.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define REGION_START ((uintptr_t)0x100000000000) /* far from where the kernel maps things */
#define REGION_BYTES ((uint64_t)1 << 45)
#define HOST_PAGE ((uintptr_t)4096)

static struct gpuless_range *ranges; /* by address */
static int range_count, range_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int is_mapped(void) {
    static int mapped;
    if (mapped) return 1;
    void *got = mmap((void *)REGION_START, REGION_BYTES, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != (void *)REGION_START) return 0;
    madvise(got, REGION_BYTES, MADV_NOHUGEPAGE);
    madvise(got, REGION_BYTES, MADV_DONTDUMP);
    return mapped = 1;
}

static uint64_t whole_pages(uint64_t size) { return (size + GPULESS_PAGE - 1) / GPULESS_PAGE * GPULESS_PAGE; }

static uintptr_t end_of(int at) { return ranges[at].address + whole_pages(ranges[at].size); }

static int room_for_one_more(void) {
    if (range_count < range_room) return 1;
    int room = range_room ? 2 * range_room : 1024;
    struct gpuless_range *grown = realloc(ranges, room * sizeof *grown);
    if (!grown) return 0;
    ranges = grown;
    range_room = room;
    return 1;
}

/* Where in the order the lowest gap is that fits, and its address. */
static int lowest_gap(uint64_t size, uintptr_t *address) {
    *address = REGION_START;
    int at = 0;
    for (; at < range_count && ranges[at].address - *address < whole_pages(size); at++) *address = end_of(at);
    return at;
}

uintptr_t gpuless_take(uint64_t size, enum gpuless_use use, int device, uint64_t charged_bytes) {
    pthread_mutex_lock(&lock);
    uintptr_t address = 0;
    if (size <= REGION_BYTES && is_mapped() && room_for_one_more()) {
        int at = lowest_gap(size, &address);
        if (address - REGION_START > REGION_BYTES - whole_pages(size)) {
            address = 0;
        } else {
            memmove(&ranges[at + 1], &ranges[at], (range_count - at) * sizeof *ranges);
            ranges[at] = (struct gpuless_range){address, size, use, device, charged_bytes};
            range_count++;
        }
    }
    pthread_mutex_unlock(&lock);
    return address;
}

/* The last range that starts at or before this address; -1: none. */
static int last_before(uintptr_t address) {
    int low = 0, high = range_count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (ranges[middle].address <= address) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

int gpuless_give_back(uintptr_t address, struct gpuless_range *was) {
    pthread_mutex_lock(&lock);
    int at = last_before(address), found = at >= 0 && ranges[at].address == address;
    if (found) {
        *was = ranges[at];
        madvise((void *)address, whole_pages(was->size), MADV_DONTNEED);
        memmove(&ranges[at], &ranges[at + 1], (range_count - at - 1) * sizeof *ranges);
        range_count--;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

int gpuless_find(uintptr_t address, struct gpuless_range *found) {
    if (address < REGION_START || address - REGION_START >= REGION_BYTES) return 0;
    pthread_mutex_lock(&lock);
    int at = last_before(address), is_found = at >= 0 && address - ranges[at].address < ranges[at].size;
    if (is_found) *found = ranges[at];
    pthread_mutex_unlock(&lock);
    return is_found;
}

/* --- what lies there -------------------------------------------------------------------------------------------------- */

static int is_device(const void *start) { return (uintptr_t)start - REGION_START < REGION_BYTES; }

void gpuless_zero(void *start, uint64_t size) {
    uintptr_t end = (uintptr_t)start + size;
    uintptr_t first = ((uintptr_t)start + HOST_PAGE - 1) & ~(HOST_PAGE - 1), last = end & ~(HOST_PAGE - 1);
    if (!is_device(start) || last <= first) {
        memset(start, 0, size);
        return;
    }
    memset(start, 0, first - (uintptr_t)start);
    madvise((void *)first, last - first, MADV_DONTNEED);
    memset((void *)last, 0, end - last);
}

/* How much of what starts here is alike: written once (or not), as far as `size`. */
static uint64_t alike(uintptr_t start, uint64_t size, int *written) {
    unsigned char resident[512];
    uintptr_t page = start & ~(HOST_PAGE - 1);
    uint64_t pages = (start + size - page + HOST_PAGE - 1) / HOST_PAGE, same = 1;
    if (pages > sizeof resident) pages = sizeof resident;
    memset(resident, 1, sizeof resident);
    mincore((void *)page, pages * HOST_PAGE, resident);
    *written = resident[0] & 1;
    while (same < pages && (resident[same] & 1) == *written) same++;
    uint64_t part = page + same * HOST_PAGE - start;
    return part < size ? part : size;
}

void gpuless_copy(void *target, const void *source, uint64_t size) {
    if (!is_device(target) || !is_device(source)) {
        memmove(target, source, size);
        return;
    }
    for (uint64_t done = 0; done < size;) {
        int written;
        uint64_t part = alike((uintptr_t)source + done, size - done, &written);
        if (written) memmove((char *)target + done, (const char *)source + done, part);
        else gpuless_zero((char *)target + done, part);
        done += part;
    }
}
