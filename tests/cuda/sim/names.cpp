// Names of errors, and a sentence about each.

#include <map>
#include <string>

#include "call.h"

using namespace sim;

namespace {

const std::map<CUresult, std::string> &names() {
    static const auto *map = new std::map<CUresult, std::string>{
        {0, "SUCCESS"},
        {1, "INVALID_VALUE"},
        {2, "OUT_OF_MEMORY"},
        {3, "NOT_INITIALIZED"},
        {4, "DEINITIALIZED"},
        {5, "PROFILER_DISABLED"},
        {34, "STUB_LIBRARY"},
        {46, "DEVICE_UNAVAILABLE"},
        {100, "NO_DEVICE"},
        {101, "INVALID_DEVICE"},
        {102, "DEVICE_NOT_LICENSED"},
        {200, "INVALID_IMAGE"},
        {201, "INVALID_CONTEXT"},
        {205, "MAP_FAILED"},
        {206, "UNMAP_FAILED"},
        {207, "ARRAY_IS_MAPPED"},
        {208, "ALREADY_MAPPED"},
        {209, "NO_BINARY_FOR_GPU"},
        {210, "ALREADY_ACQUIRED"},
        {211, "NOT_MAPPED"},
        {214, "ECC_UNCORRECTABLE"},
        {215, "UNSUPPORTED_LIMIT"},
        {216, "CONTEXT_ALREADY_IN_USE"},
        {217, "PEER_ACCESS_UNSUPPORTED"},
        {218, "INVALID_PTX"},
        {219, "INVALID_GRAPHICS_CONTEXT"},
        {220, "NVLINK_UNCORRECTABLE"},
        {221, "JIT_COMPILER_NOT_FOUND"},
        {222, "UNSUPPORTED_PTX_VERSION"},
        {223, "JIT_COMPILATION_DISABLED"},
        {224, "UNSUPPORTED_EXEC_AFFINITY"},
        {300, "INVALID_SOURCE"},
        {301, "FILE_NOT_FOUND"},
        {302, "SHARED_OBJECT_SYMBOL_NOT_FOUND"},
        {303, "SHARED_OBJECT_INIT_FAILED"},
        {304, "OPERATING_SYSTEM"},
        {400, "INVALID_HANDLE"},
        {401, "ILLEGAL_STATE"},
        {500, "NOT_FOUND"},
        {600, "NOT_READY"},
        {700, "ILLEGAL_ADDRESS"},
        {701, "LAUNCH_OUT_OF_RESOURCES"},
        {702, "LAUNCH_TIMEOUT"},
        {703, "LAUNCH_INCOMPATIBLE_TEXTURING"},
        {704, "PEER_ACCESS_ALREADY_ENABLED"},
        {705, "PEER_ACCESS_NOT_ENABLED"},
        {708, "PRIMARY_CONTEXT_ACTIVE"},
        {709, "CONTEXT_IS_DESTROYED"},
        {710, "ASSERT"},
        {711, "TOO_MANY_PEERS"},
        {712, "HOST_MEMORY_ALREADY_REGISTERED"},
        {713, "HOST_MEMORY_NOT_REGISTERED"},
        {714, "HARDWARE_STACK_ERROR"},
        {715, "ILLEGAL_INSTRUCTION"},
        {716, "MISALIGNED_ADDRESS"},
        {717, "INVALID_ADDRESS_SPACE"},
        {718, "INVALID_PC"},
        {719, "LAUNCH_FAILED"},
        {720, "COOPERATIVE_LAUNCH_TOO_LARGE"},
        {800, "NOT_PERMITTED"},
        {801, "NOT_SUPPORTED"},
        {802, "SYSTEM_NOT_READY"},
        {803, "SYSTEM_DRIVER_MISMATCH"},
        {804, "COMPAT_NOT_SUPPORTED_ON_DEVICE"},
        {900, "STREAM_CAPTURE_UNSUPPORTED"},
        {901, "STREAM_CAPTURE_INVALIDATED"},
        {902, "STREAM_CAPTURE_MERGE"},
        {903, "STREAM_CAPTURE_UNMATCHED"},
        {904, "STREAM_CAPTURE_UNJOINED"},
        {905, "STREAM_CAPTURE_ISOLATION"},
        {906, "STREAM_CAPTURE_IMPLICIT"},
        {907, "CAPTURED_EVENT"},
        {908, "STREAM_CAPTURE_WRONG_THREAD"},
        {909, "TIMEOUT"},
        {910, "GRAPH_EXEC_UPDATE_FAILURE"},
        {999, "UNKNOWN"},
    };
    return *map;
}

// The text of an error, made once so that the caller may keep it.
CUresult text_of(CUresult code, const char **text, bool sentence) {
    static auto *made = new std::map<std::pair<CUresult, bool>, std::string>;
    const auto known = names().find(code);
    if (!text) return CUDA_ERROR_INVALID_VALUE;
    *text = nullptr;
    if (known == names().end()) return CUDA_ERROR_INVALID_VALUE;
    std::string &entry = (*made)[{code, sentence}];
    if (entry.empty()) {
        if (!sentence) entry = code ? "CUDA_ERROR_" : "CUDA_";
        for (const char letter : known->second)
            entry += !sentence ? letter : letter == '_' ? ' ' : static_cast<char>(std::tolower(letter));
    }
    *text = entry.c_str();
    return CUDA_SUCCESS;
}

}  // namespace

SIM_EXPORT CUresult cuGetErrorName(CUresult code, const char **text) {
    return call("cuGetErrorName", Needs::nothing, [&](Lock &) { return text_of(code, text, false); });
}

SIM_EXPORT CUresult cuGetErrorString(CUresult code, const char **text) {
    return call("cuGetErrorString", Needs::nothing, [&](Lock &) { return text_of(code, text, true); });
}
