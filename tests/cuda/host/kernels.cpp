// The kernels of rust/bagua-cuda, compiled for the host: `make cuda-kernels-host`. What the simulated driver and the tests call.
//
//   bagua_host_parameters  how many parameters a kernel has, and the bytes of each of the first `max`; -1: there is no such kernel
//   bagua_host_launch      runs a grid; 0, or one of fibers.h's outcomes
//
// Launches from several threads run one after the other. A launch that fails leaves its memory as it was when it failed.
#include <map>
#include <string>

#include "shim.h"

namespace bagua {
namespace {

std::map<std::string, Kernel> &table() {
    static std::map<std::string, Kernel> kernels;
    return kernels;
}

// A kernel with the addresses of its arguments.
struct Call {
    const Kernel &kernel;
    void **arguments;
};

}  // namespace

bool add_kernel(const Kernel &kernel) { return table().emplace(kernel.name, kernel).second; }

}  // namespace bagua

extern "C" {

int bagua_host_parameters(const char *kernel, size_t *sizes, int max) {
    const auto found = bagua::table().find(kernel);
    if (found == bagua::table().end()) return -1;
    for (int i = 0; i < found->second.parameters && i < max; i++) sizes[i] = found->second.sizes[i];
    return found->second.parameters;
}

int bagua_host_launch(const char *kernel, const unsigned grid[3], const unsigned block[3], size_t shared_bytes, void **arguments) {
    const auto found = bagua::table().find(kernel);
    if (found == bagua::table().end()) return bagua::NO_SUCH_KERNEL;
    bagua::Call call{found->second, arguments};
    const auto body = [](void *call) {
        const bagua::Call &own = *static_cast<bagua::Call *>(call);
        own.kernel.call(own.arguments);
    };
    return bagua::run_grid({grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared_bytes, body, &call);
}
}
