// Devices, their attributes, and contexts.

#include <cstdio>
#include <cstring>

#include "call.h"

using namespace sim;

namespace {

// Runs a body with the context of a device.
template <class Body>
CUresult with_device(const char *function, CUdevice device, Body body) {
    return call(function, Needs::driver, [&](Lock &lock) {
        Context *context = context_of(device);
        return context ? body(lock, context) : CUDA_ERROR_INVALID_DEVICE;
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
        if (!value) return CUDA_ERROR_INVALID_VALUE;
        switch (attribute) {
            case 16: *value = 4; break;  // multiprocessors: few, so that grid-stride loops have more than one round
            case 75: *value = 9; break;  // compute capability
            case 76: *value = 0; break;
            default: return CUDA_ERROR_NOT_SUPPORTED;
        }
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuDeviceTotalMem_v2(std::size_t *bytes, CUdevice device) {
    return with_device("cuDeviceTotalMem_v2", device, [&](Lock &, Context *) {
        if (!bytes) return CUDA_ERROR_INVALID_VALUE;
        *bytes = std::size_t{8} << 30;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *id, CUdevice device) {
    return with_device("cuDeviceGetUuid_v2", device, [&](Lock &, Context *) {
        if (!id) return CUDA_ERROR_INVALID_VALUE;
        std::memcpy(id->bytes, "pretended GPU  ", 15);
        id->bytes[15] = static_cast<char>(device);
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

