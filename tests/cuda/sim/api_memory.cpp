// Memory of devices, and pinned memory of the host.

#include "call.h"
#include "memory.h"

using namespace sim;

namespace {

// Memory whose first byte is at an address; null and a fault if there is none that may be freed.
Memory to_free(const char *function, std::uintptr_t address, bool device) {
    const Memory memory = memory_at(address);
    const char *what = !memory || memory->base != address             ? " is no address that was allocated"
                       : !memory->live || memory->free_enqueued         ? " is freed twice"
                       : memory->on_device() != device                 ? " is not such memory"
                                                                       : nullptr;
    if (!what) return memory;
    fault(std::string(function) + ": " + hex(address) + what);
    return nullptr;
}

}  // namespace

SIM_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, std::size_t bytes) {
    return call("cuMemAlloc_v2", Needs::context, [&](Lock &) {
        if (const CUresult code = unsafe_in_capture()) return code;
        if (!address || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
        Memory made;
        if (const CUresult code = allocate(current(), Kind::plain, bytes, &made)) return code;
        *address = made->base;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    return call("cuMemFree_v2", Needs::context, [&](Lock &lock) {
        if (const CUresult code = unsafe_in_capture()) return code;
        if (!address) return CUDA_SUCCESS;
        const Memory memory = to_free("cuMemFree_v2", address, true);
        if (!memory) return CUDA_ERROR_INVALID_VALUE;
        memory->free_enqueued = true;
        count_host_wait("cuMemFree_v2");
        const CUresult code = wait_for_all(lock, memory->context);
        release(memory);
        return code;
    });
}

SIM_EXPORT CUresult cuMemAllocAsync(CUdeviceptr *address, std::size_t bytes, void *handle) {
    return call("cuMemAllocAsync", Needs::context, [&](Lock &) {
        Stream *stream;
        if (const CUresult code = find_stream("cuMemAllocAsync", handle, &stream)) return code;
        if (!address || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
        if (stream->capture) return CUDA_ERROR_NOT_SUPPORTED;
        Memory made;
        if (const CUresult code = allocate(stream->context, Kind::ordered, bytes, &made)) return code;
        made->born = false;
        *address = made->base;
        Work work = operation("cuMemAllocAsync", stream);
        work->place = [made] { made->born = true; };
        return enqueue(work);
    });
}

SIM_EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, void *handle) {
    return call("cuMemFreeAsync", Needs::context, [&](Lock &) {
        Stream *stream;
        if (const CUresult code = find_stream("cuMemFreeAsync", handle, &stream)) return code;
        if (stream->capture) return CUDA_ERROR_NOT_SUPPORTED;
        if (!address) return CUDA_SUCCESS;
        const Memory memory = to_free("cuMemFreeAsync", address, true);
        if (!memory) return CUDA_ERROR_INVALID_VALUE;
        memory->free_enqueued = true;
        Work work = operation("cuMemFreeAsync", stream);
        work->place = [memory] {
            if (memory->users)
                fault("cuMemFreeAsync: " + hex(memory->base) + " is freed before work that uses it has ended");
            release(memory);
        };
        return enqueue(work);
    });
}

SIM_EXPORT CUresult cuMemHostAlloc(void **address, std::size_t bytes, unsigned flags) {
    return call("cuMemHostAlloc", Needs::context, [&](Lock &) {
        if (const CUresult code = unsafe_in_capture()) return code;
        if (!address || bytes == 0 || flags > 7) return CUDA_ERROR_INVALID_VALUE;
        Memory made;
        if (const CUresult code = allocate(current(), Kind::pinned, bytes, &made)) return code;
        *address = reinterpret_cast<void *>(made->base);
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuMemFreeHost(void *address) {
    return call("cuMemFreeHost", Needs::context, [&](Lock &lock) {
        if (const CUresult code = unsafe_in_capture()) return code;
        const Memory memory = to_free("cuMemFreeHost", reinterpret_cast<std::uintptr_t>(address), false);
        if (!memory) return CUDA_ERROR_INVALID_VALUE;
        CUresult code = CUDA_SUCCESS;
        if (memory->users) {
            fault("cuMemFreeHost: " + hex(memory->base) + " is still used by enqueued work");
            count_host_wait("cuMemFreeHost");
            code = wait_for_all(lock, memory->context);
        }
        release(memory);
        return code;
    });
}

SIM_EXPORT CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **data, CUdeviceptr address) {
    return call("cuPointerGetAttributes", Needs::context, [&](Lock &) {
        if (!attributes || !data) return CUDA_ERROR_INVALID_VALUE;
        const Memory memory = memory_at(address);
        // What is not known of an address is 0, and no error.
        for (unsigned at = 0; at < count; ++at) {
            unsigned answer = 0;
            if (memory && memory->live && attributes[at] == 2)  // memory type
                answer = memory->on_device() ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            if (memory && memory->live && attributes[at] == 9)  // ordinal
                answer = static_cast<unsigned>(memory->context->device);
            if (attributes[at] != 2 && attributes[at] != 8 && attributes[at] != 9) return CUDA_ERROR_NOT_SUPPORTED;
            *static_cast<unsigned *>(data[at]) = answer;
        }
        return CUDA_SUCCESS;
    });
}
