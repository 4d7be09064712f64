// What the simulator counts, which calls it lets fail, and the report that it writes at exit.
#pragma once

#include <string>

#include "abi.h"

namespace sim {

// Counts a call of an exported function.
void count_call(const char *function);

// Counts that a function makes the calling thread wait for the device, whether or not work is pending.
void count_host_wait(const char *function);

// Counts bytes that are copied between host and device, "to_host" or "to_device", for the calling thread.
void count_copy(const char *direction, unsigned long bytes);

// Records a mistake of the caller.
void fault(const std::string &text);

// The error with which BAGUA_SIM_FAIL wants this call to fail, 0 if it does not. After count_call.
CUresult wanted_failure(const char *function);

// A number from the environment, or the default where the variable is absent or no number.
unsigned long long number_from_environment(const char *name, unsigned long long otherwise);

// Writes BAGUA_SIM_REPORT's file, if it is asked for.
void write_report(unsigned long leaked);

}  // namespace sim
