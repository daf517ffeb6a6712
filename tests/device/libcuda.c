/* A stand-in for libcuda.so.1: GPUs of ordinary memory that several processes share, strict where the real driver is silent.

   Device memory is a file in $EMU_DIR, mapped by whoever allocates or imports it, so a pointer can be read like any other.
   What a test may set:

     EMU_DIR    folder of the emulated machine: one file for each allocation, `log` of what happened. Needed.
     EMU_GPUS   "GPU-<uuid>=<bytes>,MIG-<uuid>=<bytes>,...": the GPUs in the order of the machine, with their memory
     EMU_FAIL   "cuMemAlloc_v2:2@3,cuInit:100": the third cuMemAlloc_v2 and every cuInit fail with this code ("@3+": from then on)
     EMU_PIDNS  another PID namespace than the process's own, in a number
     EMU_NO_READ_ONLY_REGISTER, EMU_NO_IPC, EMU_EXCLUSIVE: a GPU that cannot, or lets in one process only
     CUDA_VISIBLE_DEVICES: as with the real one, by number or by UUID

   Every call that breaks a rule of the driver API (a double free, a freed handle, no current context, memory freed while
   somebody has it imported) is written to the log as "violation" and ends the process with abort(). What a process still holds
   when it exits is written there as "leak". Asynchronous copies happen when their stream is synchronised, and not before. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct Context *CUcontext;
typedef struct Stream *CUstream;
typedef struct { unsigned char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    DEVICE_UNAVAILABLE = 46, INVALID_CONTEXT = 201, MAP_FAILED_ = 205, INVALID_HANDLE = 400, NOT_FOUND = 500,
    ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801, UNKNOWN = 999
};
enum { MOST_GPUS = 16, MOST = 4096, POISON_FREED = 0xDD, POISON_DEAD = 0xEE };

typedef struct { char name[64]; CUuuid uuid; int mig; size_t bytes; } Gpu;
typedef struct Context { int gpu, retained; } Context;
typedef struct { CUdeviceptr base; size_t size; int gpu, fd, imported; char file[32]; } Memory;
typedef struct { char *base; size_t size; int allocated; } Pinned;
typedef struct { void *to; const void *from; size_t size; } Copy;
typedef struct Stream { Copy *copies; int count, room; Context *context; } Stream;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Gpu gpus[MOST_GPUS];
static int machine, visible[MOST_GPUS], count;
static Context contexts[MOST_GPUS];
static Memory memories[MOST];
static Pinned pinned[MOST];
static int memory_count, pinned_count, stream_count, owner, serial;
static int freeing_failed; /* on demand: then what is still there at the end is nobody's fault */
static __thread Context *stack[64];
static __thread int depth;
static char folder[512];

static void say(const char *format, ...) {
    char line[512], path[600];
    int length = snprintf(line, sizeof line, "%d ", getpid());
    va_list arguments;
    va_start(arguments, format);
    length += vsnprintf(line + length, sizeof line - length - 2, format, arguments);
    va_end(arguments);
    line[length++] = '\n';
    snprintf(path, sizeof path, "%s/log", folder);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd >= 0) { if (write(fd, line, length) < 0) {} close(fd); }
}

static void violation(const char *what) {
    say("violation %s", what);
    fprintf(stderr, "emulated driver: %s\n", what);
    abort();
}

/* Errors on demand: looks for `call` in EMU_FAIL and counts. */
static CUresult injected(const char *call) {
    static struct { char call[48]; int calls; } counts[64];
    const char *at = getenv("EMU_FAIL");
    if (!at) return SUCCESS;
    size_t length = strlen(call);
    for (; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        if (strncmp(at, call, length) || at[length] != ':') continue;
        char *end;
        int code = strtol(at + length + 1, &end, 10), nth = 0, on = 0, i;
        if (*end == '@') { nth = strtol(end + 1, &end, 10); on = *end == '+'; }
        pthread_mutex_lock(&mutex);
        for (i = 0; i < 63 && counts[i].call[0] && strcmp(counts[i].call, call); i++) {}
        strncpy(counts[i].call, call, 47);
        int now = ++counts[i].calls;
        pthread_mutex_unlock(&mutex);
        if (!nth || now == nth || (on && now > nth)) { say("injected %s %d", call, code); return code; }
    }
    return SUCCESS;
}

static void freeing_may_fail(const char *call) {
    freeing_failed |= getenv("EMU_FAIL") && strstr(getenv("EMU_FAIL"), call);
}

static void lock(void) {
    char path[600];
    static int fd = -1, of = 0;
    pthread_mutex_lock(&mutex);
    if (fd < 0 || of != getpid()) {
        snprintf(path, sizeof path, "%s/lock", folder);
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        of = getpid();
    }
    flock(fd, LOCK_EX);
    visible[MOST_GPUS - 1] = fd;
}
static void unlock(void) { flock(visible[MOST_GPUS - 1], LOCK_UN); pthread_mutex_unlock(&mutex); }

static int parse_uuid(const char *text, CUuuid *uuid) {
    int n = 0;
    for (text += 4; *text && n < 32; text++) {
        int digit = *text >= '0' && *text <= '9' ? *text - '0' : *text >= 'a' && *text <= 'f' ? *text - 'a' + 10 : -1;
        if (*text == '-') continue;
        if (digit < 0) break;
        uuid->bytes[n / 2] = n % 2 ? uuid->bytes[n / 2] | digit : digit << 4;
        n++;
    }
    return n == 32;
}

#define START(call) \
    do { CUresult code = injected(call); if (code) return code; \
         if (!owner || owner != getpid()) return NOT_INITIALIZED; } while (0)
#define CURRENT(call) \
    START(call); \
    Context *here = depth ? stack[depth - 1] : NULL; \
    if (!here) violation(call " without a current context"); \
    if (!here->retained) violation(call " in a context that was released")

CUresult cuInit(unsigned flags) {
    CUresult code = injected("cuInit");
    if (code) return code;
    if (flags || !getenv("EMU_DIR")) return INVALID_VALUE;
    if (owner == getpid()) return SUCCESS;
    if (owner) return NOT_INITIALIZED; /* a fork's child cannot use its parent's driver */
    snprintf(folder, sizeof folder, "%s", getenv("EMU_DIR"));
    char list[2048];
    snprintf(list, sizeof list, "%s", getenv("EMU_GPUS") ? getenv("EMU_GPUS") : "");
    for (char *save, *part = strtok_r(list, ",", &save); part && machine < MOST_GPUS - 1; part = strtok_r(NULL, ",", &save)) {
        Gpu *gpu = &gpus[machine];
        char *equals = strchr(part, '=');
        if (!equals) return INVALID_VALUE;
        *equals = 0;
        snprintf(gpu->name, sizeof gpu->name, "%s", part);
        gpu->mig = !strncmp(part, "MIG-", 4);
        gpu->bytes = strtoull(equals + 1, NULL, 10);
        if (!parse_uuid(part, &gpu->uuid)) return INVALID_VALUE;
        contexts[machine].gpu = machine;
        machine++;
    }
    const char *chosen = getenv("CUDA_VISIBLE_DEVICES");
    if (!chosen) for (; count < machine; count++) visible[count] = count;
    else {
        snprintf(list, sizeof list, "%s", chosen);
        for (char *save, *part = strtok_r(list, ",", &save); part; part = strtok_r(NULL, ",", &save)) {
            int found = -1;
            if (*part >= '0' && *part <= '9') found = atoi(part) < machine ? atoi(part) : -1;
            else for (int i = 0; i < machine; i++) if (!strncmp(gpus[i].name, part, strlen(part))) found = i;
            if (found < 0) break; /* what stands behind an unknown one is invisible: as the real driver does */
            visible[count++] = found;
        }
    }
    if (!count) return NO_DEVICE;
    owner = getpid();
    return SUCCESS;
}

CUresult cuDriverGetVersion(int *version) { *version = 13000; return injected("cuDriverGetVersion"); }
CUresult cuGetErrorName(CUresult code, const char **text) {
    static __thread char name[32];
    snprintf(name, sizeof name, "CUDA_ERROR_%d", code);
    *text = code == SUCCESS ? "CUDA_SUCCESS" : code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : code == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : name;
    return SUCCESS;
}
CUresult cuGetErrorString(CUresult code, const char **text) { return cuGetErrorName(code, text); }

static Gpu *gpu_at(CUdevice device) { return device < 0 || device >= count ? NULL : &gpus[visible[device]]; }

CUresult cuDeviceGetCount(int *number) { START("cuDeviceGetCount"); *number = count; return SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    START("cuDeviceGet");
    if (ordinal < 0 || ordinal >= count) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    START("cuDeviceGetName");
    if (!gpu_at(device)) return INVALID_DEVICE;
    snprintf(name, length, "Emulated %s", gpu_at(device)->mig ? "MIG instance" : "GPU");
    return SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { /* of the whole GPU, also for an instance of it */
    START("cuDeviceGetUuid");
    if (!gpu_at(device)) return INVALID_DEVICE;
    *uuid = gpu_at(device)->uuid;
    if (gpu_at(device)->mig) uuid->bytes[15] ^= 0xFF;
    return SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    START("cuDeviceGetUuid_v2");
    if (!gpu_at(device)) return INVALID_DEVICE;
    *uuid = gpu_at(device)->uuid;
    return SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    START("cuDeviceGetAttribute");
    if (!gpu_at(device)) return INVALID_DEVICE;
    *value = attribute == 41 ? 1                                              /* UNIFIED_ADDRESSING: also where IPC is not */
           : attribute == 125 ? !getenv("EMU_NO_IPC")                         /* IPC_EVENT_SUPPORTED */
           : attribute == 113 ? !getenv("EMU_NO_READ_ONLY_REGISTER")          /* READ_ONLY_HOST_REGISTER_SUPPORTED */
           : attribute == 20 ? (getenv("EMU_EXCLUSIVE") ? 3 : 0)              /* COMPUTE_MODE */
           : attribute == 75 ? 9 : 0;                                         /* COMPUTE_CAPABILITY_MAJOR */
    return SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    START("cuDeviceTotalMem_v2");
    if (!gpu_at(device)) return INVALID_DEVICE;
    *bytes = gpu_at(device)->bytes;
    return SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int *can, CUdevice one, CUdevice other) {
    START("cuDeviceCanAccessPeer");
    if (!gpu_at(one) || !gpu_at(other)) return INVALID_DEVICE;
    *can = one != other;
    return SUCCESS;
}

/* Contexts */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    START("cuDevicePrimaryCtxRetain");
    if (!gpu_at(device)) return INVALID_DEVICE;
    lock();
    Context *found = &contexts[visible[device]];
    char path[600];
    int fd;
    if (!found->retained) {
        snprintf(path, sizeof path, "%s/context.%d", folder, found->gpu);
        fd = open(path, O_RDWR | O_CREAT, 0600); /* held until the process ends: close-on-exec would not matter here */
        if (getenv("EMU_EXCLUSIVE") && flock(fd, LOCK_EX | LOCK_NB)) { unlock(); return DEVICE_UNAVAILABLE; }
        say("context %s", gpus[found->gpu].name);
    }
    found->retained++;
    unlock();
    *context = found;
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    START("cuDevicePrimaryCtxRelease_v2");
    if (!gpu_at(device)) return INVALID_DEVICE;
    Context *found = &contexts[visible[device]];
    if (!found->retained) violation("cuDevicePrimaryCtxRelease of a context that is not held");
    if (found->retained == 1 && !freeing_failed)
        for (int i = 0; i < memory_count; i++)
            if (memories[i].gpu == found->gpu && memories[i].base) violation("a context was released that still has memory");
    found->retained--;
    if (!found->retained) say("released %s", gpus[found->gpu].name);
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    START("cuDevicePrimaryCtxGetState");
    if (!gpu_at(device)) return INVALID_DEVICE;
    *flags = 0;
    *active = contexts[visible[device]].retained > 0;
    return SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
    START("cuCtxPushCurrent_v2");
    if (!context || depth == 64) return INVALID_CONTEXT;
    if (!context->retained) violation("cuCtxPushCurrent of a context that was released");
    stack[depth++] = context;
    return SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    START("cuCtxPopCurrent_v2");
    if (!depth) violation("cuCtxPopCurrent without a context");
    depth--;
    if (context) *context = stack[depth];
    return SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
    START("cuCtxGetCurrent");
    *context = depth ? stack[depth - 1] : NULL;
    return SUCCESS;
}
CUresult cuCtxSynchronize(void) { CURRENT("cuCtxSynchronize"); return SUCCESS; }

/* Memory */

static void poison(int fd, size_t size, int with) {
    void *all = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (all != MAP_FAILED) { memset(all, with, size); munmap(all, size); }
}

/* Bytes in use on a GPU. The memory of processes that died becomes garbage here, at the latest. With the lock held. */
static size_t used(int gpu) {
    size_t sum = 0;
    DIR *entries = opendir(folder);
    struct dirent *entry;
    while (entries && (entry = readdir(entries))) {
        int of, pid, number;
        char path[800];
        struct stat status;
        if (sscanf(entry->d_name, "alloc.%d.%d.%d", &of, &pid, &number) != 3 || of != gpu) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &status)) continue;
        if (pid != getpid() && !flock(fd, LOCK_SH | LOCK_NB)) {
            poison(fd, status.st_size, POISON_DEAD);
            unlink(path);
            say("died %s", entry->d_name);
        } else sum += status.st_size;
        close(fd);
    }
    if (entries) closedir(entries);
    return sum;
}

static Memory *memory_at(CUdeviceptr at) {
    for (int i = 0; i < memory_count; i++)
        if (memories[i].base && at >= memories[i].base && at < memories[i].base + memories[i].size) return &memories[i];
    return NULL;
}
static Memory *free_row(void) {
    for (int i = 0; i < memory_count; i++) if (!memories[i].base) return &memories[i];
    return memory_count < MOST ? &memories[memory_count++] : NULL;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    CURRENT("cuMemGetInfo_v2");
    lock();
    size_t busy = used(here->gpu);
    unlock();
    *total = gpus[here->gpu].bytes;
    *free_bytes = busy < *total ? *total - busy : 0;
    return SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size) {
    CURRENT("cuMemAlloc_v2");
    if (!size) return INVALID_VALUE;
    lock();
    Memory *row = NULL;
    CUresult code = used(here->gpu) + size > gpus[here->gpu].bytes || !(row = free_row()) ? OUT_OF_MEMORY : SUCCESS;
    if (code == SUCCESS) {
        char path[600];
        snprintf(row->file, sizeof row->file, "alloc.%d.%d.%d", here->gpu, getpid(), ++serial);
        snprintf(path, sizeof path, "%s/%s", folder, row->file);
        row->fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        void *base = MAP_FAILED;
        if (row->fd >= 0 && !ftruncate(row->fd, size) && !flock(row->fd, LOCK_EX))
            base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, row->fd, 0);
        if (base == MAP_FAILED) code = UNKNOWN;
        else {
            memset(base, 0xCC, size); /* device memory is not zeroed */
            row->base = (CUdeviceptr)base; row->size = size; row->gpu = here->gpu; row->imported = 0;
            *pointer = row->base;
            say("alloc %s %zu", gpus[here->gpu].name, size);
        }
    }
    unlock();
    return code;
}
CUresult cuMemFree_v2(CUdeviceptr pointer) {
    freeing_may_fail("cuMemFree_v2");
    CURRENT("cuMemFree_v2");
    lock();
    Memory *row = memory_at(pointer);
    if (!row || row->base != pointer || row->imported) violation("cuMemFree of what is not allocated: a double free?");
    struct flock importers = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1, .l_len = 1};
    fcntl(row->fd, F_OFD_GETLK, &importers);
    if (importers.l_type != F_UNLCK) violation("cuMemFree of memory that another process has imported");
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder, row->file);
    memset((void *)row->base, POISON_FREED, row->size);
    unlink(path);
    munmap((void *)row->base, row->size);
    close(row->fd);
    say("free %s %zu", gpus[row->gpu].name, row->size);
    row->base = 0;
    unlock();
    return SUCCESS;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    CURRENT("cuMemGetAddressRange_v2");
    Memory *row = memory_at(pointer);
    if (!row) return NOT_FOUND;
    if (base) *base = row->base;
    if (size) *size = row->size;
    return SUCCESS;
}

/* Pinned memory */

static int is_pinned(const void *at, size_t size) {
    for (int i = 0; i < pinned_count; i++)
        if (pinned[i].base && (char *)at >= pinned[i].base && (char *)at + size <= pinned[i].base + pinned[i].size) return 1;
    return 0;
}
static Pinned *pinned_row(void) {
    for (int i = 0; i < pinned_count; i++) if (!pinned[i].base) return &pinned[i];
    return pinned_count < MOST ? &pinned[pinned_count++] : NULL;
}
static int writable(const char *at) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[1024], mode[8];
    unsigned long begin, end;
    int found = 0;
    while (maps && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %7s", &begin, &end, mode) == 3 && (unsigned long)at >= begin && (unsigned long)at < end)
            found = mode[1] == 'w';
    if (maps) fclose(maps);
    return found;
}
CUresult cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
    CURRENT("cuMemHostRegister_v2");
    if ((uintptr_t)at % 4096 || size % 4096) return INVALID_VALUE;
    if (flags & 8) { if (getenv("EMU_NO_READ_ONLY_REGISTER")) return NOT_SUPPORTED; }
    else if (!writable(at)) return INVALID_VALUE; /* pinning for writing what may not be written */
    pthread_mutex_lock(&mutex);
    if (is_pinned(at, 1)) { pthread_mutex_unlock(&mutex); return ALREADY_REGISTERED; }
    Pinned *row = pinned_row();
    row->base = at; row->size = size; row->allocated = 0;
    pthread_mutex_unlock(&mutex);
    say("register %zu", size);
    return SUCCESS;
}
CUresult cuMemHostUnregister(void *at) {
    CURRENT("cuMemHostUnregister");
    for (int i = 0; i < pinned_count; i++)
        if (pinned[i].base == at && !pinned[i].allocated) { pinned[i].base = NULL; return SUCCESS; }
    violation("cuMemHostUnregister of what is not registered");
    return NOT_REGISTERED;
}
CUresult cuMemHostAlloc(void **at, size_t size, unsigned flags) {
    CURRENT("cuMemHostAlloc");
    (void)flags;
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return OUT_OF_MEMORY;
    pthread_mutex_lock(&mutex);
    Pinned *row = pinned_row();
    row->base = base; row->size = size; row->allocated = 1;
    pthread_mutex_unlock(&mutex);
    *at = base;
    return SUCCESS;
}
CUresult cuMemFreeHost(void *at) {
    CURRENT("cuMemFreeHost");
    for (int i = 0; i < pinned_count; i++)
        if (pinned[i].base == at && pinned[i].allocated) {
            munmap(at, pinned[i].size);
            pinned[i].base = NULL;
            return SUCCESS;
        }
    violation("cuMemFreeHost of what is not allocated");
    return INVALID_VALUE;
}

/* Copies and streams */

static void check_range(CUdeviceptr at, size_t size, int gpu, const char *what) {
    Memory *row = memory_at(at);
    if (!row || at + size > row->base + row->size) violation(what);
    if (row->gpu != gpu) violation("a copy in the context of another GPU");
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
    CURRENT("cuMemcpyHtoD_v2");
    check_range(to, size, here->gpu, "cuMemcpyHtoD beyond what is allocated");
    memcpy((void *)to, from, size);
    return SUCCESS;
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    CURRENT("cuMemcpyDtoH_v2");
    check_range(from, size, here->gpu, "cuMemcpyDtoH beyond what is allocated");
    memcpy(to, (void *)from, size);
    return SUCCESS;
}
CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    CURRENT("cuStreamCreate");
    (void)flags;
    *stream = calloc(1, sizeof(Stream));
    (*stream)->context = here;
    __sync_fetch_and_add(&stream_count, 1);
    return SUCCESS;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    CURRENT("cuMemcpyHtoDAsync_v2");
    check_range(to, size, here->gpu, "cuMemcpyHtoDAsync beyond what is allocated");
    if (!is_pinned(from, size)) violation("cuMemcpyHtoDAsync from memory that is not pinned");
    if (stream->count == stream->room)
        stream->copies = realloc(stream->copies, (stream->room = stream->room * 2 + 16) * sizeof(Copy));
    stream->copies[stream->count++] = (Copy){(void *)to, from, size};
    return SUCCESS;
}
CUresult cuStreamSynchronize(CUstream stream) {
    CURRENT("cuStreamSynchronize");
    for (int i = 0; i < stream->count; i++) memcpy(stream->copies[i].to, stream->copies[i].from, stream->copies[i].size);
    stream->count = 0;
    return SUCCESS;
}
CUresult cuStreamDestroy_v2(CUstream stream) {
    CURRENT("cuStreamDestroy_v2");
    int failing = getenv("EMU_FAIL") && strstr(getenv("EMU_FAIL"), "cuStreamSynchronize"); /* who could not wait may give up */
    if (stream->count && !failing) violation("cuStreamDestroy of a stream with copies that nobody has waited for");
    free(stream->copies);
    free(stream);
    __sync_fetch_and_sub(&stream_count, 1);
    return SUCCESS;
}

/* Sharing between processes */

typedef struct { char magic[8], file[32]; int gpu, pid; uint64_t space; } Handle;

static uint64_t pid_space(void) {
    struct stat status;
    if (getenv("EMU_PIDNS")) return strtoull(getenv("EMU_PIDNS"), NULL, 10);
    return stat("/proc/self/ns/pid", &status) ? 0 : status.st_ino;
}
CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr pointer) {
    CURRENT("cuIpcGetMemHandle");
    if (getenv("EMU_NO_IPC")) return NOT_SUPPORTED;
    Memory *row = memory_at(pointer);
    if (!row || row->imported) violation("cuIpcGetMemHandle of what this process has not allocated");
    Handle handle = {.magic = "EMUIPC1", .gpu = row->gpu, .pid = getpid(), .space = pid_space()};
    memcpy(handle.file, row->file, sizeof handle.file);
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    say("export %s", row->file);
    return SUCCESS;
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle in, unsigned flags) {
    CURRENT("cuIpcOpenMemHandle_v2");
    Handle handle;
    memcpy(&handle, &in, sizeof handle);
    if (flags != 1 || memcmp(handle.magic, "EMUIPC1", 8)) return INVALID_VALUE;
    if (handle.space != pid_space() || handle.pid == getpid()) return INVALID_CONTEXT;
    if (handle.gpu != here->gpu) return INVALID_VALUE;
    CUresult code = SUCCESS;
    lock();
    for (int i = 0; i < memory_count; i++)
        if (memories[i].base && memories[i].imported && !strcmp(memories[i].file, handle.file)) {
            memories[i].imported++;
            *pointer = memories[i].base;
            say("open %s again", handle.file);
            unlock();
            return SUCCESS;
        }
    used(here->gpu); /* clears up after the dead */
    char path[600];
    struct stat status;
    snprintf(path, sizeof path, "%s/%s", folder, handle.file);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct flock lease = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = 1, .l_len = 1};
    Memory *row = free_row();
    void *base = MAP_FAILED;
    if (fd < 0) code = INVALID_HANDLE;
    else if (!fstat(fd, &status) && !fcntl(fd, F_OFD_SETLK, &lease))
        base = mmap(NULL, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0 && base == MAP_FAILED) { close(fd); code = MAP_FAILED_; }
    if (code == SUCCESS) {
        *row = (Memory){.base = (CUdeviceptr)base, .size = status.st_size, .gpu = handle.gpu, .fd = fd, .imported = 1};
        snprintf(row->file, sizeof row->file, "%s", handle.file);
        *pointer = row->base;
        say("open %s", handle.file);
    }
    unlock();
    return code;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    freeing_may_fail("cuIpcCloseMemHandle");
    CURRENT("cuIpcCloseMemHandle");
    lock();
    Memory *row = memory_at(pointer);
    if (!row || row->base != pointer || !row->imported) violation("cuIpcCloseMemHandle of what is not open");
    if (row->gpu != here->gpu) violation("cuIpcCloseMemHandle in the context of another GPU");
    if (!--row->imported) {
        munmap((void *)row->base, row->size);
        close(row->fd);
        say("close %s", row->file);
        row->base = 0;
    }
    unlock();
    return SUCCESS;
}

/* How cuda-bindings looks calls up: by the name without its version, of which the newest is meant. */
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    char newest[128];
    (void)version; (void)flags;
    snprintf(newest, sizeof newest, "%s_v2", symbol);
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = self ? dlsym(self, newest) : NULL;
    if (self && !*function) *function = dlsym(self, symbol);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

__attribute__((destructor)) static void at_exit(void) {
    if (owner != getpid()) return;
    for (int i = 0; i < memory_count; i++)
        if (memories[i].base) say("leak %s %s", memories[i].imported ? "import" : "memory", memories[i].file);
    for (int i = 0; i < pinned_count; i++) if (pinned[i].base) say("leak pinned %zu", pinned[i].size);
    for (int i = 0; i < machine; i++) if (contexts[i].retained) say("leak context %s", gpus[i].name);
    if (stream_count) say("leak %d streams", stream_count);
}
