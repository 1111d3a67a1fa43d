/* What is to go wrong: $GPULESS_DIR/faults, read again whenever it changes, and $GPULESS_FAULTS. A line (or, between
 * semicolons, a part) is
 *
 *     CALL[@DEVICE] ERROR          the call answers with this error: its name (GPU_IS_LOST) or number
 *     CALL[@DEVICE] unavailable    figures are told as "not available" (NVML's all bits set)
 *     CALL[@DEVICE] wait SECONDS   the call takes so long, or until the line is gone, and then goes on as ever
 *
 * CALL is a pattern (fnmatch) over names without their version suffix: nvmlDeviceGetMemoryInfo, nvml*, cudaMalloc.
 * DEVICE is NVML's number. Of several lines that fit, each `wait` is waited for, and the first other one counts. */
#define _GNU_SOURCE
#include "gpuless.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define FAULTS 64

struct line {
    char call[96];
    int device; /* -1: any */
    char what[64];
    double wait_s;
};

static struct line lines[FAULTS];
static int line_count;
static struct stat seen;
static int has_looked;
static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;

static void read_line(const char *text) {
    struct line line = {.device = -1};
    if (line_count == FAULTS || sscanf(text, " %95s %63s %lf", line.call, line.what, &line.wait_s) < 2) return;
    if (line.call[0] == '#') return;
    char *at = strchr(line.call, '@');
    if (at) {
        *at = 0;
        line.device = atoi(at + 1);
    }
    lines[line_count++] = line;
}

static void read_lines(char *text, const char *separators) {
    char *rest;
    for (char *line = strtok_r(text, separators, &rest); line; line = strtok_r(NULL, separators, &rest)) read_line(line);
}

static void read_file(const char *path) {
    char text[8192];
    FILE *file = fopen(path, "re");
    if (!file) return;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    read_lines(text, "\n");
}

static void look(const char *path) {
    struct stat now = {0};
    stat(path, &now);
    if (has_looked && now.st_ino == seen.st_ino && now.st_size == seen.st_size &&
        memcmp(&now.st_mtim, &seen.st_mtim, sizeof now.st_mtim) == 0)
        return;
    seen = now;
    has_looked = 1;
    line_count = 0;
    read_file(path);
    char own[4096];
    snprintf(own, sizeof own, "%s", getenv("GPULESS_FAULTS") ? getenv("GPULESS_FAULTS") : "");
    read_lines(own, ";");
}

/* The first line about this call that is one of waiting, or one that is not. */
static int find(const char *path, const char *call, int device, int waiting, struct line *found) {
    pthread_mutex_lock(&reading);
    look(path);
    int at = 0;
    for (; at < line_count; at++) {
        const struct line *line = &lines[at];
        if ((strcmp(line->what, "wait") == 0) == waiting && (line->device < 0 || line->device == device) &&
            fnmatch(line->call, call, 0) == 0)
            break;
    }
    int is_found = at < line_count;
    if (is_found) *found = lines[at];
    pthread_mutex_unlock(&reading);
    return is_found;
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static void wait_for(const char *path, const char *call, int device) {
    struct line line;
    double began_s = now_s();
    while (find(path, call, device, 1, &line) && now_s() - began_s < line.wait_s) {
        double left_s = line.wait_s - (now_s() - began_s);
        nanosleep(&(struct timespec){.tv_nsec = left_s < 0.01 ? (long)(left_s * 1e9) : 10000000}, NULL);
    }
}

struct gpuless_fault gpuless_fault(const char *call, int device) {
    struct gpuless_fault fault = {GPULESS_FINE, ""};
    struct gpuless_rig *rig = gpuless_mine(0);
    if (!rig) return fault;
    char path[4096];
    snprintf(path, sizeof path, "%s/faults", gpuless_directory(rig));
    wait_for(path, call, device);
    struct line line;
    if (!find(path, call, device, 0, &line)) return fault;
    fault.kind = strcmp(line.what, "unavailable") == 0 ? GPULESS_UNAVAILABLE : GPULESS_ERROR;
    memcpy(fault.error, line.what, sizeof fault.error);
    return fault;
}
