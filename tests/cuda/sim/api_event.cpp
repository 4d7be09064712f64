// Events: records, waits and questions.

#include <algorithm>

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

CUresult record(const char *function, void *handle, void *stream_handle) {
    return with_event(function, handle, Needs::context, [&](Lock &, Event *event) {
        Stream *stream;
        if (const CUresult code = find_stream(function, stream_handle, &stream)) return code;
        if (stream->context != event->context) return CUDA_ERROR_INVALID_HANDLE;
        if (stream->announced > 0)
            fault(std::string(function) + ": " + std::to_string(stream->announced) +
                  " call(s) of NCCL have not put their work on the stream yet");
        if (stream->capture) {
            if (stream->capture->status != CAPTURE_ACTIVE) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
            event->capture = stream->capture;
            event->before = stream->capture->before[stream];
            return CUDA_SUCCESS;
        }
        Work work = operation(function, stream), made;
        if (const CUresult code = enqueue(work, &made)) return code;
        event->capture = nullptr;
        event->record = made;
        return CUDA_SUCCESS;
    });
}

// A captured event, or a captured stream: the order is the graph's.
CUresult wait_in_capture(Stream *stream, Event *event) {
    const auto refuse = [&](CUresult code) {
        for (const auto &capture : {stream->capture, event->capture})
            if (capture) capture->status = CAPTURE_INVALIDATED;
        return code;
    };
    if (!event->capture) return event->record ? refuse(CUDA_ERROR_STREAM_CAPTURE_ISOLATION) : CUDA_SUCCESS;
    const auto &capture = event->capture;
    if (capture->status != CAPTURE_ACTIVE) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->legacy) return refuse(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    if (stream->capture && stream->capture != capture) return refuse(CUDA_ERROR_STREAM_CAPTURE_MERGE);
    if (!stream->capture) {
        stream->capture = capture;
        capture->members.push_back(stream);
    }
    capture->before[stream].insert(event->before.begin(), event->before.end());
    return CUDA_SUCCESS;
}

// An event that was recorded in a capture cannot be asked, and the capture is invalid after that.
CUresult refuse_captured(Event *event) {
    if (!event->capture) return unsafe_in_capture();
    event->capture->status = CAPTURE_INVALIDATED;
    return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult elapsed(const char *function, float *milliseconds, void *from, void *to) {
    return with_event(function, from, Needs::driver, [&](Lock &, Event *first) {
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

}  // namespace

SIM_EXPORT CUresult cuEventCreate(void **made, unsigned flags) {
    return call("cuEventCreate", Needs::context, [&](Lock &) {
        if (!made || flags > 7) return CUDA_ERROR_INVALID_VALUE;
        // Events for other processes are not simulated.
        if (flags & CU_EVENT_INTERPROCESS) return CUDA_ERROR_NOT_SUPPORTED;
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

SIM_EXPORT CUresult cuEventRecord(void *event, void *stream) { return record("cuEventRecord", event, stream); }

SIM_EXPORT CUresult cuEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    return record("cuEventRecordWithFlags", event, stream);
}

SIM_EXPORT CUresult cuEventQuery(void *handle) {
    return with_event("cuEventQuery", handle, Needs::driver, [&](Lock &, Event *event) {
        if (const CUresult code = refuse_captured(event)) return code;
        if (event->context->sticky) return event->context->sticky;
        want(event->record);
        return event->record && !event->record->done ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuEventSynchronize(void *handle) {
    return with_event("cuEventSynchronize", handle, Needs::context, [&](Lock &lock, Event *event) {
        if (const CUresult code = refuse_captured(event)) return code;
        count_host_wait("cuEventSynchronize");
        return wait_for(lock, event->record);
    });
}

SIM_EXPORT CUresult cuEventElapsedTime(float *milliseconds, void *from, void *to) {
    return elapsed("cuEventElapsedTime", milliseconds, from, to);
}

SIM_EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, void *from, void *to) {
    return elapsed("cuEventElapsedTime_v2", milliseconds, from, to);
}

SIM_EXPORT CUresult cuStreamWaitEvent(void *stream_handle, void *handle, unsigned flags) {
    return with_event("cuStreamWaitEvent", handle, Needs::context, [&](Lock &, Event *event) {
        Stream *stream;
        if (const CUresult code = find_stream("cuStreamWaitEvent", stream_handle, &stream)) return code;
        if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
        if (broken("no-wait")) return CUDA_SUCCESS;
        if (event->capture || stream->capture) return wait_in_capture(stream, event);
        Work work = operation("cuStreamWaitEvent", stream);
        if (event->record && !event->record->done) work->after.push_back(event->record);
        return enqueue(work);
    });
}
