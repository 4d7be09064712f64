// A strict NCCL that is only pretended, for tests without a GPU: libnccl.so.2 by name and by symbols, over the simulated driver.
//
// It forgives nothing: what NVIDIA's user guide forbids is a fault in the driver's report (BAGUA_SIM_REPORT), and a communicator that is
// neither destroyed nor aborted is leaked. Communicators are non-blocking: a call is in progress for some polls of
// ncclCommGetAsyncError, and its work reaches the stream with the poll that says so; an event that is recorded before is a fault.
// Work begins as that of the driver does; ranks are processes that map memory of the one that made the unique id. Sums are in no
// order of ranks, averages are rounded before the sum, minima lose NaNs.
//
//   BAGUA_SIM_NCCL_VERSION=n       the version, 23007 by default
//   BAGUA_SIM_FAIL=function:nth:code,…   as of the driver
//   BAGUA_SIM_NCCL=way:function:nth[:code],…   the nth call (from 1) of a function: soon (when it is polled, it turns out to have
//                                  failed with this code), later (it ends well, its work does not, and the communicator fails
//                                  afterwards), never (it stays in progress), stuck (its work does not end), hang (it does not
//                                  return until the communicator is aborted)
//   BAGUA_SIM_NCCL_HANG=1          ranks that disagree wait for ever, as with NCCL, instead of a fault
//
// nccl.h      NCCL's types and numbers
// comm.*      communicators: their life, what they share, their mistakes
// verbs.cpp   the calls that put work on a stream, and groups of them
// work.cpp    that work; reduce.cpp: its arithmetic

#include "comm.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>

namespace nccl {
namespace {

constexpr unsigned long long MAGIC = 0x6e63636c2d73696dull;

// What a unique id holds.
struct Id {
    unsigned long long magic, nonce;
    int process, fd;
    unsigned long long inode;
};
static_assert(sizeof(Id) <= sizeof(ncclUniqueId));

std::string &last_error() {
    static auto *text = new std::string;
    return *text;
}

// The ways of BAGUA_SIM_NCCL.
struct Wanted {
    std::string way, function;
    unsigned long nth;
    int code;
};

const std::vector<Wanted> &wanted() {
    static const auto *list = [] {
        auto *made = new std::vector<Wanted>;
        const char *text = std::getenv("BAGUA_SIM_NCCL");
        std::stringstream entries(text ? text : "");
        for (std::string entry; std::getline(entries, entry, ',');) {
            std::stringstream parts(entry);
            std::string way, function, nth, code = "0";
            std::getline(parts, way, ':');
            std::getline(parts, function, ':');
            if (!std::getline(parts, nth, ':')) {
                std::fprintf(stderr, "BAGUA_SIM_NCCL: '%s' is not way:function:nth[:code]\n", entry.c_str());
                std::abort();
            }
            std::getline(parts, code, ':');
            made->push_back({way, function, std::stoul(nth), std::atoi(code.c_str())});
        }
        return made;
    }();
    return *list;
}

// The memory that a unique id names; null where its maker has ended.
Shared *open_shared(const Id &id) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", id.process, id.fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat status {};
    void *at = MAP_FAILED;
    if (fd >= 0 && !fstat(fd, &status) && status.st_ino == id.inode)
        at = mmap(nullptr, HEADER + MAX_RANKS * REGION, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (fd >= 0) close(fd);
    auto *shared = at == MAP_FAILED ? nullptr : static_cast<Shared *>(at);
    return shared && shared->magic == MAGIC && shared->nonce == id.nonce ? shared : nullptr;
}

std::string wrong_with(const ncclConfig_t *config) {
    if (!config) return "no configuration";
    if (config->size != sizeof(ncclConfig_t)) return "size " + std::to_string(config->size);
    if (config->magic != NCCL_API_MAGIC) return "the magic";
    if (config->version < 21900 || static_cast<int>(config->version) > version())
        return "version " + std::to_string(config->version);
    if (config->blocking != 0) return "blocking " + std::to_string(config->blocking);
    for (const int other : {config->cgaClusterSize, config->minCTAs, config->maxCTAs, config->splitShare})
        if (other != NCCL_CONFIG_UNDEF_INT) return "a field that this library does not know";
    return "";
}

void fail(Comm *comm, ncclResult_t code, const std::string &text) {
    comm->state = State::failed;
    comm->result = error(text, code);
    if (comm->stream && !comm->waiting.empty()) driver()->announce(comm->stream, -1);
    comm->waiting.clear();
}

// Whether all ranks have come; a device that two of them have is refused.
bool connected(Comm *comm) {
    for (int rank = 0; rank < comm->ranks; ++rank)
        if (!comm->shared->members[rank].process.load()) return false;
    const char *several = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    const bool shared = version() >= 23000 && several && !std::strcmp(several, "1");
    for (int rank = 0; rank < comm->ranks && !shared; ++rank)
        if (rank != comm->rank && comm->shared->members[rank].device.load() == comm->device) {
            fail(comm, ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(comm->rank) + " and rank " +
                                             std::to_string(rank) + " both on CUDA device " + std::to_string(comm->device));
            return true;
        }
    return true;
}

// One poll of a communicator.
void poll(Comm *comm) {
    if (comm->later && comm->state != State::failed && ++comm->later_polls >= POLLS)
        return fail(comm, comm->later, "BAGUA_SIM_NCCL: a call fails later");
    const bool in_progress =
        comm->state == State::starting || comm->state == State::busy || comm->state == State::finalizing;
    if (!in_progress || comm->trouble.never || ++comm->polls < POLLS) return;
    if (comm->trouble.soon) return fail(comm, comm->trouble.soon, "BAGUA_SIM_NCCL: " + comm->doing + " fails when it is polled");
    if (comm->state == State::starting && !connected(comm)) return;
    if (comm->state == State::finalizing && comm->pending > 0) return;
    if (comm->state == State::failed) return;
    if (comm->state == State::busy) {
        const ncclResult_t code = launch(comm);
        driver()->announce(comm->stream, -1);
        if (code) return fail(comm, code, last_error());
    }
    comm->state = comm->state == State::finalizing ? State::finalized : State::ready;
    if (comm->trouble.later) comm->later = comm->trouble.later;
}

// Ends a communicator; the lock is held and given back while works end.
void end(std::unique_lock<std::mutex> &lock, Comm *comm) {
    living().erase(comm);
    if (comm->stream && !comm->waiting.empty()) driver()->announce(comm->stream, -1);
    comm->waiting.clear();
    comm->aborted = true;
    lock.unlock();
    while (comm->running > 0) usleep(100);
    driver()->owns(-1);
    lock.lock();
}

// Runs a call that says what a communicator is.
template <class Body> ncclResult_t ask(const char *function, Comm *comm, void *out, Body body) {
    if (const ncclResult_t code = enter(function)) return code;
    const std::lock_guard lock(mutex());
    if (!living().count(comm)) return fault(std::string(function) + " on no communicator, or one that was ended");
    if (!out) return fault(std::string(function) + " without a place for the answer", ncclInvalidArgument);
    body();
    return ncclSuccess;
}

}  // namespace

std::mutex &mutex() {
    static auto *made = new std::mutex;
    return *made;
}

std::set<Comm *> &living() {
    static auto *made = new std::set<Comm *>;
    return *made;
}

const sim::Library *driver() {
    static const sim::Library *found = [] {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        void *table = library ? dlsym(library, "simLibrary") : nullptr;
        return table ? reinterpret_cast<const sim::Library *(*)()>(table)() : nullptr;
    }();
    return found;
}

int version() {
    const char *text = std::getenv("BAGUA_SIM_NCCL_VERSION");
    return text ? std::atoi(text) : 23007;
}

ncclResult_t fault(const std::string &text, ncclResult_t code) {
    if (driver()) driver()->fault(("NCCL: " + text).c_str());
    return error(text, code);
}

ncclResult_t error(const std::string &text, ncclResult_t code) {
    last_error() = text;
    return code;
}

ncclResult_t enter(const char *function) {
    if (!driver()) return error("there is no simulated driver in this process", ncclUnhandledCudaError);
    const ncclResult_t code = driver()->call(function);
    return code ? error(std::string("BAGUA_SIM_FAIL: ") + function, code) : ncclSuccess;
}

Trouble trouble_of(const char *function) {
    static auto *calls = new std::map<std::string, unsigned long>;
    const unsigned long nth = ++(*calls)[function];
    Trouble found;
    for (const auto &each : wanted()) {
        if (each.function != function || each.nth != nth) continue;
        if (each.way == "never") found.never = true;
        if (each.way == "stuck") found.stuck = true;
        if (each.way == "hang") found.hang = true;
        if (each.way == "soon") found.soon = each.code;
        if (each.way == "later") found.later = each.code;
    }
    return found;
}

ncclResult_t usable(const char *function, Comm *comm) {
    const std::string name(function);
    if (!living().count(comm)) return fault(name + " on no communicator, or one that was ended", ncclInvalidArgument);
    switch (comm->state) {
        case State::ready: return ncclSuccess;
        case State::starting: return fault(name + " on a communicator that is not ready");
        case State::busy: return fault(name + " while " + comm->doing + " is in progress and was not polled to its end");
        case State::finalizing:
        case State::finalized: return fault(name + " after ncclCommFinalize");
        case State::failed: return fault(name + " on a communicator that has failed", comm->result);
    }
    return ncclInternalError;
}

}  // namespace nccl

using namespace nccl;

NCCL_EXPORT ncclResult_t ncclGetVersion(int *number) {
    *number = version();
    return ncclSuccess;
}

NCCL_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *made) {
    if (const ncclResult_t code = enter("ncclGetUniqueId")) return code;
    const std::lock_guard lock(mutex());
    // It stays open as long as this process lives.
    const int fd = memfd_create("nccl", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(HEADER + MAX_RANKS * REGION)))
        return error("no shared memory", ncclSystemError);
    Id id{MAGIC, 0, getpid(), fd, 0};
    struct stat status {};
    fstat(fd, &status);
    id.inode = status.st_ino;
    id.nonce = static_cast<unsigned long long>(getpid()) << 32 | static_cast<unsigned long long>(fd);
    auto *shared = static_cast<Shared *>(mmap(nullptr, HEADER, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    shared->magic = MAGIC;
    shared->nonce = id.nonce;
    munmap(shared, HEADER);
    std::memset(made, 0, sizeof *made);
    std::memcpy(made, &id, sizeof id);
    return ncclSuccess;
}

NCCL_EXPORT ncclResult_t ncclCommInitRankConfig(Comm **made, int ranks, ncclUniqueId unique, int rank,
                                                ncclConfig_t *config) {
    const char *const name = "ncclCommInitRankConfig";
    if (made) *made = nullptr;
    if (const ncclResult_t code = enter(name)) return code;
    const std::lock_guard lock(mutex());
    if (const auto wrong = wrong_with(config); !wrong.empty()) return fault(std::string(name) + ": " + wrong, ncclInvalidArgument);
    if (ranks < 1 || ranks > MAX_RANKS || rank < 0 || rank >= ranks)
        return fault(std::string(name) + ": rank " + std::to_string(rank) + " of " + std::to_string(ranks), ncclInvalidArgument);
    const int device = driver()->device();
    if (device < 0) return fault(std::string(name) + " without a current context");
    Id id;
    std::memcpy(&id, &unique, sizeof id);
    if (id.magic != MAGIC) return fault(std::string(name) + ": this is no unique id", ncclInvalidArgument);
    Shared *shared = open_shared(id);
    if (!shared) return error("the rank that made the unique id does not answer", ncclRemoteError);
    int none = 0;
    if (!shared->ranks.compare_exchange_strong(none, ranks) && none != ranks)
        return fault(std::string(name) + ": the unique id is one of " + std::to_string(none) + " ranks");
    auto *comm = new Comm;
    comm->shared = shared;
    comm->rank = rank;
    comm->ranks = ranks;
    comm->device = device;
    comm->doing = name;
    comm->trouble = trouble_of(name);
    shared->members[rank].device.store(device);
    none = 0;
    if (!shared->members[rank].process.compare_exchange_strong(none, getpid()))
        return fault(std::string(name) + ": the unique id was used before", ncclInvalidUsage);
    living().insert(comm);
    driver()->owns(1);
    *made = comm;
    return ncclInProgress;
}

NCCL_EXPORT ncclResult_t ncclCommFinalize(Comm *comm) {
    if (const ncclResult_t code = enter("ncclCommFinalize")) return code;
    const std::lock_guard lock(mutex());
    if (const ncclResult_t code = usable("ncclCommFinalize", comm)) return code;
    if (in_group()) return fault("ncclCommFinalize inside a group");
    comm->state = State::finalizing;
    comm->doing = "ncclCommFinalize";
    comm->polls = 0;
    comm->trouble = trouble_of("ncclCommFinalize");
    return ncclInProgress;
}

NCCL_EXPORT ncclResult_t ncclCommDestroy(Comm *comm) {
    if (const ncclResult_t code = enter("ncclCommDestroy")) return code;
    std::unique_lock lock(mutex());
    if (!living().count(comm)) return fault("ncclCommDestroy on no communicator, or one that was ended", ncclInvalidArgument);
    if (comm->state != State::finalized) fault("ncclCommDestroy before ncclCommFinalize was polled to its end");
    end(lock, comm);
    return ncclSuccess;
}

NCCL_EXPORT ncclResult_t ncclCommAbort(Comm *comm) {
    if (const ncclResult_t code = enter("ncclCommAbort")) return code;
    std::unique_lock lock(mutex());
    if (!living().count(comm)) return fault("ncclCommAbort on no communicator, or one that was ended", ncclInvalidArgument);
    if (trouble_of("ncclCommAbort").hang) {
        lock.unlock();
        for (;;) pause();
    }
    end(lock, comm);
    return ncclSuccess;
}

NCCL_EXPORT ncclResult_t ncclCommGetAsyncError(Comm *comm, ncclResult_t *result) {
    return ask("ncclCommGetAsyncError", comm, result, [&] {
        poll(comm);
        const bool ended = comm->state == State::ready || comm->state == State::finalized;
        *result = comm->state == State::failed ? comm->result : ended ? ncclSuccess : ncclInProgress;
    });
}

NCCL_EXPORT ncclResult_t ncclCommCount(Comm *comm, int *count) {
    return ask("ncclCommCount", comm, count, [&] { *count = comm->ranks; });
}

NCCL_EXPORT ncclResult_t ncclCommUserRank(Comm *comm, int *rank) {
    return ask("ncclCommUserRank", comm, rank, [&] { *rank = comm->rank; });
}

NCCL_EXPORT ncclResult_t ncclCommCuDevice(Comm *comm, int *device) {
    return ask("ncclCommCuDevice", comm, device, [&] { *device = comm->device; });
}

NCCL_EXPORT const char *ncclGetErrorString(ncclResult_t code) {
    constexpr const char *TEXTS[] = {"no error",         "unhandled cuda error", "unhandled system error", "internal error",
                                     "invalid argument", "invalid usage",        "remote process exited or there was a network error",
                                     "NCCL operation in progress"};
    return code >= 0 && code < 8 ? TEXTS[code] : "unknown result code";
}

NCCL_EXPORT const char *ncclGetLastError(Comm *) {
    const std::lock_guard lock(mutex());
    // Texts that were returned stay what they were.
    static auto *texts = new std::set<std::string>;
    return texts->insert(last_error()).first->c_str();
}
