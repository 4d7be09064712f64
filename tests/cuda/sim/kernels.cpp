#include "kernels.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "report.h"

namespace sim {
namespace {

using Parameters = int (*)(const char *, std::size_t *, int);
using Start = int (*)(const char *, const unsigned *, const unsigned *, std::size_t, void **);

// The library with the kernels.
struct Library {
    Parameters parameters = nullptr;  // bagua_host_parameters
    Start start = nullptr;            // bagua_host_launch
    std::string error;                // why there is none
};

const Library &library() {
    static const auto *loaded = [] {
        auto *made = new Library;
        Dl_info self;
        dladdr(reinterpret_cast<void *>(&parameter_sizes), &self);
        const std::string own = self.dli_fname;
        const std::string path = own.substr(0, own.rfind('/') + 1) + "libkernels.so";
        void *opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!opened) {
            made->error = dlerror();
            return made;
        }
        made->parameters = reinterpret_cast<Parameters>(dlsym(opened, "bagua_host_parameters"));
        made->start = reinterpret_cast<Start>(dlsym(opened, "bagua_host_launch"));
        if (!made->parameters || !made->start) made->error = path + " lacks bagua_host_parameters or bagua_host_launch";
        return made;
    }();
    return *loaded;
}

}  // namespace

CUresult parameter_sizes(const std::string &kernel, std::vector<std::size_t> *sizes) {
    if (!library().error.empty()) {
        fault("there are no kernels for the host: " + library().error);
        return CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
    }
    sizes->assign(256, 0);
    const int count = library().parameters(kernel.c_str(), sizes->data(), 256);
    if (count < 0) {
        fault("the kernel " + kernel + " is in the image, and not among those that were compiled for the host");
        return CUDA_ERROR_NOT_FOUND;
    }
    sizes->resize(static_cast<std::size_t>(count));
    return CUDA_SUCCESS;
}

std::vector<Memory> memory_of(const Launch &launch, const Context *context, std::string *wrong) {
    std::vector<Memory> found;
    for (const auto &parameter : launch.parameters) {
        const auto *bytes = reinterpret_cast<const unsigned char *>(parameter.data());
        for (std::size_t at = 0; at + sizeof(std::uintptr_t) <= parameter.size() * sizeof(std::max_align_t);
             at += sizeof(std::uintptr_t)) {
            std::uintptr_t word;
            std::memcpy(&word, bytes + at, sizeof word);
            Memory memory = memory_at(word);
            // The address just behind memory may be passed, and means that memory.
            if (!memory) memory = memory_at(word - 1);
            if (!memory && in_device_range(word)) *wrong = hex(word) + " is a parameter, and is not allocated";
            if (!memory) continue;
            if (memory->on_device() && memory->context != context)
                *wrong = hex(word) + " is a parameter, and memory of another device";
            found.push_back(memory);
        }
    }
    return found;
}

Outcome run_launch(Launch &launch, const std::vector<Memory> &memory) {
    // One at a time: a kernel never waits for another, and its library need not know of other threads.
    static std::mutex *one = new std::mutex;
    const Lock alone(*one);
    std::vector<void *> arguments;
    for (auto &parameter : launch.parameters) arguments.push_back(parameter.data());
    const auto each = [&](void (*what)(Allocation &)) {
        const Lock lock(state().mutex);
        for (const auto &one_of : memory) what(*one_of);
    };
    each(open_for_kernel);
    const int code = library().start(launch.kernel.c_str(), launch.grid.data(), launch.block.data(), launch.shared_bytes,
                                     arguments.data());
    each(close_after_kernel);
    if (code) return {CUDA_ERROR_LAUNCH_FAILED, launch.kernel + " failed with " + std::to_string(code)};
    return {};
}

}  // namespace sim
