#include "report.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <vector>

namespace sim {
namespace {

// One entry of BAGUA_SIM_FAIL.
struct Failure {
    std::string function;  // with or without its version (_v2)
    unsigned long nth;     // which call fails, from 1; 0: every call
    CUresult code;         // what it returns
};

std::map<std::string, unsigned long> &calls() {
    static auto *map = new std::map<std::string, unsigned long>;
    return *map;
}

std::map<std::string, unsigned long> &host_waits() {
    static auto *map = new std::map<std::string, unsigned long>;
    return *map;
}

std::map<std::string, unsigned long> &copies() {
    static auto *map = new std::map<std::string, unsigned long>;
    return *map;
}

std::vector<std::string> &faults() {
    static auto *list = new std::vector<std::string>;
    return *list;
}

// A name without its version, so that cuMemAlloc means cuMemAlloc_v2.
std::string without_version(const std::string &function) {
    const auto at = function.rfind("_v");
    return at == std::string::npos ? function : function.substr(0, at);
}

const std::vector<Failure> &failures() {
    static const auto *list = [] {
        auto *made = new std::vector<Failure>;
        const char *text = std::getenv("BAGUA_SIM_FAIL");
        std::stringstream entries(text ? text : "");
        for (std::string entry; std::getline(entries, entry, ',');) {
            const auto first = entry.find(':'), last = entry.rfind(':');
            if (first == std::string::npos || first == last) {
                std::fprintf(stderr, "BAGUA_SIM_FAIL: '%s' is not function:nth:code\n", entry.c_str());
                std::abort();
            }
            const std::string nth = entry.substr(first + 1, last - first - 1);
            made->push_back({entry.substr(0, first), nth == "*" ? 0 : std::stoul(nth), std::atoi(&entry[last + 1])});
        }
        return made;
    }();
    return *list;
}

std::string thread_name() {
    if (gettid() == getpid()) return "main";
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return name;
}

std::string quoted(const std::string &text) {
    std::string made = "\"";
    for (const char letter : text) {
        if (letter == '"' || letter == '\\') made += '\\';
        if (static_cast<unsigned char>(letter) >= ' ') made += letter;
    }
    return made + "\"";
}

std::string object(const std::map<std::string, unsigned long> &counts) {
    std::string made;
    for (const auto &[name, count] : counts)
        made += (made.empty() ? "" : ", ") + quoted(name) + ": " + std::to_string(count);
    return "{" + made + "}";
}

}  // namespace

void count_call(const char *function) { ++calls()[function]; }

void count_host_wait(const char *function) { ++host_waits()[std::string(function) + "@" + thread_name()]; }

void count_copy(const char *direction, unsigned long bytes) { copies()[std::string(direction) + "@" + thread_name()] += bytes; }

void fault(const std::string &text) { faults().push_back(text); }

CUresult wanted_failure(const char *function) {
    for (const auto &failure : failures()) {
        if (failure.function != function && failure.function != without_version(function)) continue;
        if (failure.nth == 0 || failure.nth == calls()[function]) return failure.code;
    }
    return CUDA_SUCCESS;
}

unsigned long long number_from_environment(const char *name, unsigned long long otherwise) {
    const char *text = std::getenv(name);
    char *end = nullptr;
    const auto value = text ? std::strtoull(text, &end, 10) : 0;
    return text && end != text ? value : otherwise;
}

void write_report(unsigned long leaked) {
    const char *prefix = std::getenv("BAGUA_SIM_REPORT");
    if (!prefix || !*prefix) return;
    std::string list;
    for (const auto &text : faults()) list += (list.empty() ? "" : ", ") + quoted(text);
    const std::string path = std::string(prefix) + "." + std::to_string(getpid());
    if (FILE *file = std::fopen(path.c_str(), "w")) {
        std::fprintf(file, "{\"calls\": %s, \"copies\": %s, \"host_waits\": %s, \"faults\": [%s], \"leaked\": %lu}\n",
                     object(calls()).c_str(), object(copies()).c_str(), object(host_waits()).c_str(), list.c_str(), leaked);
        std::fclose(file);
    }
}

}  // namespace sim
