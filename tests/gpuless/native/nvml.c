/* A libnvidia-ml.so.1: the state's devices and what each process holds, as NVML tells them. What is to go wrong: faults.c.
 * Names, structures and codes are those of nvml.h, of driver 580 and, with -DOLD_DRIVER, of one before 510. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpuless.h"

#define NOT_AVAILABLE UINT64_MAX
#define NO_INSTANCE 0xFFFFFFFFu
#define MEMORY_V2 0x02000028u

typedef const struct gpuless_device *device_t;
typedef struct { uint64_t total, free, used; } memory_t;
typedef struct { uint32_t version; uint64_t total, reserved, free, used; } memory_v2_t;
typedef struct { uint32_t pid; uint64_t used; } process_v1_t;
typedef struct { uint32_t pid; uint64_t used; uint32_t gpu_instance, compute_instance; } process_t;
typedef struct {
    char bus_id_legacy[16];
    uint32_t domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} pci_t;

enum {
    SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, ALREADY_INITIALIZED, NOT_FOUND, INSUFFICIENT_SIZE,
    INSUFFICIENT_POWER, DRIVER_NOT_LOADED, TIMEOUT, IRQ_ISSUE, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, CORRUPTED_INFOROM,
    GPU_IS_LOST, RESET_REQUIRED, OPERATING_SYSTEM, LIB_RM_VERSION_MISMATCH, IN_USE, MEMORY, NO_DATA, VGPU_ECC_NOT_SUPPORTED,
    INSUFFICIENT_RESOURCES, UNKNOWN = 999
};

static const struct { int code; const char *name, *text; } errors[] = {
    {SUCCESS, "SUCCESS", "Success"},
    {UNINITIALIZED, "UNINITIALIZED", "Uninitialized"},
    {INVALID_ARGUMENT, "INVALID_ARGUMENT", "Invalid Argument"},
    {NOT_SUPPORTED, "NOT_SUPPORTED", "Not Supported"},
    {NO_PERMISSION, "NO_PERMISSION", "Insufficient Permissions"},
    {NOT_FOUND, "NOT_FOUND", "Not Found"},
    {INSUFFICIENT_SIZE, "INSUFFICIENT_SIZE", "Insufficient Size"},
    {DRIVER_NOT_LOADED, "DRIVER_NOT_LOADED", "Driver Not Loaded"},
    {TIMEOUT, "TIMEOUT", "Timeout"},
    {FUNCTION_NOT_FOUND, "FUNCTION_NOT_FOUND", "Function Not Found"},
    {GPU_IS_LOST, "GPU_IS_LOST", "GPU is lost"},
    {RESET_REQUIRED, "RESET_REQUIRED", "GPU requires reset"},
    {OPERATING_SYSTEM, "OPERATING_SYSTEM", "The operating system has blocked the request."},
    {LIB_RM_VERSION_MISMATCH, "LIB_RM_VERSION_MISMATCH", "Driver/library version mismatch"},
    {IN_USE, "IN_USE", "In use by another client"},
    {MEMORY, "MEMORY", "Insufficient Memory"},
    {NO_DATA, "NO_DATA", "No data"},
    {INSUFFICIENT_RESOURCES, "INSUFFICIENT_RESOURCES", "Insufficient Resources"},
    {UNKNOWN, "UNKNOWN", "Unknown Error"},
};

#define ERRORS (int)(sizeof errors / sizeof *errors)

static int init_count;

static int error_named(const char *name) {
    for (int i = 0; i < ERRORS; i++)
        if (strcmp(errors[i].name, name) == 0) return errors[i].code;
    int number = atoi(name);
    return number ? number : UNKNOWN;
}

static struct gpuless_state *state(void) { return gpuless_state(gpuless_mine(0)); }

static int number_of(device_t device) { return (int)(device - state()->devices); }

static int is_device(device_t device) {
    return device && device >= state()->devices && number_of(device) < state()->device_count;
}

static int is_instance(device_t device) { return device->parent >= 0; }

static int has_instances(int number) {
    for (int i = 0; i < state()->device_count; i++)
        if (state()->devices[i].parent == number) return 1;
    return 0;
}

/* Whether a fault, or a want of nvmlInit, answers this call; `unavailable` is set where figures are to be missing. */
static int ask(const char *call, device_t device, int *unavailable) {
    if (!init_count) return UNINITIALIZED;
    if (device && !is_device(device)) return INVALID_ARGUMENT;
    struct gpuless_fault fault = gpuless_fault(call, device ? number_of(device) : -1);
    if (fault.kind == GPULESS_ERROR) return error_named(fault.error);
    if (unavailable) *unavailable = fault.kind == GPULESS_UNAVAILABLE;
    return SUCCESS;
}

#define ASK(...)                              \
    do {                                      \
        int error_ = ask(__VA_ARGS__);        \
        if (error_ != SUCCESS) return error_; \
    } while (0)

static int give_text(const char *text, char *room, unsigned size) {
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(room, text);
    return SUCCESS;
}

/* --- the library ------------------------------------------------------------------------------------------------------------- */

EXPORT int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!gpuless_mine(!init_count)) return DRIVER_NOT_LOADED;
    struct gpuless_fault fault = gpuless_fault("nvmlInit", -1);
    if (fault.kind == GPULESS_ERROR) return error_named(fault.error);
    init_count++;
    return SUCCESS;
}

EXPORT int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

EXPORT int nvmlInit(void) { return nvmlInitWithFlags(0); }

EXPORT int nvmlShutdown(void) {
    if (!init_count) return UNINITIALIZED;
    init_count--;
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(int code) {
    for (int i = 0; i < ERRORS; i++)
        if (errors[i].code == code) return errors[i].text;
    return "Unknown Error";
}

EXPORT int nvmlSystemGetDriverVersion(char *room, unsigned size) {
    ASK("nvmlSystemGetDriverVersion", NULL, NULL);
#ifdef OLD_DRIVER
    return give_text("470.256.02", room, size);
#else
    return give_text("580.95.05", room, size);
#endif
}

EXPORT int nvmlSystemGetNVMLVersion(char *room, unsigned size) {
    ASK("nvmlSystemGetNVMLVersion", NULL, NULL);
    return give_text("13.580.95.05", room, size);
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ASK("nvmlSystemGetCudaDriverVersion", NULL, NULL);
    *version = 13000;
    return SUCCESS;
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

/* --- devices ----------------------------------------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    ASK("nvmlDeviceGetCount", NULL, NULL);
    *count = 0;
    for (int i = 0; i < state()->device_count; i++) *count += !is_instance(&state()->devices[i]);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

/* The Nth whole device (parent -1), or the Nth instance of one. */
static device_t nth(unsigned index, int parent) {
    for (int i = 0; i < state()->device_count; i++)
        if (state()->devices[i].parent == parent && index-- == 0) return &state()->devices[i];
    return NULL;
}

static int give_device(const char *call, device_t found, device_t *device, int otherwise) {
    if (!found) return otherwise;
    ASK(call, found, NULL);
    *device = found;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    ASK("nvmlDeviceGetHandleByIndex", NULL, NULL);
    return give_device("nvmlDeviceGetHandleByIndex", nth(index, -1), device, INVALID_ARGUMENT);
}

EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, device_t *device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device) {
    device_t found = NULL;
    ASK("nvmlDeviceGetHandleByUUID", NULL, NULL);
    for (int i = 0; i < state()->device_count && !found; i++)
        if (strcmp(state()->devices[i].uuid, uuid) == 0) found = &state()->devices[i];
    return give_device("nvmlDeviceGetHandleByUUID", found, device, NOT_FOUND);
}

/* Domains are written with four digits or with eight. */
static int is_bus_id(const char *ours, const char *asked) {
    unsigned a[4] = {0}, b[4] = {0};
    return sscanf(ours, "%x:%x:%x.%x", &a[0], &a[1], &a[2], &a[3]) == 4 &&
           sscanf(asked, "%x:%x:%x.%x", &b[0], &b[1], &b[2], &b[3]) == 4 && memcmp(a, b, sizeof a) == 0;
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, device_t *device) {
    device_t found = NULL;
    ASK("nvmlDeviceGetHandleByPciBusId", NULL, NULL);
    for (int i = 0; i < state()->device_count && !found; i++)
        if (!is_instance(&state()->devices[i]) && is_bus_id(state()->devices[i].bus_id, bus_id)) found = &state()->devices[i];
    return give_device("nvmlDeviceGetHandleByPciBusId", found, device, NOT_FOUND);
}

EXPORT int nvmlDeviceGetHandleByPciBusId(const char *bus_id, device_t *device) {
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

EXPORT int nvmlDeviceGetIndex(device_t device, unsigned *index) {
    ASK("nvmlDeviceGetIndex", device, NULL);
    *index = 0;
    for (device_t other = state()->devices; other < device; other++) *index += other->parent == device->parent;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMinorNumber(device_t device, unsigned *minor) {
    ASK("nvmlDeviceGetMinorNumber", device, NULL);
    return nvmlDeviceGetIndex(device, minor);
}

EXPORT int nvmlDeviceGetName(device_t device, char *room, unsigned size) {
    ASK("nvmlDeviceGetName", device, NULL);
    return give_text(device->name, room, size);
}

EXPORT int nvmlDeviceGetUUID(device_t device, char *room, unsigned size) {
    ASK("nvmlDeviceGetUUID", device, NULL);
    return give_text(device->uuid, room, size);
}

EXPORT int nvmlDeviceGetPciInfo_v3(device_t device, pci_t *pci) {
    ASK("nvmlDeviceGetPciInfo", device, NULL);
    memset(pci, 0, sizeof *pci);
    sscanf(device->bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%s", device->bus_id);
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%s", device->bus_id + 4);
    return SUCCESS;
}

/* --- memory -------------------------------------------------------------------------------------------------------------------- */

/* What is told about a device in MIG mode is told of its instances only, to whom may not administer it. */
static int ask_memory(device_t device, memory_v2_t *memory) {
    int unavailable = 0;
    ASK("nvmlDeviceGetMemoryInfo", device, &unavailable);
    int number = number_of(device);
    if (has_instances(number)) return NO_PERMISSION;
    memory->used = gpuless_used(gpuless_mine(0), number);
    memory->free = device->capacity_bytes - memory->used;
    memory->reserved = device->driver_bytes;
    memory->total = device->capacity_bytes + device->driver_bytes;
    if (unavailable) memory->total = memory->free = memory->reserved = memory->used = NOT_AVAILABLE;
    return SUCCESS;
}

/* Version 1 counts the driver's own as used. */
EXPORT int nvmlDeviceGetMemoryInfo(device_t device, memory_t *memory) {
    memory_v2_t told;
    int error = ask_memory(device, &told);
    if (error) return error;
    uint64_t used = told.used == NOT_AVAILABLE ? NOT_AVAILABLE : told.used + told.reserved;
    *memory = (memory_t){told.total, told.free, used};
    return SUCCESS;
}

#ifndef OLD_DRIVER
EXPORT int nvmlDeviceGetMemoryInfo_v2(device_t device, memory_v2_t *memory) {
    if (memory->version != MEMORY_V2) return INVALID_ARGUMENT;
    return ask_memory(device, memory);
}
#endif

/* --- processes --------------------------------------------------------------------------------------------------------------------- */

static unsigned instance_of(int number) {
    return state()->devices[number].instance < 0 ? NO_INSTANCE : (unsigned)state()->devices[number].instance;
}

static unsigned holders(int number, unsigned room, process_t *processes, int unavailable) {
    int32_t pids[GPULESS_PROCESSES];
    uint64_t used[GPULESS_PROCESSES];
    unsigned found = (unsigned)gpuless_holders(gpuless_mine(0), number, GPULESS_PROCESSES, pids, used);
    for (unsigned i = 0; i < found && i < room; i++)
        processes[i] = (process_t){(uint32_t)pids[i], unavailable ? NOT_AVAILABLE : used[i], instance_of(number),
                                   instance_of(number) == NO_INSTANCE ? NO_INSTANCE : 0};
    return found;
}

/* The device's own, and for one in MIG mode its instances'. */
static int all_processes(const char *call, device_t device, unsigned *count, process_t *processes) {
    int unavailable = 0;
    ASK(call, device, &unavailable);
    *count = holders(number_of(device), GPULESS_PROCESSES, processes, unavailable);
    for (int i = 0; i < state()->device_count; i++)
        if (state()->devices[i].parent == number_of(device))
            *count += holders(i, GPULESS_PROCESSES - *count, processes + *count, unavailable);
    return SUCCESS;
}

static int compute_processes(device_t device, unsigned *room, void *processes, int with_instance) {
    process_t found[GPULESS_PROCESSES];
    unsigned count;
    int error = all_processes("nvmlDeviceGetComputeRunningProcesses", device, &count, found);
    if (error) return error;
    int fits = count == 0 || (processes && count <= *room);
    for (unsigned i = 0; fits && i < count; i++) {
        if (with_instance) ((process_t *)processes)[i] = found[i];
        else ((process_v1_t *)processes)[i] = (process_v1_t){found[i].pid, found[i].used};
    }
    *room = count;
    return fits ? SUCCESS : INSUFFICIENT_SIZE;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses(device_t device, unsigned *count, process_v1_t *processes) {
    return compute_processes(device, count, processes, 0);
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(device_t device, unsigned *count, process_t *processes) {
    return compute_processes(device, count, processes, 1);
}

/* Nobody draws on these devices, and nobody shares them by MPS. */
static int no_processes(const char *call, device_t device, unsigned *count) {
    ASK(call, device, NULL);
    *count = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses(device_t device, unsigned *count, void *processes) {
    (void)processes;
    return no_processes("nvmlDeviceGetGraphicsRunningProcesses", device, count);
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v2(device_t device, unsigned *count, void *processes) {
    return nvmlDeviceGetGraphicsRunningProcesses(device, count, processes);
}

#ifndef OLD_DRIVER
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, process_t *processes) {
    return compute_processes(device, count, processes, 1);
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t device, unsigned *count, void *processes) {
    return nvmlDeviceGetGraphicsRunningProcesses(device, count, processes);
}

EXPORT int nvmlDeviceGetMPSComputeRunningProcesses_v3(device_t device, unsigned *count, void *processes) {
    (void)processes;
    return no_processes("nvmlDeviceGetMPSComputeRunningProcesses", device, count);
}
#endif

/* --- MIG ---------------------------------------------------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetMigMode(device_t device, unsigned *current, unsigned *pending) {
    ASK("nvmlDeviceGetMigMode", device, NULL);
    if (is_instance(device)) return INVALID_ARGUMENT;
    *current = *pending = (unsigned)has_instances(number_of(device));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned *count) {
    ASK("nvmlDeviceGetMaxMigDeviceCount", device, NULL);
    *count = has_instances(number_of(device)) ? 7 : 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned index, device_t *instance) {
    ASK("nvmlDeviceGetMigDeviceHandleByIndex", device, NULL);
    return give_device("nvmlDeviceGetMigDeviceHandleByIndex", nth(index, number_of(device)), instance, NOT_FOUND);
}

EXPORT int nvmlDeviceIsMigDeviceHandle(device_t device, unsigned *is) {
    ASK("nvmlDeviceIsMigDeviceHandle", device, NULL);
    *is = (unsigned)is_instance(device);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_t instance, device_t *device) {
    ASK("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", instance, NULL);
    if (!is_instance(instance)) return INVALID_ARGUMENT;
    *device = &state()->devices[instance->parent];
    return SUCCESS;
}

EXPORT int nvmlDeviceGetGpuInstanceId(device_t device, unsigned *number) {
    ASK("nvmlDeviceGetGpuInstanceId", device, NULL);
    if (!is_instance(device)) return NOT_SUPPORTED;
    *number = (unsigned)device->instance;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetComputeInstanceId(device_t device, unsigned *number) {
    ASK("nvmlDeviceGetComputeInstanceId", device, NULL);
    if (!is_instance(device)) return NOT_SUPPORTED;
    *number = 0;
    return SUCCESS;
}

/* --- what PyTorch asks besides ------------------------------------------------------------------------------------------------------- */

static int not_supported(const char *call, device_t device) {
    ASK(call, device, NULL);
    return NOT_SUPPORTED;
}

#ifndef OLD_DRIVER
/* nvmlGpuFabricInfo_v2_t, with no fabric there. */
typedef struct {
    uint32_t version;
    unsigned char cluster_uuid[16];
    int status;
    uint32_t clique;
    unsigned char state; /* 0: NVML_GPU_FABRIC_STATE_NOT_SUPPORTED */
    uint32_t health;
} fabric_t;

EXPORT int nvmlDeviceGetGpuFabricInfoV(device_t device, fabric_t *fabric) {
    ASK("nvmlDeviceGetGpuFabricInfo", device, NULL);
    *fabric = (fabric_t){.version = fabric->version};
    return SUCCESS;
}
#endif

EXPORT int nvmlDeviceGetP2PStatus(device_t device) { return not_supported("nvmlDeviceGetP2PStatus", device); }

EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(device_t device) {
    return not_supported("nvmlDeviceGetNvLinkRemoteDeviceType", device);
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(device_t device) {
    return not_supported("nvmlDeviceGetNvLinkRemotePciInfo", device);
}
