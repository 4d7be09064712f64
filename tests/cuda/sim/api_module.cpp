// Modules, libraries and launches.

#include <algorithm>
#include <cstring>
#include <set>

#include "call.h"
#include "image.h"
#include "kernels.h"

using namespace sim;

namespace {

struct Module;

// A kernel of a module.
struct Function {
    Module *module;                  // where it is
    std::string name;                // as in the image
    unsigned shared_limit = 49152;   // dynamic shared memory that a launch may ask for, bytes
};

// A loaded image, as CUmodule or CUlibrary. Never deleted, so that no handle is used twice.
struct Module {
    Context *context = nullptr;       // of a module; null for a library, which serves all
    std::set<std::string> kernels;    // names
    unsigned launches = 0;            // that have not ended
    bool loaded = true;               // until it is unloaded
};

constexpr int CAPABILITY = 90;                  // of the pretended devices
constexpr unsigned MOST_SHARED_BYTES = 232448;  // that a launch may ask for at all

std::set<const void *> &modules() {
    static auto *set = new std::set<const void *>;
    return *set;
}

std::set<const void *> &functions() {
    static auto *set = new std::set<const void *>;
    return *set;
}

CUresult load(const char *function, void **made, const void *image, bool library) {
    return call(function, library ? Needs::driver : Needs::context, [&](Lock &) {
        if (!made || !image) return CUDA_ERROR_INVALID_VALUE;
        std::set<std::string> kernels;
        if (const CUresult code = read_image(image, CAPABILITY, &kernels)) return code;
        auto *module = new Module{library ? nullptr : current(), kernels};
        modules().insert(module);
        *made = module;
        return CUDA_SUCCESS;
    });
}

CUresult unload(const char *function, void *handle, bool library) {
    return call(function, library ? Needs::driver : Needs::context, [&](Lock &) {
        auto *module = static_cast<Module *>(handle);
        if (!modules().count(module) || !module->loaded) return CUDA_ERROR_INVALID_HANDLE;
        if (module->launches) fault(std::string(function) + ": a launch of its kernels has not ended");
        module->loaded = false;
        return CUDA_SUCCESS;
    });
}

CUresult get(const char *function, void **made, void *handle, const char *name, bool library) {
    return call(function, library ? Needs::driver : Needs::context, [&](Lock &) {
        auto *module = static_cast<Module *>(handle);
        if (!made || !name) return CUDA_ERROR_INVALID_VALUE;
        if (!modules().count(module) || !module->loaded) return CUDA_ERROR_INVALID_HANDLE;
        if (!module->kernels.count(name)) return CUDA_ERROR_NOT_FOUND;
        auto *found = new Function{module, name};
        functions().insert(found);
        *made = found;
        return CUDA_SUCCESS;
    });
}

// Whether a geometry is one that the device can have.
bool fits(const unsigned *grid, const unsigned *block) {
    const unsigned long long threads = 1ull * block[0] * block[1] * block[2];
    return grid[0] && grid[1] && grid[2] && grid[0] <= 2147483647 && grid[1] <= 65535 && grid[2] <= 65535 && threads &&
           threads <= 1024 && block[2] <= 64;
}

CUresult launch(const char *name, void *handle, const unsigned *grid, const unsigned *block, unsigned shared_bytes,
                void *stream_handle, void **parameters, void **extra) {
    return call(name, Needs::context, [&](Lock &) {
        Stream *stream;
        auto *function = static_cast<Function *>(handle);
        if (const CUresult code = find_stream(name, stream_handle, &stream)) return code;
        if (!functions().count(function) || !function->module->loaded) return CUDA_ERROR_INVALID_HANDLE;
        if (function->module->context && function->module->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
        if (extra) return CUDA_ERROR_NOT_SUPPORTED;
        if (!fits(grid, block) || shared_bytes > function->shared_limit) return CUDA_ERROR_INVALID_VALUE;
        std::vector<std::size_t> sizes;
        if (const CUresult code = parameter_sizes(function->name, &sizes)) return code;
        if (!sizes.empty() && !parameters) return CUDA_ERROR_INVALID_VALUE;

        auto launch = std::make_shared<Launch>();
        launch->kernel = function->name;
        std::copy(grid, grid + 3, launch->grid.begin());
        std::copy(block, block + 3, launch->block.begin());
        launch->shared_bytes = shared_bytes;
        for (std::size_t at = 0; at < sizes.size(); ++at) {
            auto &parameter =
                launch->parameters.emplace_back((sizes[at] + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
            // A max_align_t has bytes that its initialization leaves as they are, and all words are searched for addresses.
            std::memset(parameter.data(), 0, parameter.size() * sizeof(std::max_align_t));
            std::memcpy(parameter.data(), parameters[at], sizes[at]);
        }
        std::string wrong;
        const auto memory = memory_of(*launch, stream->context, &wrong);
        Work made;
        Work work = operation(
            name, stream,
            [=] { return wrong.empty() ? run_launch(*launch, memory) : Outcome{CUDA_ERROR_ILLEGAL_ADDRESS, wrong}; },
            memory);
        Module *module = function->module;
        work->place = [module] { --module->launches; };
        if (const CUresult code = enqueue(work, &made)) return code;
        if (made) ++module->launches;
        return CUDA_SUCCESS;
    });
}

CUresult get_attribute(const Function *function, int attribute, int *value) {
    switch (attribute) {
        case 0: *value = 1024; break;  // threads per block
        case 4: *value = 32; break;    // registers
        case 5: case 6: *value = CAPABILITY; break;
        case 8: *value = static_cast<int>(function->shared_limit); break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

}  // namespace

SIM_EXPORT CUresult cuModuleLoadData(void **module, const void *image) {
    return load("cuModuleLoadData", module, image, false);
}

SIM_EXPORT CUresult cuModuleLoadDataEx(void **module, const void *image, unsigned, int *, void **) {
    return load("cuModuleLoadDataEx", module, image, false);
}

SIM_EXPORT CUresult cuModuleUnload(void *module) { return unload("cuModuleUnload", module, false); }

SIM_EXPORT CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
    return get("cuModuleGetFunction", function, module, name, false);
}

SIM_EXPORT CUresult cuLibraryLoadData(void **library, const void *image, int *, void **, unsigned, int *, void **,
                                      unsigned) {
    return load("cuLibraryLoadData", library, image, true);
}

SIM_EXPORT CUresult cuLibraryUnload(void *library) { return unload("cuLibraryUnload", library, true); }

SIM_EXPORT CUresult cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    return get("cuLibraryGetKernel", kernel, library, name, true);
}

SIM_EXPORT CUresult cuKernelGetFunction(void **function, void *kernel) {
    return call("cuKernelGetFunction", Needs::context, [&](Lock &) {
        if (!function) return CUDA_ERROR_INVALID_VALUE;
        if (!functions().count(kernel)) return CUDA_ERROR_INVALID_HANDLE;
        *function = kernel;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuFuncGetAttribute(int *value, int attribute, void *handle) {
    return call("cuFuncGetAttribute", Needs::context, [&](Lock &) {
        if (!functions().count(handle)) return CUDA_ERROR_INVALID_HANDLE;
        return value ? get_attribute(static_cast<Function *>(handle), attribute, value) : CUDA_ERROR_INVALID_VALUE;
    });
}

SIM_EXPORT CUresult cuFuncSetAttribute(void *handle, int attribute, int value) {
    return call("cuFuncSetAttribute", Needs::context, [&](Lock &) {
        if (!functions().count(handle)) return CUDA_ERROR_INVALID_HANDLE;
        if (attribute != 8 && attribute != 9) return CUDA_ERROR_INVALID_VALUE;
        if (value < 0 || value > static_cast<int>(MOST_SHARED_BYTES)) return CUDA_ERROR_INVALID_VALUE;
        if (attribute == 8) static_cast<Function *>(handle)->shared_limit = static_cast<unsigned>(value);
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *handle, int threads,
                                                                std::size_t) {
    return call("cuOccupancyMaxActiveBlocksPerMultiprocessor", Needs::context, [&](Lock &) {
        if (!functions().count(handle)) return CUDA_ERROR_INVALID_HANDLE;
        if (!blocks || threads < 1 || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
        *blocks = 2048 / threads;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream,
                                   void **parameters, void **extra) {
    const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
    return launch("cuLaunchKernel", function, grid, block, shared_bytes, stream, parameters, extra);
}

SIM_EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, void *function, void **parameters, void **extra) {
    if (!config) return CUDA_ERROR_INVALID_VALUE;
    if (config->attribute_count) return CUDA_ERROR_NOT_SUPPORTED;
    return launch("cuLaunchKernelEx", function, config->grid, config->block, config->shared_bytes, config->stream,
                  parameters, extra);
}
