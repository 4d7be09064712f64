// Streams and host functions.

#include "call.h"

using namespace sim;

namespace {

CUresult create(const char *function, void **made, unsigned flags) {
    return call(function, Needs::context, [&](Lock &) {
        if (!made || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
        Stream *stream = make_stream(current(), flags);
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

}  // namespace

SIM_EXPORT CUresult cuStreamCreate(void **stream, unsigned flags) {
    return create("cuStreamCreate", stream, flags);
}

SIM_EXPORT CUresult cuStreamCreateWithPriority(void **stream, unsigned flags, int) {
    return create("cuStreamCreateWithPriority", stream, flags);
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

}  // namespace

SIM_EXPORT CUresult cuStreamBeginCapture_v2(void *handle, int mode) {
    return with_stream("cuStreamBeginCapture_v2", handle, [&](Lock &, Stream *stream) {
        if (mode < CAPTURE_GLOBAL || mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
        if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
        auto capture = std::make_shared<Capture>();
        capture->mode = mode;
        capture->thread = pthread_self();
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
        if (capture->mode != CAPTURE_RELAXED && !pthread_equal(capture->thread, pthread_self()))
            return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
        stream->capture = nullptr;
        if (capture->status != CAPTURE_ACTIVE) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        *graph = new Graph{capture->nodes};
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuStreamIsCapturing(void *handle, int *status) {
    return with_stream("cuStreamIsCapturing", handle, [&](Lock &, Stream *stream) {
        if (!status) return CUDA_ERROR_INVALID_VALUE;
        if (stream->legacy)
            for (const auto *other : stream->context->streams)
                if (other->blocking() && other->capture) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        *status = stream->capture ? stream->capture->status : CAPTURE_NONE;
        return CUDA_SUCCESS;
    });
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
