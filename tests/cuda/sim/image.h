// What a module's image says of itself: PTX as text, or a cubin.
#pragma once

#include <set>
#include <string>

#include "abi.h"

namespace sim {

// The names of an image's kernels; an error where a device of this capability (90 for 9.0) cannot load the image.
CUresult read_image(const void *image, int capability, std::set<std::string> *kernels);

}  // namespace sim
