/* Whether this process has a context on a device, which costs it memory there, and what becomes of it in a fork. */
#include "gpuless.h"

static int has_context[GPULESS_DEVICES], has_any, forked;
static pthread_mutex_t beginning = PTHREAD_MUTEX_INITIALIZER;

static void in_child(void) {
    forked = forked || has_any;
    pthread_mutex_init(&beginning, NULL);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }

int gpuless_forked(void) { return forked; }

int gpuless_has_context(int device) { return !forked && __atomic_load_n(&has_context[device], __ATOMIC_ACQUIRE); }

enum gpuless_context gpuless_context(int device) {
    if (forked) return GPULESS_CONTEXT_FORKED;
    if (gpuless_has_context(device)) return GPULESS_CONTEXT_OK;
    struct gpuless_rig *rig = gpuless_mine(0);
    enum gpuless_context result = GPULESS_CONTEXT_OK;
    pthread_mutex_lock(&beginning);
    if (!has_context[device]) {
        if (gpuless_charge(rig, device, gpuless_state(rig)->context_bytes)) {
            has_any = 1;
            __atomic_store_n(&has_context[device], 1, __ATOMIC_RELEASE);
        } else {
            result = GPULESS_CONTEXT_NO_MEMORY;
        }
    }
    pthread_mutex_unlock(&beginning);
    return result;
}
