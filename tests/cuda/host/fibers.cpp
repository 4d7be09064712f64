#include "fibers.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace bagua {
namespace {

constexpr size_t STACK = 256 * 1024;
constexpr unsigned WARP = 32;

// Where a fiber is.
enum class State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, ENDED };

#if defined(__x86_64__)
// The stack pointer of a fiber that does not run; its registers are on its stack.
typedef void *Context;

// Saves the registers that a called function keeps, stores the stack pointer in `from`, and goes on where `to` was saved.
extern "C" void bagua_switch(Context *from, Context to);
asm(R"(
.text
.type bagua_switch, @function
bagua_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size bagua_switch, .-bagua_switch
)");

// A context that begins with a function that never returns.
void prepare(Context &context, char *stack, void (*function)()) {
    // At a function's first instruction, the stack is 8 bytes off a multiple of 16, as after a call.
    void **top = reinterpret_cast<void **>(stack + STACK) - 2;
    *top = reinterpret_cast<void *>(function);
    context = top - 6;
    memset(context, 0, 6 * sizeof(void *));
}

void switch_to(Context &from, Context &to) { bagua_switch(&from, to); }
#else
typedef ucontext_t Context;

void prepare(Context &context, char *stack, void (*function)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, function, 0);
}

void switch_to(Context &from, Context &to) { swapcontext(&from, &to); }
#endif

// A thread of a block.
struct Fiber {
    Context context;
    State state;
    Here here;
    // The lanes that it waits for at a warp barrier.
    unsigned mask;
    // Exchanges that it has been part of.
    unsigned exchanges;
};

// What the lanes of a warp give each other. A lane is at most one exchange ahead of the others, so that two places are enough.
struct Warp {
    unsigned long long given[2][WARP];
};

// The launch that runs. Launches of several threads of the host run one after the other.
struct Launch {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::unique_ptr<unsigned char[]> shared;
    void (*body)(void *);
    void *argument;
    Fiber *running;
    Context scheduler;
    // Bounds of the scheduler's stack, for AddressSanitizer.
    const void *stack;
    size_t stack_size;
};

std::mutex one_at_a_time;
Launch *launch;
// Stacks of fibers, kept for the next launch.
std::vector<char *> stacks;

char *stack_of(size_t fiber) {
    while (stacks.size() <= fiber) {
        void *memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return nullptr;
        stacks.push_back(static_cast<char *>(memory));
    }
    return stacks[fiber];
}

// The running fiber gives the turn back. `ends`: for good.
void give_back([[maybe_unused]] bool ends) {
    Fiber &own = *launch->running;
#if defined(__SANITIZE_ADDRESS__)
    void *fake = nullptr;
    __sanitizer_start_switch_fiber(ends ? nullptr : &fake, launch->stack, launch->stack_size);
#endif
    switch_to(own.context, launch->scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, &launch->stack, &launch->stack_size);
#endif
}

void first_function() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &launch->stack, &launch->stack_size);
#endif
    launch->body(launch->argument);
    launch->running->state = State::ENDED;
    give_back(true);
    abort();
}

void run(size_t number) {
    launch->running = &launch->fibers[number];
#if defined(__SANITIZE_ADDRESS__)
    void *fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stacks[number], STACK);
#endif
    switch_to(launch->scheduler, launch->running->context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

// Lets the lanes of a warp go on that wait for each other and are all there.
bool release_warp(size_t first) {
    const size_t end = std::min(first + WARP, launch->fibers.size());
    bool any = false;
    for (size_t i = first; i < end; i++) {
        const Fiber &fiber = launch->fibers[i];
        if (fiber.state != State::AT_WARP_BARRIER) continue;
        const unsigned mask = fiber.mask;
        bool complete = mask >> (i - first) & 1;
        for (size_t lane = 0; lane < WARP && complete; lane++) {
            if (!(mask >> lane & 1) || first + lane >= end) continue;
            const Fiber &other = launch->fibers[first + lane];
            complete = other.state == State::AT_WARP_BARRIER && other.mask == mask;
        }
        if (!complete) continue;
        for (size_t lane = 0; lane < WARP && first + lane < end; lane++) {
            if (mask >> lane & 1) launch->fibers[first + lane].state = State::READY;
        }
        any = true;
    }
    return any;
}

// Lets the threads go on that wait for something which has happened. False: none of them.
bool release() {
    bool any = false, all = true;
    for (size_t first = 0; first < launch->fibers.size(); first += WARP) any = release_warp(first) || any;
    for (const Fiber &fiber : launch->fibers) all = all && fiber.state == State::AT_BLOCK_BARRIER;
    for (size_t i = 0; i < launch->fibers.size() && all; i++) launch->fibers[i].state = State::READY;
    return any || all;
}

Outcome run_block() {
    for (;;) {
        bool ended = true;
        for (size_t i = 0; i < launch->fibers.size(); i++) {
            if (launch->fibers[i].state == State::READY) run(i);
            ended = ended && launch->fibers[i].state == State::ENDED;
        }
        if (ended) return DONE;
        if (!release()) return DIVERGED;
    }
}

Dim position(unsigned long long number, Dim size) {
    return {static_cast<unsigned>(number % size.x), static_cast<unsigned>(number / size.x % size.y),
            static_cast<unsigned>(number / size.x / size.y)};
}

void wait_as(State state, unsigned mask) {
    launch->running->state = state;
    launch->running->mask = mask;
    give_back(false);
}

}  // namespace

const Here &here() { return launch->running->here; }

unsigned lane() { return static_cast<unsigned>((launch->running - launch->fibers.data()) % WARP); }

void *dynamic_shared() { return launch->shared.get(); }

void sync_block() { wait_as(State::AT_BLOCK_BARRIER, 0); }

void sync_warp(unsigned mask) { wait_as(State::AT_WARP_BARRIER, mask); }

unsigned long long exchange_in_warp(unsigned mask, unsigned long long value, unsigned source) {
    Fiber &own = *launch->running;
    auto &given = launch->warps[static_cast<size_t>(&own - launch->fibers.data()) / WARP].given[own.exchanges++ % 2];
    given[lane()] = value;
    sync_warp(mask);
    return given[source % WARP];
}

Outcome run_grid(Dim grid, Dim block, size_t shared_bytes, void (*body)(void *), void *argument) {
    const unsigned long long threads = 1ull * block.x * block.y * block.z, all = 1ull * grid.x * grid.y * grid.z;
    if (threads == 0 || threads > 1024 || all == 0) return BAD_LAUNCH;
    const std::lock_guard<std::mutex> guard(one_at_a_time);
    Launch own{};
    own.fibers.resize(threads);
    own.warps.resize((threads + WARP - 1) / WARP);
    own.shared.reset(new unsigned char[shared_bytes]);
    own.body = body;
    own.argument = argument;
    launch = &own;
    Outcome outcome = DONE;
    for (unsigned long long number = 0; number < all && outcome == DONE; number++) {
        memset(own.shared.get(), 0xa5, shared_bytes);
        for (size_t i = 0; i < threads; i++) {
            char *stack = stack_of(i);
            if (stack == nullptr) return BAD_LAUNCH;
            own.fibers[i] = Fiber{};
            own.fibers[i].here = {position(i, block), position(number, grid), block, grid};
            prepare(own.fibers[i].context, stack, first_function);
        }
        outcome = run_block();
    }
    launch = nullptr;
    return outcome;
}

}  // namespace bagua
