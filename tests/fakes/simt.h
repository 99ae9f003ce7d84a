// CUDA kernels on a CPU, for tests: every thread is a fiber, and all blocks of a launch run at once,
// in an order that changes from turn to turn; some begin late, when others may have ended. A fiber gives way where threads wait: at barriers,
// votes and sleeps. Shared memory is kept by block (simt.py rewrites its declarations). What it
// cannot show is memory that is seen late, and speed.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

struct Index {
    unsigned x, y, z;
};
struct float4 {
    float x, y, z, w;
};

struct Barrier {
    int expected = 0, arrived = 0;
    unsigned turn = 0;
};

enum { MOST_BLOCKS = 64, STACK_BYTES = 1 << 16 };

struct Block {
    Index index;
    Barrier all, warps[32];
    unsigned long long votes[32][32];
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Block* block;
    unsigned thread;
    bool done;
};

static ucontext_t scheduler;
static Fiber* current;
static Block* block;
static Block* first_block;
static std::function<void()> body;
static Index threadIdx, blockIdx, gridDim, blockDim;
static unsigned condition;

static unsigned block_number() { return (unsigned)(block - first_block); }

static void enter(Fiber* fiber) {
    current = fiber;
    block = fiber->block;
    blockIdx = block->index;
    threadIdx = {fiber->thread, 0, 0};
}

static void yield_fiber() {
    Fiber* mine = current;
    swapcontext(&mine->context, &scheduler);
    enter(mine);
}

static void wait_at(Barrier& barrier) {
    unsigned turn = barrier.turn;
    ++barrier.arrived;
    while (barrier.turn == turn) {
        if (barrier.arrived >= barrier.expected) {
            barrier.arrived = 0;
            ++barrier.turn;
        } else {
            yield_fiber();
        }
    }
}

static void run_fiber() {
    body();
    current->done = true;
    --current->block->all.expected;
    --current->block->warps[current->thread / 32].expected;
    swapcontext(&current->context, &scheduler);
}

static void launch(unsigned across, unsigned down, unsigned threads, std::function<void()> work) {
    static unsigned seed = 1;
    gridDim = {across, down, 1};
    blockDim = {threads, 1, 1};
    body = work;
    unsigned count = across * down;
    if (count > MOST_BLOCKS) abort();
    std::vector<Block> blocks(count);
    std::vector<Fiber> fibers(count * threads);
    first_block = blocks.data();
    for (unsigned b = 0; b < count; ++b) {
        blocks[b].index = {b % across, b / across, 0};
        blocks[b].all.expected = threads;
        for (unsigned t = 0; t < threads; ++t) {
            Fiber& fiber = fibers[b * threads + t];
            ++blocks[b].warps[t / 32].expected;
            fiber.stack.reset(new char[STACK_BYTES]);
            fiber.block = &blocks[b];
            fiber.thread = t;
            fiber.done = false;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = STACK_BYTES;
            makecontext(&fiber.context, run_fiber, 0);
        }
    }
    std::vector<unsigned> begin(count);
    for (unsigned& turn : begin) {
        seed = seed * 1664525 + 1013904223;
        turn = seed >> 30 ? 0 : seed >> 20 & 255;
    }
    unsigned turn = 0;
    for (bool left = true; left; ++turn) {
        left = false;
        seed = seed * 1664525 + 1013904223;
        unsigned first = (seed >> 8) % count, step = seed >> 30 & 1 ? 1 : count - 1;
        for (unsigned k = 0; k < count; ++k) {
            unsigned b = (first + k * step) % count;
            for (unsigned t = 0; t < threads; ++t) {
                Fiber& fiber = fibers[b * threads + t];
                if (fiber.done) continue;
                left = true;
                if (turn < begin[b]) break;
                enter(&fiber);
                swapcontext(&scheduler, &fiber.context);
            }
        }
    }
}

#define __device__
#define __global__
#define __launch_bounds__(...)

static void __syncthreads() { wait_at(block->all); }
static void __threadfence() {}
static void __nanosleep(unsigned) { yield_fiber(); }

// Every lane's value, once all lanes of the warp have given theirs.
static std::vector<unsigned long long> exchange(unsigned long long value) {
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    block->votes[warp][lane] = value;
    wait_at(block->warps[warp]);
    std::vector<unsigned long long> seen(block->votes[warp], block->votes[warp] + 32);
    wait_at(block->warps[warp]);
    return seen;
}

static unsigned __ballot_sync(unsigned, bool vote) {
    auto seen = exchange(vote);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= (unsigned)(seen[lane] != 0) << lane;
    return bits;
}
static bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
static unsigned __shfl_up_sync(unsigned, unsigned value, int step) {
    int from = (int)(threadIdx.x % 32) - step;
    auto seen = exchange(value);
    return from < 0 ? value : (unsigned)seen[from];
}
static unsigned __shfl_xor_sync(unsigned, unsigned value, int step) {
    int from = (int)(threadIdx.x % 32) ^ step;
    return (unsigned)exchange(value)[from];
}
static unsigned __reduce_add_sync(unsigned, unsigned value) {
    auto seen = exchange(value);
    unsigned sum = 0;
    for (auto one : seen) sum += (unsigned)one;
    return sum;
}
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static int __ffs(unsigned bits) { return __builtin_ffs((int)bits); }
static unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
    unsigned long long before = *at;
    *at += value;
    return before;
}
static void cudaGraphSetConditional(unsigned long long, unsigned value) { condition = value; }
