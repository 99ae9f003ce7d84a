// CUDA kernels on a CPU, for tests: every thread of a block is a fiber, blocks run one after another.
// Barriers and warp votes are waited for; shared memory is static, which is enough for one block at
// a time. What it cannot show is blocks that wait for blocks begun later, and speed.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
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

struct Block {
    std::vector<ucontext_t> fibers;
    std::vector<std::unique_ptr<char[]>> stacks;
    std::vector<bool> done;
    ucontext_t scheduler;
    unsigned current = 0;
    Barrier all, warps[32];
    unsigned long long votes[32][32];
    std::function<void()> body;
};

static Block* block;
static Index threadIdx, blockIdx, gridDim, blockDim;
static unsigned condition;

static void yield_fiber() {
    unsigned mine = block->current;
    swapcontext(&block->fibers[mine], &block->scheduler);
    block->current = mine;
    threadIdx = {mine, 0, 0};
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
    block->body();
    unsigned mine = block->current;
    block->done[mine] = true;
    --block->all.expected;
    --block->warps[mine / 32].expected;
    swapcontext(&block->fibers[mine], &block->scheduler);
}

static void launch(unsigned across, unsigned down, unsigned threads, std::function<void()> body) {
    gridDim = {across, down, 1};
    blockDim = {threads, 1, 1};
    for (unsigned y = 0; y < down; ++y)
        for (unsigned x = 0; x < across; ++x) {
            Block here;
            block = &here;
            blockIdx = {x, y, 0};
            here.body = body;
            here.fibers.resize(threads);
            here.done.assign(threads, false);
            here.all.expected = threads;
            for (unsigned t = 0; t < threads; ++t) {
                ++here.warps[t / 32].expected;
                here.stacks.emplace_back(new char[1 << 16]);
                getcontext(&here.fibers[t]);
                here.fibers[t].uc_stack.ss_sp = here.stacks[t].get();
                here.fibers[t].uc_stack.ss_size = 1 << 16;
                makecontext(&here.fibers[t], run_fiber, 0);
            }
            for (bool left = true; left;) {
                left = false;
                for (unsigned t = 0; t < threads; ++t)
                    if (!here.done[t]) {
                        left = true;
                        here.current = t;
                        threadIdx = {t, 0, 0};
                        swapcontext(&here.scheduler, &here.fibers[t]);
                    }
            }
        }
}

#define __device__
#define __global__
#define __launch_bounds__(threads)
#define __shared__ static

static void __syncthreads() { wait_at(block->all); }
static void __threadfence() {}

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
