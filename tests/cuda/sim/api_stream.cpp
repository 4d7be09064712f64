// Streams and host functions.

#include "call.h"

using namespace sim;

namespace {

CUresult create(const char *function, void **made, unsigned flags, int priority) {
    return call(function, Needs::context, [&](Lock &) {
        if (!made || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
        Stream *stream = make_stream(current(), flags, priority);
        state().streams.insert(stream);
        *made = stream;
        return CUDA_SUCCESS;
    });
}

// Runs a body with the stream of a handle.
template <class Body>
CUresult with_stream(const char *function, void *handle, Body body) {
    return call(function, Needs::context, [&](Lock &lock) {
        Stream *stream;
        if (const CUresult code = find_stream(function, handle, &stream)) return code;
        return body(lock, stream);
    });
}

// A stream that is captured must not be waited for or asked: the capture is invalid after that.
CUresult refuse_capture(Stream *stream) {
    if (stream->capture) {
        stream->capture->status = CAPTURE_INVALIDATED;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (stream->legacy)
        for (auto *other : stream->context->streams)
            if (other->blocking() && other->capture) {
                other->capture->status = CAPTURE_INVALIDATED;
                return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
            }
    return CUDA_SUCCESS;
}

}  // namespace

SIM_EXPORT CUresult cuStreamCreate(void **stream, unsigned flags) {
    return create("cuStreamCreate", stream, flags, 0);
}

SIM_EXPORT CUresult cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    return create("cuStreamCreateWithPriority", stream, flags, priority);
}

SIM_EXPORT CUresult cuStreamDestroy_v2(void *handle) {
    return with_stream("cuStreamDestroy_v2", handle, [&](Lock &, Stream *stream) {
        if (!state().streams.erase(stream)) return CUDA_ERROR_INVALID_HANDLE;
        if (stream->capture) stream->capture->status = CAPTURE_INVALIDATED;
        stream->destroyed = true;
        state().changed.notify_all();
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuStreamQuery(void *handle) {
    return with_stream("cuStreamQuery", handle, [&](Lock &, Stream *stream) {
        if (const CUresult code = refuse_capture(stream)) return code;
        const auto all = pending(stream);
        for (const auto &work : all) want(work);
        return all.empty() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
}

SIM_EXPORT CUresult cuStreamSynchronize(void *handle) {
    return with_stream("cuStreamSynchronize", handle, [&](Lock &lock, Stream *stream) {
        if (const CUresult code = refuse_capture(stream)) return code;
        count_host_wait("cuStreamSynchronize");
        for (const auto &work : pending(stream)) wait_for(lock, work);
        return stream->context->sticky;
    });
}

SIM_EXPORT CUresult cuStreamGetFlags(void *handle, unsigned *flags) {
    return with_stream("cuStreamGetFlags", handle, [&](Lock &, Stream *stream) {
        if (!flags) return CUDA_ERROR_INVALID_VALUE;
        *flags = stream->flags;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuStreamGetPriority(void *handle, int *priority) {
    return with_stream("cuStreamGetPriority", handle, [&](Lock &, Stream *stream) {
        if (!priority) return CUDA_ERROR_INVALID_VALUE;
        *priority = stream->priority;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuStreamGetId(void *handle, unsigned long long *id) {
    return with_stream("cuStreamGetId", handle, [&](Lock &, Stream *stream) {
        if (!id) return CUDA_ERROR_INVALID_VALUE;
        *id = stream->id;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuStreamGetCtx(void *handle, void **context) {
    return with_stream("cuStreamGetCtx", handle, [&](Lock &, Stream *stream) {
        if (!context) return CUDA_ERROR_INVALID_VALUE;
        *context = stream->context;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuStreamGetDevice(void *handle, CUdevice *device) {
    return with_stream("cuStreamGetDevice", handle, [&](Lock &, Stream *stream) {
        if (!device) return CUDA_ERROR_INVALID_VALUE;
        *device = stream->context->device;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuLaunchHostFunc(void *handle, CUhostFn function, void *data) {
    return with_stream("cuLaunchHostFunc", handle, [&](Lock &, Stream *stream) {
        if (!function) return CUDA_ERROR_INVALID_VALUE;
        Work made;
        const CUresult code = enqueue(operation("cuLaunchHostFunc", stream,
                                                [function, data] {
                                                    enter_host_function(true);
                                                    function(data);
                                                    enter_host_function(false);
                                                    return Outcome{};
                                                }),
                                      &made);
        // The host may wait for what the function does, so that what is before it begins.
        want(made);
        return code;
    });
}

// --- capture --------------------------------------------------------------------------------------------------------

namespace {

// What a capture became.
struct Graph {
    unsigned long nodes;  // operations in it
};

CUresult capture_info(const char *function, void *handle, int *status, std::uint64_t *id) {
    return with_stream(function, handle, [&](Lock &, Stream *stream) {
        if (!status) return CUDA_ERROR_INVALID_VALUE;
        if (stream->legacy)
            for (const auto *other : stream->context->streams)
                if (other->blocking() && other->capture) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        *status = stream->capture ? stream->capture->status : CAPTURE_NONE;
        if (id && stream->capture) *id = stream->capture->id;
        return CUDA_SUCCESS;
    });
}

}  // namespace

SIM_EXPORT CUresult cuStreamBeginCapture_v2(void *handle, int mode) {
    return with_stream("cuStreamBeginCapture_v2", handle, [&](Lock &, Stream *stream) {
        static unsigned long long id = 0;
        if (mode < CAPTURE_GLOBAL || mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
        if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
        auto capture = std::make_shared<Capture>();
        capture->id = ++id;
        capture->mode = mode;
        capture->thread = pthread_self();
        capture->origin = stream;
        capture->members = {stream};
        stream->capture = capture;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuStreamEndCapture(void *handle, void **graph) {
    return with_stream("cuStreamEndCapture", handle, [&](Lock &, Stream *stream) {
        if (!graph) return CUDA_ERROR_INVALID_VALUE;
        *graph = nullptr;
        const auto capture = stream->capture;
        if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
        if (capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
        if (capture->mode != CAPTURE_RELAXED && !pthread_equal(capture->thread, pthread_self()))
            return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
        for (auto *member : capture->members) member->capture = nullptr;
        if (capture->status != CAPTURE_ACTIVE) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (capture->before[stream].size() != capture->nodes) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
        *graph = new Graph{capture->nodes};
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuStreamIsCapturing(void *handle, int *status) {
    return capture_info("cuStreamIsCapturing", handle, status, nullptr);
}

SIM_EXPORT CUresult cuStreamGetCaptureInfo_v2(void *handle, int *status, std::uint64_t *id, void **graph,
                                              const void **dependencies, std::size_t *count) {
    if (graph) *graph = nullptr;
    if (dependencies) *dependencies = nullptr;
    if (count) *count = 0;
    return capture_info("cuStreamGetCaptureInfo_v2", handle, status, id);
}

SIM_EXPORT CUresult cuStreamGetCaptureInfo_v3(void *handle, int *status, std::uint64_t *id, void **graph,
                                              const void **dependencies, const void **edges, std::size_t *count) {
    if (graph) *graph = nullptr;
    if (dependencies) *dependencies = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return capture_info("cuStreamGetCaptureInfo_v3", handle, status, id);
}

SIM_EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    return call("cuThreadExchangeStreamCaptureMode", Needs::driver, [&](Lock &) {
        if (!mode || *mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
        *mode = exchange_capture_mode(*mode);
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuGraphGetNodes(void *graph, void **nodes, std::size_t *count) {
    return call("cuGraphGetNodes", Needs::driver, [&](Lock &) {
        // How many there are; no graph is ever launched.
        if (!graph || nodes || !count) return CUDA_ERROR_INVALID_VALUE;
        *count = static_cast<Graph *>(graph)->nodes;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuGraphDestroy(void *graph) {
    return call("cuGraphDestroy", Needs::driver, [&](Lock &) {
        if (!graph) return CUDA_ERROR_INVALID_VALUE;
        delete static_cast<Graph *>(graph);
        return CUDA_SUCCESS;
    });
}
