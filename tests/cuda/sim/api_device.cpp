// Devices, their attributes, and contexts.

#include <cstdio>
#include <cstring>
#include <map>

#include "call.h"

using namespace sim;

namespace {

// The compute capability of the pretended devices.
constexpr int MAJOR = 9, MINOR = 0;

// Attributes that are not 0, by CUdevice_attribute's number.
const std::map<int, int> &attributes() {
    static const auto *map = new std::map<int, int>{
        {1, 1024},        // threads per block
        {2, 1024},        // block x
        {3, 1024},        // block y
        {4, 64},          // block z
        {5, 2147483647},  // grid x
        {6, 65535},       // grid y
        {7, 65535},       // grid z
        {8, 49152},       // shared memory per block
        {9, 65536},       // constant memory
        {10, 32},         // warp
        {11, 2147483647}, // pitch
        {12, 65536},      // registers per block
        {13, 1980000},    // clock, kHz
        {14, 512},        // texture alignment
        {15, 1},          // copies overlap kernels
        {16, 4},          // multiprocessors: few, so that grid-stride loops have more than one round
        {19, 1},          // maps host memory
        {31, 1},          // concurrent kernels
        {32, 1},          // ECC
        {33, 1},          // PCI bus
        {36, 2619000},    // memory clock, kHz
        {37, 6144},       // memory bus, bits
        {38, 52428800},   // L2 cache
        {39, 2048},       // threads per multiprocessor
        {40, 3},          // asynchronous copy engines
        {41, 1},          // unified addressing
        {75, MAJOR},      // compute capability
        {76, MINOR},      //
        {78, 1},          // stream priorities
        {81, 233472},     // shared memory per multiprocessor
        {82, 65536},      // registers per multiprocessor
        {90, 1},          // compute preemption
        {95, 1},          // cooperative launch
        {97, 232448},     // shared memory per block, if asked for
        {99, 1},          // host memory can be registered
        {106, 32},        // blocks per multiprocessor
        {111, 1024},      // reserved shared memory per block
        {115, 1},         // memory pools
        {125, 1},         // inter-process events
    };
    return *map;
}

// Runs a body with the context of a device.
template <class Body>
CUresult with_device(const char *function, CUdevice device, Body body) {
    return call(function, Needs::driver, [&](Lock &lock) {
        Context *context = context_of(device);
        return context ? body(lock, context) : CUDA_ERROR_INVALID_DEVICE;
    });
}

CUresult uuid(const char *function, CUuuid *id, CUdevice device) {
    return with_device(function, device, [&](Lock &, Context *) {
        if (!id) return CUDA_ERROR_INVALID_VALUE;
        std::memcpy(id->bytes, "pretended GPU  ", 15);
        id->bytes[15] = static_cast<char>(device);
        return CUDA_SUCCESS;
    });
}

}  // namespace

SIM_EXPORT CUresult cuDeviceGetCount(int *count) {
    return call("cuDeviceGetCount", Needs::driver, [&](Lock &) {
        if (!count) return CUDA_ERROR_INVALID_VALUE;
        *count = static_cast<int>(state().contexts.size());
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    return with_device("cuDeviceGet", ordinal, [&](Lock &, Context *) {
        if (!device) return CUDA_ERROR_INVALID_VALUE;
        *device = ordinal;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    return with_device("cuDeviceGetName", device, [&](Lock &, Context *) {
        if (!name || size <= 0) return CUDA_ERROR_INVALID_VALUE;
        std::snprintf(name, static_cast<std::size_t>(size), "Pretended GPU");
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    return with_device("cuDeviceGetAttribute", device, [&](Lock &, Context *) {
        if (!value || attribute < 1 || attribute > 150) return CUDA_ERROR_INVALID_VALUE;
        const auto found = attributes().find(attribute);
        *value = found == attributes().end() ? 0 : found->second;
        if (attribute == 34) *value = device;  // PCI device
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuDeviceTotalMem_v2(std::size_t *bytes, CUdevice device) {
    return with_device("cuDeviceTotalMem_v2", device, [&](Lock &, Context *context) {
        if (!bytes) return CUDA_ERROR_INVALID_VALUE;
        *bytes = context->memory_limit;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuDeviceGetUuid(CUuuid *id, CUdevice device) { return uuid("cuDeviceGetUuid", id, device); }

SIM_EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *id, CUdevice device) { return uuid("cuDeviceGetUuid_v2", id, device); }

SIM_EXPORT CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device) {
    return with_device("cuDeviceGetPCIBusId", device, [&](Lock &, Context *) {
        if (!text || size <= 0) return CUDA_ERROR_INVALID_VALUE;
        std::snprintf(text, static_cast<std::size_t>(size), "0000:01:%02x.0", device);
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    return with_device("cuDeviceCanAccessPeer", device, [&](Lock &, Context *) {
        if (!can) return CUDA_ERROR_INVALID_VALUE;
        if (!context_of(peer)) return CUDA_ERROR_INVALID_DEVICE;
        *can = device != peer && number_from_environment("BAGUA_SIM_PEER", 1);
        return CUDA_SUCCESS;
    });
}

// --- primary contexts -----------------------------------------------------------------------------------------------

SIM_EXPORT CUresult cuDevicePrimaryCtxRetain(void **made, CUdevice device) {
    return with_device("cuDevicePrimaryCtxRetain", device, [&](Lock &, Context *context) {
        if (!made) return CUDA_ERROR_INVALID_VALUE;
        ++context->retained;
        *made = context;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return with_device("cuDevicePrimaryCtxRelease_v2", device, [&](Lock &lock, Context *context) {
        if (context->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
        if (context->retained > 1) {
            --context->retained;
        } else {
            count_host_wait("cuDevicePrimaryCtxRelease_v2");
            end_context(lock, context);
        }
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    return with_device("cuDevicePrimaryCtxReset_v2", device, [&](Lock &lock, Context *context) {
        count_host_wait("cuDevicePrimaryCtxReset_v2");
        end_context(lock, context);
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    return with_device("cuDevicePrimaryCtxGetState", device, [&](Lock &, Context *context) {
        if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
        *flags = context->flags;
        *active = context->retained > 0;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
    return with_device("cuDevicePrimaryCtxSetFlags_v2", device, [&](Lock &, Context *context) {
        context->flags = flags;
        return CUDA_SUCCESS;
    });
}

// --- the thread's contexts ------------------------------------------------------------------------------------------

SIM_EXPORT CUresult cuCtxGetCurrent(void **context) {
    return call("cuCtxGetCurrent", Needs::driver, [&](Lock &) {
        if (!context) return CUDA_ERROR_INVALID_VALUE;
        *context = current();
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuCtxSetCurrent(void *context) {
    return call("cuCtxSetCurrent", Needs::driver, [&](Lock &) {
        if (context && !is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
        auto &stack = context_stack();
        if (!stack.empty()) stack.pop_back();
        if (context) stack.push_back(static_cast<Context *>(context));
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuCtxPushCurrent_v2(void *context) {
    return call("cuCtxPushCurrent_v2", Needs::driver, [&](Lock &) {
        if (!is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
        context_stack().push_back(static_cast<Context *>(context));
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuCtxPopCurrent_v2(void **context) {
    return call("cuCtxPopCurrent_v2", Needs::driver, [&](Lock &) {
        if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
        if (context) *context = current();
        context_stack().pop_back();
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    return call("cuCtxGetDevice", Needs::driver, [&](Lock &) {
        if (!device) return CUDA_ERROR_INVALID_VALUE;
        if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
        *device = current()->device;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuCtxGetFlags(unsigned *flags) {
    return call("cuCtxGetFlags", Needs::context, [&](Lock &) {
        if (!flags) return CUDA_ERROR_INVALID_VALUE;
        *flags = current()->flags;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuCtxGetApiVersion(void *context, unsigned *version) {
    return call("cuCtxGetApiVersion", Needs::driver, [&](Lock &) {
        if (!version) return CUDA_ERROR_INVALID_VALUE;
        if (context ? !is_context(context) : !current()) return CUDA_ERROR_INVALID_CONTEXT;
        *version = 3020;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuCtxSynchronize() {
    return call("cuCtxSynchronize", Needs::context, [&](Lock &lock) {
        if (const CUresult code = unsafe_in_capture(current())) return code;
        count_host_wait("cuCtxSynchronize");
        return wait_for_all(lock, current());
    });
}

SIM_EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    return call("cuCtxGetStreamPriorityRange", Needs::context, [&](Lock &) {
        if (least) *least = 0;
        if (greatest) *greatest = -5;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuCtxEnablePeerAccess(void *peer, unsigned flags) {
    return call("cuCtxEnablePeerAccess", Needs::context, [&](Lock &) {
        if (flags) return CUDA_ERROR_INVALID_VALUE;
        if (!is_context(peer) || peer == current()) return CUDA_ERROR_INVALID_CONTEXT;
        if (!number_from_environment("BAGUA_SIM_PEER", 1)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
        return current()->peers.insert(static_cast<Context *>(peer)).second ? CUDA_SUCCESS
                                                                            : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    });
}

SIM_EXPORT CUresult cuCtxDisablePeerAccess(void *peer) {
    return call("cuCtxDisablePeerAccess", Needs::context, [&](Lock &) {
        return current()->peers.erase(static_cast<Context *>(peer)) ? CUDA_SUCCESS
                                                                    : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    });
}
