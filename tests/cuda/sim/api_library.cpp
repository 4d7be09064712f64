// What a pretended library over the driver may ask: see library.h.

#include <unistd.h>

#include "call.h"
#include "library.h"

using namespace sim;

namespace {

int count(const char *function) {
    Lock lock(state().mutex);
    count_call(function);
    return wanted_failure(function);
}

void record_fault(const char *text) {
    Lock lock(state().mutex);
    fault(text);
}

void owns(int more) {
    Lock lock(state().mutex);
    state().lost += static_cast<unsigned long>(more);
}

int device_of_thread() {
    Lock lock(state().mutex);
    const Context *context = current();
    return context && context->retained ? context->device : -1;
}

void announce(void *handle, int more) {
    Lock lock(state().mutex);
    auto *stream = static_cast<Stream *>(handle);
    if (state().streams.count(stream)) stream->announced += more;
}

int enqueue_work(const char *function, int device, void *handle, const Range *ranges, std::size_t count,
                 SharedEvent *page, unsigned long long number, LibraryWork run, void *data) {
    if (forked()) return CUDA_ERROR_NOT_INITIALIZED;
    Lock lock(state().mutex);
    if (state().ending) return CUDA_ERROR_DEINITIALIZED;
    auto *stream = static_cast<Stream *>(handle);
    if (!state().streams.count(stream) || stream->context != context_of(device)) {
        fault(std::string(function) + ": " + hex(reinterpret_cast<std::uintptr_t>(handle)) + " is no stream of its device");
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (stream->context->sticky) return stream->context->sticky;
    std::vector<Memory> uses;
    std::vector<unsigned char *> bytes;
    for (std::size_t at = 0; at < count; ++at) {
        Place place;
        if (ranges[at].bytes == 0) {
            bytes.push_back(nullptr);
            continue;
        }
        if (const CUresult code = resolve(function, ranges[at].address, ranges[at].bytes, Side::device, &place)) return code;
        uses.push_back(place.memory);
        bytes.push_back(place.data());
    }
    Work work = operation(
        function, stream, [run, data, bytes] { return Outcome{run(data, bytes.data()), {}}; }, std::move(uses));
    if (page) {
        page->recorder.store(getpid());
        page->recorded.store(number);
        work->records.push_back({EventPage(page, [](SharedEvent *) {}), number});
    }
    return enqueue(work);
}

constexpr Library LIBRARY = {count,    record_fault, owns,         device_of_thread,
                             announce, enqueue_work, number_from_environment};

}  // namespace

extern "C" __attribute__((visibility("default"))) const Library *simLibrary() { return &LIBRARY; }
