#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

#include "context.h"
#include "report.h"

namespace sim {
namespace {

constexpr std::size_t PAGE = 4096;

// Addresses from which memory is taken, upwards only: so that none is used twice.
struct Range {
    std::uintptr_t begin;  // first address
    std::uintptr_t next;   // first that was never given out
    std::uintptr_t end;    // after the last

    explicit Range(std::size_t bytes) {
        void *at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        begin = next = at == MAP_FAILED ? 0 : reinterpret_cast<std::uintptr_t>(at);
        end = begin ? begin + bytes : 0;
    }
    bool has(std::uintptr_t address) const { return address >= begin && address < end; }
    // Addresses for so many bytes, and a page without access behind them; 0 where none are left.
    std::uintptr_t take(std::size_t bytes) {
        if (bytes + PAGE > end - next) return 0;
        const auto at = next;
        next += bytes + PAGE;
        return at;
    }
};

Range &device_range() {
    static auto *range = new Range(std::size_t{8} << 40);
    return *range;
}

Range &pinned_range() {
    static auto *range = new Range(std::size_t{1} << 40);
    return *range;
}

using Table = std::map<std::uintptr_t, Memory>;

// Memory that is alive, by first address.
Table &table() {
    static auto *map = new Table;
    return *map;
}

// Memory that is gone: its addresses are still known.
Table &dead() {
    static auto *map = new Table;
    return *map;
}

// The memory of a table with an address.
Memory found_in(const Table &map, std::uintptr_t address) {
    const auto after = map.upper_bound(address);
    if (after == map.begin()) return nullptr;
    const Memory &memory = std::prev(after)->second;
    return address - memory->base < memory->bytes ? memory : nullptr;
}

std::size_t pages(std::size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// A NaN as float16, bfloat16, float32 and float64, and no identity of an integer operation.
constexpr unsigned char PATTERN[2] = {0xFB, 0x7F};

void fill(unsigned char *data, std::size_t bytes) {
    if (bytes < 2) return;
    std::memcpy(data, PATTERN, 2);
    for (std::size_t done = 2; done < bytes; done *= 2) std::memcpy(data + done, data, std::min(done, bytes - done));
}

void *map_at(std::uintptr_t at, std::size_t bytes, int access, int flags, int fd) {
    return mmap(reinterpret_cast<void *>(at), bytes, access, flags | MAP_FIXED, fd, 0);
}

// Maps a memfd twice: without access where the caller sees it, with access elsewhere.
CUresult map_device(Allocation &memory) {
    memory.base = device_range().take(memory.mapped);
    if (!memory.base || map_at(memory.base, memory.mapped, PROT_NONE, MAP_SHARED, memory.fd) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *shadow = mmap(nullptr, memory.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
    if (shadow == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    memory.shadow = static_cast<unsigned char *>(shadow);
    return CUDA_SUCCESS;
}

}  // namespace

Allocation::~Allocation() {
    if (shadow) munmap(shadow, mapped);
    if (fd >= 0) close(fd);
}

CUresult allocate(Context *context, Kind kind, std::size_t bytes, Memory *made) {
    const bool device = kind != Kind::pinned;
    auto memory = std::make_shared<Allocation>();
    memory->kind = kind;
    memory->context = context;
    memory->bytes = bytes;
    memory->mapped = pages(bytes);
    if (device) {
        memory->fd = memfd_create("sim-device-memory", MFD_CLOEXEC);
        if (memory->fd < 0 || ftruncate(memory->fd, static_cast<off_t>(memory->mapped)))
            return CUDA_ERROR_OUT_OF_MEMORY;
        if (const CUresult code = map_device(*memory)) return code;
        fill(memory->shadow, memory->mapped);
    } else {
        memory->base = pinned_range().take(memory->mapped);
        if (!memory->base || map_at(memory->base, memory->mapped, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS, -1) == MAP_FAILED)
            return CUDA_ERROR_OUT_OF_MEMORY;
        fill(reinterpret_cast<unsigned char *>(memory->base), memory->mapped);
    }
    table()[memory->base] = memory;
    *made = memory;
    return CUDA_SUCCESS;
}

void release(Memory memory) {
    if (!memory->live) return;
    memory->live = false;
    table().erase(memory->base);
    dead()[memory->base] = memory;
    // The addresses stay taken, without access and without the bytes.
    map_at(memory->base, memory->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
    if (memory->fd >= 0) close(memory->fd);
    memory->fd = -1;
}

Memory memory_at(std::uintptr_t address) {
    const Memory memory = found_in(table(), address);
    return memory ? memory : found_in(dead(), address);
}

std::vector<Memory> all_memory() {
    std::vector<Memory> found;
    for (const auto &[base, memory] : table()) found.push_back(memory);
    return found;
}

CUresult resolve(const char *function, std::uintptr_t address, std::size_t bytes, Side side, Place *place) {
    const auto wrong = [&](const std::string &what) {
        fault(std::string(function) + ": " + std::to_string(bytes) + " bytes at " + hex(address) + " " + what);
        return CUDA_ERROR_INVALID_VALUE;
    };
    const Memory memory = memory_at(address);
    if (memory) {
        if (!memory->live) return wrong("were freed");
        if (memory->free_enqueued) return wrong("were given to cuMemFreeAsync before");
        const std::size_t offset = address - memory->base;
        if (bytes > memory->bytes - offset)
            return wrong("pass the end of an allocation of " + std::to_string(memory->bytes) + " bytes, at " +
                         std::to_string(offset));
        if (side == Side::host && memory->on_device()) return wrong("are a device's, where host memory is named");
        *place = {memory, address};
        return CUDA_SUCCESS;
    }
    if (in_device_range(address) || pinned_range().has(address)) return wrong("are not allocated");
    if (side == Side::device) return wrong("are no device memory");
    if (!address) return wrong("are a null pointer");
    *place = {nullptr, address};
    return CUDA_SUCCESS;
}

std::string unusable(const Allocation &memory) {
    if (!memory.live) return "memory " + hex(memory.base) + " was freed before the work that uses it ran";
    if (!memory.born) return "memory " + hex(memory.base) + " is used before cuMemAllocAsync's place in its stream";
    return "";
}

void open_for_kernel(Allocation &memory) {
    if (memory.on_device() && memory.live && memory.open_count++ == 0)
        mprotect(reinterpret_cast<void *>(memory.base), memory.mapped, PROT_READ | PROT_WRITE);
}

void close_after_kernel(Allocation &memory) {
    if (memory.open_count && --memory.open_count == 0 && memory.live)
        mprotect(reinterpret_cast<void *>(memory.base), memory.mapped, PROT_NONE);
}

bool in_device_range(std::uintptr_t address) { return device_range().has(address); }

std::string hex(std::uintptr_t value) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%lx", static_cast<unsigned long>(value));
    return text;
}

}  // namespace sim
