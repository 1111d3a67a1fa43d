/* CUDA runtime: streams, events, captures, graphs.
 *
 * Work is done when it is submitted. Whether a stream tells so is another thing: with GPULESS_EVENTS=pending an event is
 * ready only once something has waited for it, for its stream or for the device, as where a device is busy. */
#define _GNU_SOURCE
#include "runtime.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct user_object {
    void *data;
    cudaHostFn_t destroy;
    int references;
};

struct graph {
    size_t node_count;
    struct user_object *kept[64];
    int kept_count;
};

struct capture {
    unsigned long long id;
    enum cudaStreamCaptureMode mode;
    pid_t thread;
    int spoilt;
    struct graph *graph;
    struct stream *origin;
    struct capture *next;
};

struct stream {
    int device, priority;
    uint64_t submitted, completed;
    struct capture *capture;
};

struct event {
    struct stream *stream;    /* NULL: not recorded */
    uint64_t position;        /* how much the stream had been given when this was recorded */
    struct capture *capture;
    double recorded_ms;
};

static struct stream defaults[GPULESS_DEVICES];
#define STREAMS 65536
#define STREAMS_AT ((void *)0x0fff00000000) /* handles that are the same each time, and grow: free blocks go in their order */
static struct stream *streams;   /* all that were ever made: an event may outlive its stream */
static int stream_count;
static struct capture *captures; /* those going on */
static int capture_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static struct stream *stream_of(cudaStream_t handle) {
    uintptr_t number = (uintptr_t)handle;
    if (number > 2) return (struct stream *)handle;
    int device = current_device();
    struct stream *stream = &defaults[device < 0 ? 0 : device]; /* 1: cudaStreamLegacy, 2: cudaStreamPerThread */
    stream->device = device;
    return stream;
}

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

/* --- what is done ---------------------------------------------------------------------------------------------------------- */

static int are_pending = -1;

static int pending(void) {
    if (are_pending < 0) {
        const char *how = getenv("GPULESS_EVENTS");
        are_pending = how && strcmp(how, "pending") == 0;
    }
    return are_pending;
}

/* For a test's program: from now on, events are ready at once (0), or not (1). */
EXPORT void gpuless_events_pending(int how) { are_pending = how; }

void enqueue(cudaStream_t handle) {
    struct stream *stream = stream_of(handle);
    pthread_mutex_lock(&lock);
    stream->submitted++;
    if (stream->capture) stream->capture->graph->node_count++;
    pthread_mutex_unlock(&lock);
}

static void complete_stream(struct stream *stream) { stream->completed = stream->submitted; }

void complete(cudaStream_t handle) {
    pthread_mutex_lock(&lock);
    complete_stream(stream_of(handle));
    pthread_mutex_unlock(&lock);
}

void complete_all(void) {
    int device = current_device();
    pthread_mutex_lock(&lock);
    complete_stream(&defaults[device]);
    for (int i = 0; i < stream_count; i++)
        if (streams[i].device == device) complete_stream(&streams[i]);
    pthread_mutex_unlock(&lock);
}

/* --- captures ---------------------------------------------------------------------------------------------------------------- */

/* CUDA Runtime API, cudaThreadExchangeStreamCaptureMode. */
static int forbids(const struct capture *capture) {
    if (thread_mode == cudaStreamCaptureModeRelaxed) return 0;
    if (capture->thread == gettid()) return capture->mode != cudaStreamCaptureModeRelaxed;
    return thread_mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
}

cudaError_t unsafe_in_capture(void) {
    if (!__atomic_load_n(&capture_count, __ATOMIC_ACQUIRE)) return cudaSuccess;
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&lock);
    for (struct capture *capture = captures; capture; capture = capture->next) {
        if (!forbids(capture)) continue;
        capture->spoilt = 1;
        error = cudaErrorStreamCaptureUnsupported;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

/* What no mode allows: to wait for what is only being written down. */
static cudaError_t refuse_if_captured(struct stream *stream) {
    if (!stream->capture) return cudaSuccess;
    stream->capture->spoilt = 1;
    return cudaErrorStreamCaptureUnsupported;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    if (*mode > cudaStreamCaptureModeRelaxed) return told(cudaErrorInvalidValue);
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

static cudaError_t begin_capture(struct stream *stream, struct graph *graph, enum cudaStreamCaptureMode mode) {
    static unsigned long long last_id;
    if (stream->capture || stream == &defaults[stream->device]) return cudaErrorStreamCaptureUnsupported;
    struct capture *capture = calloc(1, sizeof *capture);
    *capture = (struct capture){++last_id, mode, gettid(), 0, graph ? graph : calloc(1, sizeof *graph), stream, captures};
    captures = stream->capture = capture;
    __atomic_add_fetch(&capture_count, 1, __ATOMIC_RELEASE);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    return cudaStreamBeginCaptureToGraph(stream, NULL, NULL, NULL, 0, mode);
}

EXPORT cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t handle, cudaGraph_t graph, const cudaGraphNode_t *dependencies,
                                                 const cudaGraphEdgeData *edges, size_t count,
                                                 enum cudaStreamCaptureMode mode) {
    (void)dependencies, (void)edges, (void)count;
    TRY(begin("cudaStreamBeginCapture"));
    pthread_mutex_lock(&lock);
    cudaError_t error = begin_capture(stream_of(handle), (struct graph *)graph, mode);
    pthread_mutex_unlock(&lock);
    return told(error);
}

static void end_capture(struct capture *capture) {
    struct capture **link = &captures;
    while (*link != capture) link = &(*link)->next;
    *link = capture->next;
    for (int i = 0; i < stream_count; i++)
        if (streams[i].capture == capture) streams[i].capture = NULL; /* those that joined it too */
    __atomic_sub_fetch(&capture_count, 1, __ATOMIC_RELEASE);
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    cudaError_t error = cudaErrorIllegalState;
    *graph = NULL;
    pthread_mutex_lock(&lock);
    struct capture *capture = stream_of(handle)->capture;
    if (capture && capture->origin == stream_of(handle)) {
        end_capture(capture);
        error = capture->spoilt ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
        if (!error) *graph = (cudaGraph_t)capture->graph;
    } /* a capture is not freed: an event may still tell of it */
    pthread_mutex_unlock(&lock);
    return told(error);
}

static enum cudaStreamCaptureStatus status_of(const struct capture *capture) {
    if (!capture) return cudaStreamCaptureStatusNone;
    return capture->spoilt ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    if (gpuless_forked()) return told(cudaErrorInitializationError);
    *status = status_of(stream_of(stream)->capture);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                            cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                            const cudaGraphEdgeData **edges, size_t *count) {
    if (gpuless_forked()) return told(cudaErrorInitializationError);
    struct capture *capture = stream_of(stream)->capture;
    *status = status_of(capture);
    if (capture && id) *id = capture->id;
    if (capture && graph) *graph = (cudaGraph_t)capture->graph;
    if (dependencies) *dependencies = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *dependencies,
                                                       const cudaGraphEdgeData *edges, size_t count, unsigned flags) {
    (void)stream, (void)dependencies, (void)edges, (void)count, (void)flags;
    return cudaSuccess;
}

/* --- streams ----------------------------------------------------------------------------------------------------------------- */

/* Room for all that are ever made; NULL: it cannot be had. */
static struct stream *room_for_streams(void) {
    void *room = mmap(STREAMS_AT, STREAMS * sizeof(struct stream), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    return room == STREAMS_AT ? room : NULL;
}

static struct stream *new_stream(void) {
    if (!streams) streams = room_for_streams();
    return streams && stream_count < STREAMS ? &streams[stream_count++] : NULL;
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    (void)flags;
    TRY(begin("cudaStreamCreate"));
    pthread_mutex_lock(&lock);
    struct stream *stream = new_stream();
    if (stream) *stream = (struct stream){.device = current_device(), .priority = priority};
    pthread_mutex_unlock(&lock);
    *handle = (cudaStream_t)stream;
    return stream ? cudaSuccess : told(cudaErrorMemoryAllocation);
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    complete(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    TRY(begin("cudaStreamSynchronize"));
    TRY(refuse_if_captured(stream_of(stream)));
    complete(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
    TRY(begin(NULL));
    struct stream *stream = stream_of(handle);
    TRY(refuse_if_captured(stream));
    return !pending() || stream->completed == stream->submitted ? cudaSuccess : cudaErrorNotReady;
}

/* A stream that waits for what another one captures joins the capture. */
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    (void)flags;
    TRY(begin(NULL));
    struct stream *stream = stream_of(handle);
    struct capture *capture = ((struct event *)event)->capture;
    pthread_mutex_lock(&lock);
    if (capture && ((struct event *)event)->stream->capture == capture && stream != &defaults[stream->device])
        stream->capture = capture;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

/* --- events ------------------------------------------------------------------------------------------------------------------ */

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    TRY(begin(NULL));
    *event = (cudaEvent_t)calloc(1, sizeof(struct event));
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
    (void)flags;
    TRY(begin(NULL));
    struct event *event = (struct event *)handle;
    enqueue(stream);
    event->stream = stream_of(stream);
    event->position = event->stream->submitted;
    event->capture = event->stream->capture;
    event->recorded_ms = now_ms();
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

static cudaError_t refuse_if_event_captured(const struct event *event) {
    if (!event->capture || !event->stream || event->stream->capture != event->capture) return cudaSuccess;
    event->capture->spoilt = 1;
    return cudaErrorCapturedEvent;
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
    const struct event *event = (struct event *)handle;
    TRY(begin(NULL));
    TRY(refuse_if_event_captured(event));
    TRY(unsafe_in_capture());
    if (!pending() || !event->stream || event->stream->completed >= event->position) return cudaSuccess;
    return cudaErrorNotReady;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    const struct event *event = (struct event *)handle;
    TRY(begin("cudaEventSynchronize"));
    TRY(refuse_if_event_captured(event));
    pthread_mutex_lock(&lock);
    if (event->stream && event->stream->completed < event->position) event->stream->completed = event->position;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    *ms = (float)(((struct event *)end)->recorded_ms - ((struct event *)start)->recorded_ms);
    return cudaSuccess;
}

/* --- graphs: they are counted, not run ------------------------------------------------------------------------------------ */

EXPORT cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *data, cudaHostFn_t destroy, unsigned references,
                                        unsigned flags) {
    (void)flags;
    struct user_object *made = calloc(1, sizeof *made);
    *made = (struct user_object){data, destroy, (int)references};
    *object = (cudaUserObject_t)made;
    return cudaSuccess;
}

EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t handle, unsigned count) {
    struct user_object *object = (struct user_object *)handle;
    if (__atomic_sub_fetch(&object->references, count, __ATOMIC_ACQ_REL) > 0) return cudaSuccess;
    object->destroy(object->data);
    free(object);
    return cudaSuccess;
}

static void keep(struct graph *graph, struct user_object *object) {
    if (graph->kept_count < 64) graph->kept[graph->kept_count++] = object;
}

EXPORT cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
    int moves = flags & cudaGraphUserObjectMove;
    if (!moves) __atomic_add_fetch(&((struct user_object *)object)->references, count, __ATOMIC_ACQ_REL);
    for (unsigned i = 0; i < count; i++) keep((struct graph *)graph, (struct user_object *)object);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
    struct graph *graph = (struct graph *)handle;
    for (int i = 0; graph && i < graph->kept_count; i++) cudaUserObjectRelease((cudaUserObject_t)graph->kept[i], 1);
    free(graph);
    return cudaSuccess;
}

/* What is instantiated keeps what the graph keeps. */
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t handle, unsigned long long flags) {
    (void)flags;
    struct graph *copy = malloc(sizeof *copy);
    *copy = *(struct graph *)handle;
    for (int i = 0; i < copy->kept_count; i++) __atomic_add_fetch(&copy->kept[i]->references, 1, __ATOMIC_ACQ_REL);
    *executable = (cudaGraphExec_t)copy;
    return cudaSuccess;
}

/* PyTorch up to 2.12 asks for it. */
EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) {
    (void)graph, (void)path, (void)flags;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return cudaGraphDestroy((cudaGraph_t)executable); }

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    (void)executable;
    TRY(begin("cudaGraphLaunch"));
    enqueue(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    size_t there = ((struct graph *)graph)->node_count;
    for (size_t i = 0; nodes && i < *count; i++) nodes[i] = (cudaGraphNode_t)(i < there ? i + 1 : 0);
    if (!nodes || *count > there) *count = there;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *dependencies, cudaGraphEdgeData *edges,
                                                size_t *count) {
    (void)node, (void)dependencies, (void)edges;
    *count = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphAddNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *dependencies,
                                    const cudaGraphEdgeData *edges, size_t count, struct cudaGraphNodeParams *parameters) {
    (void)node, (void)graph, (void)dependencies, (void)edges, (void)count, (void)parameters;
    return told(cudaErrorNotSupported);
}

EXPORT cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle *handle, cudaGraph_t graph, unsigned value,
                                                    unsigned flags) {
    (void)handle, (void)graph, (void)value, (void)flags;
    return told(cudaErrorNotSupported);
}
