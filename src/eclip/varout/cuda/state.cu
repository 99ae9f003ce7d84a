// Producers and consumers of variable-output stages: what all of them share. Compiled as one source
// with select.cu and operations.cu.
//
// Compiled per element type: FLAG is an unsigned type as wide as what is tested (FLOATING: a float's
// bits, so that minus zero is zero), OUT is what one output is (an index, or a value's bits when
// VALUES is set), APPLY(v) is the consumer's expression, ITEMS is how many inputs of a tile a thread
// takes: 32 for large inputs, where fewer tiles mean fewer looks back, 16 so that others have enough.
//
// Every stage has a state of 16 words. No host code clears the state between requests: a block of the
// kernel that opens a request leaves the state ready for the next request, and tile sums carry the
// request's number, so that sums of the last request count as missing.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef FLAG
#define FLAG u32
#define FLOATING 1
#endif
#ifndef OUT
#define OUT i64
#define VALUES 0
#endif
#ifndef ITEMS
#define ITEMS 16
#endif
#ifndef APPLY
#define APPLY(v) (2.0f * (v) + 1.0f)
#endif

enum { COUNT, CONSUMED, PRODUCED, EPOCH, TICKET, FINISHED, BARRIER, LONGEST, SUM, TURN };
enum { THREADS = 256, WARPS = THREADS / 32, TILE = THREADS * ITEMS };
enum { AT_ONCE = 4, READ_AT_ONCE = 8, BACK_AT_ONCE = 4 };  // outputs, inputs, sums a thread reads
enum { FINISHED_BIT = 40 };  // of SUM: blocks that have finished, above what they found
// Blocks of a selection that a unit holds: as many as have registers for all that is asked for at once.
enum { SELECTING = ITEMS * (sizeof(FLAG) > 4 ? 2 : 1) > 16 ? 4 : 5 };
static_assert(ITEMS <= 32, "which items of a thread are set is a word");
static_assert(ITEMS * WARPS % 32 == 0, "a warp scans the rows of a tile in equal parts");
enum { EVERYTHING, WINDOW, WINDOW_KEEP, REST };  // what a consumer takes
enum { STAY, ADVANCE, REWIND };  // where a window goes

extern "C" __device__ void cudaGraphSetConditional(u64 handle, u32 value);

// True in every thread of the block that finishes last.
__device__ inline bool is_last_block(i64* counter) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd((u64*)counter, 1ull) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// The state as the next request needs it; by one thread, when no other block will read or write it.
__device__ inline void close_request(i64* state, u64 first) {
    i64 count = ((volatile i64*)state)[COUNT];
    state[CONSUMED] = 0;
    state[PRODUCED] = count < (i64)first ? count : (i64)first;
    if (count > state[LONGEST]) state[LONGEST] = count;
    state[TICKET] = state[FINISHED] = 0;
    state[EPOCH] = (state[EPOCH] + 1) & 0x3fffffff;
}
