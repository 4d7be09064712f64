// A CUDA driver that is only pretended, for tests on machines without a GPU: libcuda.so.1 by name and by symbols.
//
// It forgives nothing. Device memory has no access rights for the host and begins as NaNs; its addresses are never
// used twice; bounds and lifetimes are checked, at the call and again when the work runs. A stream is a thread
// ("sim-stream") and its work begins as late as it may: when a host wait, a poll, a host function or another stream
// that needs it asks for it, else after BAGUA_SIM_DELAY_US (100000).
//
//   BAGUA_SIM_DEVICES=n            pretended devices, 2 by default; 0: cuInit fails with CUDA_ERROR_NO_DEVICE
//   BAGUA_SIM_MEMORY=bytes         memory of each device, 8 GiB by default
//   BAGUA_SIM_PEER=0               devices cannot reach each other's memory
//   BAGUA_SIM_DELAY_US=n           see above
//   BAGUA_SIM_FAIL=function:nth:code,…   the nth call (from 1; *: each) fails with this code, and does nothing else
//   BAGUA_SIM_BREAK=way,…          the driver is wrong: no-wait (cuStreamWaitEvent does nothing), eager-free (memory
//                                  is freed although work uses it), short-copy (asynchronous copies lose their last
//                                  byte), short-kernel (the last block does not run)
//   BAGUA_SIM_KERNELS=file         the kernels, compiled for the host; by default libkernels.so beside this library
//   BAGUA_SIM_REPORT=PREFIX        writes PREFIX.<pid> at exit: calls, host waits, faults, and what leaked
//
// abi.h        the driver's types and numbers
// report.*     counts, faults, deliberate failures, the report
// context.*    devices, contexts, the one lock; call.h: what each exported function does first
// memory.*     allocations and the checks of addresses
// stream.*     streams, and when their work begins
// kernels.*    launches: the same kernels, compiled for the host; image.*: which kernels an image has
// names.cpp    names of errors
// library.h    what pretended libraries over the driver may ask (tests/cuda/nccl)
// api_*.cpp    the exported functions
//
// A fault is a mistake of the caller, in words. Where the true driver would notice it, the call fails as there; an
// operation that fails while it runs poisons its context (CUDA_ERROR_ILLEGAL_ADDRESS), as there.

#include <dlfcn.h>

#include <cstring>

#include "call.h"

using namespace sim;

namespace {

// The symbol that a name without version means: the newest one that this library has.
void *newest(const char *symbol) {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void *>(&newest), &info)) return nullptr;
    void *self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (!self) return nullptr;
    void *found = nullptr;
    for (const char *version : {"_v4", "_v3", "_v2", ""})
        if (!found) found = dlsym(self, (std::string(symbol) + version).c_str());
    dlclose(self);
    return found;
}

}  // namespace

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

SIM_EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *) {
    return call("cuGetExportTable", Needs::nothing, [&](Lock &) {
        if (table) *table = nullptr;
        return CUDA_ERROR_NOT_FOUND;
    });
}

SIM_EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, std::uint64_t flags,
                                        int *found) {
    return call("cuGetProcAddress_v2", Needs::nothing, [&](Lock &) {
        if (!symbol || !function || version < 12000) return CUDA_ERROR_INVALID_VALUE;
        // Flag 2 asks for the symbols whose default stream is the calling thread's: there are none.
        *function = flags & 2 ? nullptr : newest(symbol);
        if (found) *found = *function ? 0 : 1;
        return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
    });
}

SIM_EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, std::uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}

// For tests that find a mistake themselves: it goes into the report.
SIM_EXPORT CUresult simFault(const char *text) {
    return call("simFault", Needs::nothing, [&](Lock &) {
        fault(text);
        return CUDA_SUCCESS;
    });
}
