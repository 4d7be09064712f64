#include "context.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "call.h"
#include "report.h"
#include "stream.h"

namespace sim {
namespace {

std::atomic<bool> in_child{false};

const bool watching = [] {
    pthread_atfork(nullptr, nullptr, [] { in_child = true; });
    return true;
}();

// Errors after which a context can no longer be used.
bool poisons(CUresult code) {
    return code == 214 || code == 220 || code == 700 || code == 702 || code == 710 || (code >= 714 && code <= 719);
}

// What a context owns, as BAGUA_SIM_REPORT counts it.
unsigned long owned(const Context *context) {
    unsigned long count = 0;
    for (const auto &memory : all_memory())
        count += memory->context == context && !memory->free_enqueued;
    for (const auto *stream : state().streams) count += stream->context == context;
    for (const auto *event : state().events) count += event->context == context;
    return count;
}

void at_exit() {
    if (forked()) return;
    Lock lock(state().mutex);
    state().ending = true;
    unsigned long leaked = state().lost;
    for (const auto *context : state().contexts)
        if (!context->sticky) leaked += owned(context);
    write_report(leaked);
}

}  // namespace

State &state() {
    static auto *made = new State;
    return *made;
}

std::vector<Context *> &context_stack() {
    static thread_local std::vector<Context *> stack;
    return stack;
}

Context *current() { return context_stack().empty() ? nullptr : context_stack().back(); }

CUresult initialize() {
    if (state().initialized) return CUDA_SUCCESS;
    const auto devices = number_from_environment("BAGUA_SIM_DEVICES", 2);
    if (devices == 0) return CUDA_ERROR_NO_DEVICE;
    for (unsigned long long device = 0; device < devices; ++device) {
        auto *context = new Context;
        context->device = static_cast<CUdevice>(device);
        state().contexts.push_back(context);
    }
    state().initialized = true;
    return CUDA_SUCCESS;
}

Context *context_of(CUdevice device) {
    const auto &contexts = state().contexts;
    return device >= 0 && static_cast<std::size_t>(device) < contexts.size() ? contexts[device] : nullptr;
}

bool is_context(const void *handle) {
    const auto &contexts = state().contexts;
    return std::find(contexts.begin(), contexts.end(), handle) != contexts.end();
}

bool forked() { return in_child; }

CUresult enter(const char *function, Needs needs) {
    [[maybe_unused]] static const int registered = std::atexit(at_exit);
    count_call(function);
    if (state().ending) return CUDA_ERROR_DEINITIALIZED;
    if (const CUresult code = wanted_failure(function)) {
        if (poisons(code) && current()) current()->sticky = code;
        return code;
    }
    if (needs == Needs::nothing) return CUDA_SUCCESS;
    if (!state().initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (in_host_function()) {
        fault(std::string(function) + " is called by a host function");
        return CUDA_ERROR_NOT_PERMITTED;
    }
    if (needs == Needs::driver) return CUDA_SUCCESS;
    const Context *context = current();
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    if (context->retained == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return context->sticky;
}

CUresult host_wait(const char *function, Lock &lock, const Work &work) {
    count_host_wait(function);
    return wait_for(lock, work);
}

}  // namespace sim
