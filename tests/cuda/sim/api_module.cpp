// Modules and launches.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>

#include "call.h"
#include "kernels.h"

using namespace sim;

namespace {

// A loaded image. Never deleted, so that no handle is used twice.
struct Module {
    Context *context;               // whose it is
    std::set<std::string> kernels;  // names
};

// A kernel of a module.
struct Function {
    Module *module;    // where it is
    std::string name;  // as in the image
};

constexpr int CAPABILITY = 90;            // of the pretended devices
constexpr unsigned SHARED_LIMIT = 49152;  // dynamic shared memory that a launch may ask for, bytes

std::set<const void *> &modules() {
    static auto *set = new std::set<const void *>;
    return *set;
}

std::set<const void *> &functions() {
    static auto *set = new std::set<const void *>;
    return *set;
}

// The kernels of PTX: what follows each ".entry". An error for another image, or one that a device cannot load.
CUresult read_ptx(const char *text, std::set<std::string> *kernels) {
    const char *target = std::strncmp(text, ".version", 8) ? nullptr : std::strstr(text, ".target sm_");
    if (!target) return CUDA_ERROR_INVALID_IMAGE;
    if (std::atoi(target + 11) > CAPABILITY) return CUDA_ERROR_INVALID_PTX;
    for (const char *at = text; (at = std::strstr(at, ".entry "));) {
        at += 7;
        kernels->insert(std::string(at, std::strcspn(at, " \t\n\r({;")));
    }
    return CUDA_SUCCESS;
}

// Whether a geometry is one that the device can have.
bool fits(const unsigned *grid, const unsigned *block) {
    const unsigned long long threads = 1ull * block[0] * block[1] * block[2];
    return grid[0] && grid[1] && grid[2] && grid[0] <= 2147483647 && grid[1] <= 65535 && grid[2] <= 65535 && threads &&
           threads <= 1024 && block[2] <= 64;
}

}  // namespace

SIM_EXPORT CUresult cuModuleLoadData(void **made, const void *image) {
    return call("cuModuleLoadData", Needs::context, [&](Lock &) {
        if (!made || !image) return CUDA_ERROR_INVALID_VALUE;
        std::set<std::string> kernels;
        if (const CUresult code = read_ptx(static_cast<const char *>(image), &kernels)) return code;
        auto *module = new Module{current(), kernels};
        modules().insert(module);
        *made = module;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuModuleGetFunction(void **made, void *handle, const char *name) {
    return call("cuModuleGetFunction", Needs::context, [&](Lock &) {
        auto *module = static_cast<Module *>(handle);
        if (!made || !name) return CUDA_ERROR_INVALID_VALUE;
        if (!modules().count(module)) return CUDA_ERROR_INVALID_HANDLE;
        if (!module->kernels.count(name)) return CUDA_ERROR_NOT_FOUND;
        auto *found = new Function{module, name};
        functions().insert(found);
        *made = found;
        return CUDA_SUCCESS;
    });
}

SIM_EXPORT CUresult cuLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream_handle,
                                   void **parameters, void **extra) {
    const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
    return call("cuLaunchKernel", Needs::context, [&](Lock &) {
        Stream *stream;
        auto *function = static_cast<Function *>(handle);
        if (const CUresult code = find_stream("cuLaunchKernel", stream_handle, &stream)) return code;
        if (!functions().count(function) || function->module->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
        if (extra) return CUDA_ERROR_NOT_SUPPORTED;
        if (!fits(grid, block) || shared_bytes > SHARED_LIMIT) return CUDA_ERROR_INVALID_VALUE;
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
        return enqueue(operation(
            "cuLaunchKernel", stream,
            [=] { return wrong.empty() ? run_launch(*launch, memory) : Outcome{CUDA_ERROR_ILLEGAL_ADDRESS, wrong}; },
            memory));
    });
}
