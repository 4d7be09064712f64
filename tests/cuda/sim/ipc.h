// What processes share of memory and events: memfds, found through /proc/<pid>/fd.
#pragma once

#include "stream.h"

namespace sim {

// Gives an event the page that other processes can map.
CUresult share(Event *event);

}  // namespace sim
