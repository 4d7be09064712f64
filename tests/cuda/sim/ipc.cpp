// Memory and events of other processes.

#include "ipc.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "call.h"

using namespace sim;

namespace {

// What a handle's 64 bytes hold.
struct Shared {
    char what[8];                // "sim-mem" or "sim-evt"
    int process;                 // who owns it
    int fd;                      // the owner's memfd
    unsigned long long inode;    // of the memfd: a number is used again for other files
    unsigned long long bytes;    // of memory
    unsigned flags;              // of an event
    int device;                  // the owner's device
};
static_assert(sizeof(Shared) <= sizeof(CUipcHandle));

CUipcHandle handle_of(const char *what, int fd, unsigned long long bytes, unsigned flags, int device) {
    struct stat status {};
    fstat(fd, &status);
    Shared shared{};
    std::memcpy(shared.what, what, std::strlen(what));
    shared.process = getpid();
    shared.fd = fd;
    shared.inode = status.st_ino;
    shared.bytes = bytes;
    shared.flags = flags;
    shared.device = device;
    CUipcHandle handle{};
    std::memcpy(handle.reserved, &shared, sizeof shared);
    return handle;
}

// Opens the memfd that a handle names; -1 if its owner has it no longer.
int open_handle(const CUipcHandle &handle, const char *what, Shared *shared) {
    std::memcpy(shared, handle.reserved, sizeof *shared);
    if (std::strncmp(shared->what, what, sizeof shared->what)) return -1;
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", shared->process, shared->fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat status {};
    if (fd < 0) return -1;
    if (fstat(fd, &status) || status.st_ino != shared->inode) {
        close(fd);
        return -1;
    }
    return fd;
}

EventPage map_page(int fd) {
    void *at = mmap(nullptr, sizeof(SharedEvent), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return nullptr;
    return {static_cast<SharedEvent *>(at), [](SharedEvent *page) { munmap(page, sizeof *page); }};
}

}  // namespace

CUresult sim::share(Event *event) {
    event->fd = memfd_create("sim-event", MFD_CLOEXEC);
    if (event->fd < 0 || ftruncate(event->fd, sizeof(SharedEvent))) return CUDA_ERROR_OUT_OF_MEMORY;
    event->page = map_page(event->fd);
    return event->page ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

SIM_EXPORT CUresult cuIpcGetMemHandle(CUipcHandle *handle, CUdeviceptr address) {
    return call("cuIpcGetMemHandle", Needs::context, [&](Lock &) {
        const Memory memory = memory_at(address);
        if (!handle || !memory || !memory->live || memory->free_enqueued) return CUDA_ERROR_INVALID_VALUE;
        if (memory->kind != Kind::plain) return CUDA_ERROR_INVALID_VALUE;
        if (memory->base != address) {
            fault("cuIpcGetMemHandle: " + hex(address) + " is not the first address of its memory");
            return CUDA_ERROR_INVALID_VALUE;
        }
        *handle = handle_of("sim-mem", memory->fd, memory->bytes, 0, memory->context->device);
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcHandle handle, unsigned flags) {
    return call("cuIpcOpenMemHandle_v2", Needs::context, [&](Lock &) {
        if (const CUresult code = unsafe_in_capture()) return code;
        // The one flag lets a device reach the memory of its peer when that is needed.
        if (!address || flags != 1) return CUDA_ERROR_INVALID_VALUE;
        for (const auto &memory : all_memory()) {
            if (memory->kind != Kind::imported || std::memcmp(&memory->handle, &handle, sizeof handle)) continue;
            if (memory->context != current()) return CUDA_ERROR_ALREADY_MAPPED;
            ++memory->opened;
            *address = memory->base;
            return CUDA_SUCCESS;
        }
        Shared shared;
        std::memcpy(&shared, handle.reserved, sizeof shared);
        if (shared.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
        if (shared.device != current()->device && !number_from_environment("BAGUA_SIM_PEER", 1))
            return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
        const int fd = open_handle(handle, "sim-mem", &shared);
        if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
        Memory made;
        if (const CUresult code = import(current(), fd, shared.bytes, &made)) return code;
        made->handle = handle;
        *address = made->base;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    return call("cuIpcCloseMemHandle", Needs::context, [&](Lock &) {
        if (const CUresult code = unsafe_in_capture()) return code;
        const Memory memory = memory_at(address);
        if (!memory || memory->base != address || memory->kind != Kind::imported || !memory->live) {
            fault("cuIpcCloseMemHandle: " + hex(address) + " is no memory that was opened, or was closed");
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (--memory->opened) return CUDA_SUCCESS;
        if (memory->users) fault("cuIpcCloseMemHandle: " + hex(address) + " is still used by enqueued work");
        release(memory);
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuIpcGetEventHandle(CUipcHandle *handle, void *event_handle) {
    return call("cuIpcGetEventHandle", Needs::context, [&](Lock &) {
        auto *event = static_cast<Event *>(event_handle);
        if (!handle) return CUDA_ERROR_INVALID_VALUE;
        if (!state().events.count(event)) return CUDA_ERROR_INVALID_HANDLE;
        if (!event->page) return CUDA_ERROR_INVALID_HANDLE;
        *handle = handle_of("sim-evt", event->fd, 0, event->flags, event->context->device);
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuIpcOpenEventHandle(void **made, CUipcHandle handle) {
    return call("cuIpcOpenEventHandle", Needs::context, [&](Lock &) {
        Shared shared;
        std::memcpy(&shared, handle.reserved, sizeof shared);
        if (!made) return CUDA_ERROR_INVALID_VALUE;
        if (shared.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
        const int fd = open_handle(handle, "sim-evt", &shared);
        if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
        auto *event = new Event;
        event->context = current();
        event->flags = shared.flags;
        event->fd = fd;
        event->page = map_page(fd);
        if (!event->page) return CUDA_ERROR_MAP_FAILED;
        state().events.insert(event);
        *made = event;
        return CUDA_SUCCESS;
    });
}
