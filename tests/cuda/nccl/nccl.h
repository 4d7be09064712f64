// NCCL's numbers and structures that the pretended library uses, as NVIDIA documents them.
#pragma once

#include <climits>
#include <cstddef>

using ncclResult_t = int;
enum : ncclResult_t {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
};

using ncclDataType_t = int;
enum : ncclDataType_t {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
};

using ncclRedOp_t = int;
enum : ncclRedOp_t { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 };

struct ncclUniqueId {
    char internal[128];
};

// The fields of NCCL 2.19.
struct ncclConfig_t {
    std::size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char *netName;
    int splitShare;
};

constexpr unsigned NCCL_API_MAGIC = 0xcafebeef;
constexpr int NCCL_CONFIG_UNDEF_INT = INT_MIN;

#define NCCL_EXPORT extern "C" __attribute__((visibility("default")))
