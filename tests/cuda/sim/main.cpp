// A CUDA driver that is only pretended, for tests on machines without a GPU: libcuda.so.1 by name and by symbols.
//
// It forgives nothing. Device memory has no access rights for the host and begins as NaNs; its addresses are never
// used twice; bounds and lifetimes are checked, at the call and again when the work runs. A stream is a thread
// ("sim-stream") and its work begins as late as it may: when a host wait, a poll, a host function or another stream
// that needs it asks for it, else after BAGUA_SIM_DELAY_US (100000).
//
//   BAGUA_SIM_DEVICES=n            pretended devices, 2 by default; 0: cuInit fails with CUDA_ERROR_NO_DEVICE
//   BAGUA_SIM_DELAY_US=n           see above
//   BAGUA_SIM_FAIL=function:nth:code,…   the nth call (from 1; *: each) fails with this code, and does nothing else
//   BAGUA_SIM_REPORT=PREFIX        writes PREFIX.<pid> at exit: calls, host waits, faults, and what leaked
//
// abi.h        the driver's types and numbers
// report.*     counts, faults, deliberate failures, the report
// context.*    devices, contexts, the one lock; call.h: what each exported function does first
// memory.*     allocations and the checks of addresses
// stream.*     streams, and when their work begins
// kernels.*    launches: the same kernels, compiled for the host
// library.h    what pretended libraries over the driver may ask (tests/cuda/nccl)
// api_*.cpp    the exported functions
//
// A fault is a mistake of the caller, in words. Where the true driver would notice it, the call fails as there; an
// operation that fails while it runs poisons its context (CUDA_ERROR_ILLEGAL_ADDRESS), as there.

#include "call.h"

using namespace sim;

SIM_EXPORT CUresult cuInit(unsigned flags) {
    return call("cuInit", Needs::nothing, [&](Lock &) { return flags ? CUDA_ERROR_INVALID_VALUE : initialize(); });
}

SIM_EXPORT CUresult cuDriverGetVersion(int *version) {
    return call("cuDriverGetVersion", Needs::nothing, [&](Lock &) {
        if (!version) return CUDA_ERROR_INVALID_VALUE;
        *version = 13000;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuGetErrorName(CUresult code, const char **text) {
    return call("cuGetErrorName", Needs::nothing, [&](Lock &) {
        switch (code) {
            case CUDA_ERROR_OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; break;
            case 999: *text = "CUDA_ERROR_UNKNOWN"; break;
            default: return CUDA_ERROR_INVALID_VALUE;
        }
        return CUDA_SUCCESS;
    });
}
