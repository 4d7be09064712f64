// Events: records, waits and questions.

#include "call.h"

using namespace sim;

namespace {

// Runs a body with an event that exists.
template <class Body>
CUresult with_event(const char *function, void *handle, Needs needs, Body body) {
    return call(function, needs, [&](Lock &lock) {
        auto *event = static_cast<Event *>(handle);
        if (!state().events.count(event)) {
            fault(std::string(function) + ": " + hex(reinterpret_cast<std::uintptr_t>(handle)) +
                  " is no event, or was destroyed");
            return CUDA_ERROR_INVALID_HANDLE;
        }
        return body(lock, event);
    });
}

}  // namespace

SIM_EXPORT CUresult cuEventCreate(void **made, unsigned flags) {
    return call("cuEventCreate", Needs::context, [&](Lock &) {
        if (!made || flags > 3) return CUDA_ERROR_INVALID_VALUE;
        auto *event = new Event;
        event->context = current();
        event->flags = flags;
        state().events.insert(event);
        *made = event;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuEventDestroy_v2(void *handle) {
    return with_event("cuEventDestroy_v2", handle, Needs::context, [&](Lock &, Event *event) {
        state().events.erase(event);
        event->record = nullptr;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuEventRecord(void *handle, void *stream_handle) {
    return with_event("cuEventRecord", handle, Needs::context, [&](Lock &, Event *event) {
        Stream *stream;
        if (const CUresult code = find_stream("cuEventRecord", stream_handle, &stream)) return code;
        if (stream->context != event->context) return CUDA_ERROR_INVALID_HANDLE;
        if (stream->announced > 0)
            fault("cuEventRecord: " + std::to_string(stream->announced) +
                  " call(s) of NCCL have not put their work on the stream yet");
        return enqueue(operation("cuEventRecord", stream), &event->record);
    });
}

SIM_EXPORT CUresult cuEventQuery(void *handle) {
    return with_event("cuEventQuery", handle, Needs::driver, [&](Lock &, Event *event) {
        if (const CUresult code = unsafe_in_capture()) return code;
        if (event->context->sticky) return event->context->sticky;
        want(event->record);
        return event->record && !event->record->done ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuEventElapsedTime(float *milliseconds, void *from, void *to) {
    return with_event("cuEventElapsedTime", from, Needs::driver, [&](Lock &, Event *first) {
        auto *second = static_cast<Event *>(to);
        if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
        if (!state().events.count(second)) return CUDA_ERROR_INVALID_HANDLE;
        if (!first->record || !second->record || (first->flags | second->flags) & CU_EVENT_DISABLE_TIMING)
            return CUDA_ERROR_INVALID_HANDLE;
        want(first->record);
        want(second->record);
        if (!first->record->done || !second->record->done) return CUDA_ERROR_NOT_READY;
        *milliseconds = std::chrono::duration<float, std::milli>(second->record->ended - first->record->ended).count();
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuStreamWaitEvent(void *stream_handle, void *handle, unsigned flags) {
    return with_event("cuStreamWaitEvent", handle, Needs::context, [&](Lock &, Event *event) {
        Stream *stream;
        if (const CUresult code = find_stream("cuStreamWaitEvent", stream_handle, &stream)) return code;
        if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
        Work work = operation("cuStreamWaitEvent", stream);
        if (event->record && !event->record->done) work->after.push_back(event->record);
        return enqueue(work);
    });
}
