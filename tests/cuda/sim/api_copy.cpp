// Copies, and a fill.

#include <cstring>

#include "call.h"
#include "memory.h"

using namespace sim;

namespace {

// A copy that a call asked for.
struct Copy {
    const char *function;       // the call
    std::uintptr_t to;          // where the first byte goes
    Side to_side;               // what memory that may be
    std::uintptr_t from;        // where the first byte is
    Side from_side;             // what memory that may be
    std::size_t bytes;          // how many
    bool asynchronous;          // whether the call may return before it is done
};

// Checks a copy, enqueues it, and waits where the documentation says that the call does.
CUresult copy(const Copy &asked, void *handle) {
    return call(asked.function, Needs::context, [&](Lock &lock) {
        Stream *stream;
        if (const CUresult code = find_stream(asked.function, handle, &stream)) return code;
        if (asked.bytes == 0) return CUDA_SUCCESS;
        Place to, from;
        if (const CUresult code = resolve(asked.function, asked.to, asked.bytes, asked.to_side, &to)) return code;
        if (const CUresult code = resolve(asked.function, asked.from, asked.bytes, asked.from_side, &from)) return code;
        if (to.on_device() != from.on_device()) count_copy(to.on_device() ? "to_device" : "to_host", asked.bytes);
        const bool captured = stream->capture != nullptr;
        const std::size_t bytes = asked.bytes;
        const unsigned char *source = from.data();
        std::shared_ptr<std::vector<unsigned char>> staged;
        if (!from.memory && to.on_device()) {
            // Pageable bytes are read now: the caller may change them when the call has returned.
            staged = std::make_shared<std::vector<unsigned char>>(source, source + asked.bytes);
            source = staged->data();
        }
        unsigned char *target = to.data();
        Work work = operation(
            asked.function, stream,
            [staged, target, source, bytes] {
                std::memmove(target, source, bytes);
                return Outcome{};
            },
            {to.memory, from.memory});
        if (const CUresult code = enqueue(work)) return code;
        const bool to_host = !to.on_device(), from_host = !from.on_device();
        const bool pageable = (to_host && !to.memory) || (from_host && to_host);
        const bool waits = asked.asynchronous ? pageable : to_host || from_host;
        return waits && !captured ? host_wait(asked.function, lock, work) : CUDA_SUCCESS;
    });
}

std::uintptr_t number(const void *address) { return reinterpret_cast<std::uintptr_t>(address); }

}  // namespace

SIM_EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, std::size_t bytes) {
    return copy({"cuMemcpyHtoD_v2", to, Side::device, number(from), Side::host, bytes, false}, nullptr);
}

SIM_EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, std::size_t bytes) {
    return copy({"cuMemcpyDtoH_v2", number(to), Side::host, from, Side::device, bytes, false}, nullptr);
}

SIM_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, std::size_t bytes, void *stream) {
    return copy({"cuMemcpyHtoDAsync_v2", to, Side::device, number(from), Side::host, bytes, true}, stream);
}

SIM_EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, std::size_t bytes, void *stream) {
    return copy({"cuMemcpyDtoHAsync_v2", number(to), Side::host, from, Side::device, bytes, true}, stream);
}

SIM_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, void *stream) {
    return copy({"cuMemcpyDtoDAsync_v2", to, Side::device, from, Side::device, bytes, true}, stream);
}

SIM_EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t count, void *handle) {
    return call("cuMemsetD8Async", Needs::context, [&](Lock &) {
        Stream *stream;
        if (const CUresult code = find_stream("cuMemsetD8Async", handle, &stream)) return code;
        if (count == 0) return CUDA_SUCCESS;
        Place place;
        if (const CUresult code = resolve("cuMemsetD8Async", to, count, Side::device, &place)) return code;
        unsigned char *target = place.data();
        return enqueue(operation(
            "cuMemsetD8Async", stream,
            [=] {
                std::memset(target, value, count);
                return Outcome{};
            },
            {place.memory}));
    });
}

