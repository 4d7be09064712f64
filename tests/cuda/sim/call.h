// What every exported function does first.
#pragma once

#include "context.h"
#include "report.h"
#include "stream.h"

namespace sim {

// What must be there for a call to be made.
enum class Needs { nothing, driver, context };

// Counts a call, lets it fail where BAGUA_SIM_FAIL asks for it, and checks what it needs. Under the lock.
CUresult enter(const char *function, Needs needs);

// Runs the body of an exported function under the lock.
template <class Body>
CUresult call(const char *function, Needs needs, Body body) {
    if (forked()) return CUDA_ERROR_NOT_INITIALIZED;
    Lock lock(state().mutex);
    if (const CUresult code = enter(function, needs)) return code;
    return body(lock);
}

// Counts a host wait, makes it, and says how the context is.
CUresult host_wait(const char *function, Lock &lock, const Work &work);

}  // namespace sim
