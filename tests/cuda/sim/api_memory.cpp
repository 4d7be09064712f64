// Memory of devices, and pinned memory of the host.

#include <unistd.h>

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
                       : memory->kind == Kind::registered              ? " was registered, not allocated"
                                                                       : nullptr;
    if (!what) return memory;
    fault(std::string(function) + ": " + hex(address) + what);
    return nullptr;
}

CUresult host_alloc(const char *function, void **address, std::size_t bytes, unsigned flags) {
    return call(function, Needs::context, [&](Lock &) {
        if (const CUresult code = unsafe_in_capture()) return code;
        if (!address || bytes == 0 || flags > 7) return CUDA_ERROR_INVALID_VALUE;
        Memory made;
        if (const CUresult code = allocate(current(), Kind::pinned, bytes, &made)) return code;
        made->flags = flags;
        *address = reinterpret_cast<void *>(made->base);
        return CUDA_SUCCESS;
    });
}

// Pinned memory goes: work that still uses it is a fault, and is waited for.
CUresult unpin(const char *function, Lock &lock, const Memory &memory) {
    if (memory->users)
        fault(std::string(function) + ": " + hex(memory->base) + " is still used by enqueued work");
    CUresult code = CUDA_SUCCESS;
    if (memory->users && !broken("eager-free")) {
        count_host_wait(function);
        code = wait_for_all(lock, memory->context);
    }
    release(memory);
    return code;
}

// One attribute of an address; success says whether there is one.
bool attribute_of(const Memory &memory, std::uintptr_t address, int attribute, void *data) {
    const auto put = [&](auto value) {
        *static_cast<decltype(value) *>(data) = value;
        return true;
    };
    switch (attribute) {
        case 1: return put(static_cast<void *>(memory->context));                              // context
        case 2: return put(memory->on_device() ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);  // memory type
        case 3: return put(static_cast<CUdeviceptr>(address));                                 // device pointer
        case 4: return !memory->on_device() && put(reinterpret_cast<void *>(address));         // host pointer
        case 6: return put(0u);                                                                // synchronous
        case 7: return put(memory->id);                                                        // buffer's number
        case 8: return put(0u);                                                                // managed
        case 9: return put(memory->context->device);                                           // ordinal
        case 10: return put(static_cast<unsigned char>(memory->kind == Kind::plain));          // can be shared
        case 11: return put(static_cast<CUdeviceptr>(memory->base));                           // its range
        case 12: return put(memory->bytes);                                                    //
        case 13: return put(static_cast<unsigned char>(1));                                    // mapped
        case 17: return put(static_cast<void *>(nullptr));                                     // memory pool
        default: return false;
    }
}

// How many bytes an attribute's answer has.
std::size_t size_of_attribute(int attribute) {
    switch (attribute) {
        case 2: case 6: case 8: case 9: return 4;
        case 10: case 13: return 1;
        default: return 8;
    }
}

}  // namespace

SIM_EXPORT CUresult cuMemGetInfo_v2(std::size_t *free_bytes, std::size_t *total) {
    return call("cuMemGetInfo_v2", Needs::context, [&](Lock &) {
        if (!free_bytes || !total) return CUDA_ERROR_INVALID_VALUE;
        *total = current()->memory_limit;
        *free_bytes = *total - bytes_in_use(current());
        return CUDA_SUCCESS;
    });
}

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
        CUresult code = CUDA_SUCCESS;
        if (!broken("eager-free")) {
            count_host_wait("cuMemFree_v2");
            code = wait_for_all(lock, memory->context);
        }
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
        if (broken("eager-free")) {
            release(memory);
            return CUDA_SUCCESS;
        }
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
    return host_alloc("cuMemHostAlloc", address, bytes, flags);
}

SIM_EXPORT CUresult cuMemAllocHost_v2(void **address, std::size_t bytes) {
    return host_alloc("cuMemAllocHost_v2", address, bytes, 0);
}

SIM_EXPORT CUresult cuMemFreeHost(void *address) {
    return call("cuMemFreeHost", Needs::context, [&](Lock &lock) {
        if (const CUresult code = unsafe_in_capture()) return code;
        const Memory memory = to_free("cuMemFreeHost", reinterpret_cast<std::uintptr_t>(address), false);
        return memory ? unpin("cuMemFreeHost", lock, memory) : CUDA_ERROR_INVALID_VALUE;
    });
}

SIM_EXPORT CUresult cuMemHostRegister_v2(void *address, std::size_t bytes, unsigned flags) {
    return call("cuMemHostRegister_v2", Needs::context, [&](Lock &) {
        if (const CUresult code = unsafe_in_capture()) return code;
        const auto base = reinterpret_cast<std::uintptr_t>(address);
        if (!base || bytes == 0 || flags > 15 || in_device_range(base)) return CUDA_ERROR_INVALID_VALUE;
        return enroll(current(), base, bytes, flags);
    });
}

SIM_EXPORT CUresult cuMemHostUnregister(void *address) {
    return call("cuMemHostUnregister", Needs::context, [&](Lock &lock) {
        if (const CUresult code = unsafe_in_capture()) return code;
        const Memory memory = memory_at(reinterpret_cast<std::uintptr_t>(address));
        if (!memory || memory->kind != Kind::registered || memory->base != reinterpret_cast<std::uintptr_t>(address))
            return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
        return unpin("cuMemHostUnregister", lock, memory);
    });
}

SIM_EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *address, unsigned flags) {
    return call("cuMemHostGetDevicePointer_v2", Needs::context, [&](Lock &) {
        const Memory memory = memory_at(reinterpret_cast<std::uintptr_t>(address));
        if (!device || flags || !memory || !memory->live || memory->on_device()) return CUDA_ERROR_INVALID_VALUE;
        *device = reinterpret_cast<CUdeviceptr>(address);
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuMemHostGetFlags(unsigned *flags, void *address) {
    return call("cuMemHostGetFlags", Needs::context, [&](Lock &) {
        const Memory memory = memory_at(reinterpret_cast<std::uintptr_t>(address));
        if (!flags || !memory || memory->kind != Kind::pinned || !memory->live) return CUDA_ERROR_INVALID_VALUE;
        *flags = memory->flags;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, std::size_t *bytes, CUdeviceptr address) {
    return call("cuMemGetAddressRange_v2", Needs::context, [&](Lock &) {
        const Memory memory = memory_at(address);
        if (!memory || !memory->live || memory->kind == Kind::registered) return CUDA_ERROR_NOT_FOUND;
        if (base) *base = memory->base;
        if (bytes) *bytes = memory->bytes;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
    return call("cuPointerGetAttribute", Needs::context, [&](Lock &) {
        const Memory memory = memory_at(address);
        if (!data || !memory || !memory->live) return CUDA_ERROR_INVALID_VALUE;
        return attribute_of(memory, address, attribute, data) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    });
}

SIM_EXPORT CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **data, CUdeviceptr address) {
    return call("cuPointerGetAttributes", Needs::context, [&](Lock &) {
        if (!attributes || !data) return CUDA_ERROR_INVALID_VALUE;
        const Memory memory = memory_at(address);
        // What is not known of an address is 0, and no error.
        for (unsigned at = 0; at < count; ++at) {
            const bool known = memory && memory->live && attribute_of(memory, address, attributes[at], data[at]);
            if (!known) __builtin_memset(data[at], 0, size_of_attribute(attributes[at]));
        }
        return CUDA_SUCCESS;
    });
}
