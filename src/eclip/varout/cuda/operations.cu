// Windows for other consumers; suppression, routing and expansion. Follows state.cu.

// Moves to the next window of an external consumer; by one thread, for all later work on the stream.
// In a graph, the condition holds if there is another window after this one.
extern "C" __global__ void eclip_next(int move, u64 window, i64* state, u64 handle, int loops) {
    i64 low = move == REWIND ? 0 : state[CONSUMED] + (move == ADVANCE ? (i64)window : 0);
    if (loops) cudaGraphSetConditional(handle, state[COUNT] - low > (i64)window);
    if (move != STAY) state[CONSUMED] = state[PRODUCED] = low;
}

// How many slots of the current window hold outputs.
__device__ inline u64 held_now(const i64* state, u64 window) {
    i64 left = state[COUNT] - state[CONSUMED];
    return left <= 0 ? 0 : ((u64)left < window ? (u64)left : window);
}

// Which slots of the current window hold outputs: a byte for each, eight a word.
extern "C" __global__ void __launch_bounds__(THREADS) eclip_valid(
    u64 window, u64* valid, const i64* state
) {
    u64 step = (u64)gridDim.x * blockDim.x, held = held_now(state, window);
    const u64 ones = 0x0101010101010101ull;
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at * 8 < window; at += step) {
        u64 some = held <= at * 8 ? 0 : held - at * 8;
        valid[at] = some >= 8 ? ones : (some ? ones >> (64 - 8 * some) : 0);
    }
}

// The outputs of the current window, where a tensor can hold them: copied from a list of all, or, if
// the slots are the producer's own, where they are. Slots that hold nothing become 0, which is a legal
// position.
extern "C" __global__ void __launch_bounds__(THREADS) eclip_values(
    u64 window, OUT* slots, const OUT* list, const i64* state
) {
    u64 step = (u64)gridDim.x * blockDim.x, held = held_now(state, window);
    u64 slot = (list ? 0 : held) + (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (list) list += state[CONSUMED];
    for (; slot < window; slot += step) slots[slot] = slot < held ? list[slot] : (OUT)0;
}

// A buffer for the longest output, where this one did not reach.
extern "C" __global__ void __launch_bounds__(THREADS) eclip_clear(
    OUT* buffer, u64 capacity, const i64* state
) {
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 slot = state[COUNT] + (u64)blockIdx.x * blockDim.x + threadIdx.x; slot < capacity;
         slot += step)
        buffer[slot] = (OUT)0;
}

// Word `item` of a window's rows: where it is in the tensor that the slots are positions of.
__device__ inline u64 place_of(const i64* slots, u64 item, u64 row) {
    if (row == 1) return (u64)slots[item];
    u64 slot = item / row;
    return (u64)slots[slot] * row + (item - slot * row);
}

template <typename WORD>
__device__ inline void take_rows(
    const WORD* from, WORD* to, const i64* slots, u64 window, u64 row, u64 held
) {
    u64 step = (u64)gridDim.x * blockDim.x, end = window * row, full = held * row;
    for (u64 p = (u64)blockIdx.x * blockDim.x + threadIdx.x; p < end; p += AT_ONCE * step) {
        u64 place[AT_ONCE];
        WORD taken[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (p + k * step < full) place[k] = place_of(slots, p + k * step, row);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            taken[k] = p + k * step < full ? from[place[k]] : (WORD)0;
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (p + k * step < end) to[p + k * step] = taken[k];
    }
}

template <typename WORD>
__device__ inline void put_rows(const WORD* from, WORD* to, const i64* slots, u64 row, u64 held) {
    u64 step = (u64)gridDim.x * blockDim.x, full = held * row;
    for (u64 p = (u64)blockIdx.x * blockDim.x + threadIdx.x; p < full; p += AT_ONCE * step) {
        u64 place[AT_ONCE];
        WORD given[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (p + k * step < full) {
                place[k] = place_of(slots, p + k * step, row);
                given[k] = from[p + k * step];
            }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (p + k * step < full) to[place[k]] = given[k];
    }
}

// Rows of a tensor at the positions of a window, and 0 where a slot holds none. A row is so many
// words of so many bytes. The window is the part of a list that begins at CONSUMED, or all there is.
extern "C" __global__ void __launch_bounds__(THREADS) eclip_take(
    const void* from, void* to, const i64* slots, int listed, u64 window, u64 row, int bytes,
    const i64* state
) {
    u64 held = held_now(state, window);
    if (listed) slots += state[CONSUMED];
    if (bytes == 8) take_rows((const u64*)from, (u64*)to, slots, window, row, held);
    else if (bytes == 4) take_rows((const u32*)from, (u32*)to, slots, window, row, held);
    else if (bytes == 2) take_rows((const u16*)from, (u16*)to, slots, window, row, held);
    else take_rows((const u8*)from, (u8*)to, slots, window, row, held);
}

// A window's rows to their positions in a tensor. Slots that hold none are not read.
extern "C" __global__ void __launch_bounds__(THREADS) eclip_put(
    const void* from, void* to, const i64* slots, int listed, u64 window, u64 row, int bytes,
    const i64* state
) {
    u64 held = held_now(state, window);
    if (listed) slots += state[CONSUMED];
    if (bytes == 8) put_rows((const u64*)from, (u64*)to, slots, row, held);
    else if (bytes == 4) put_rows((const u32*)from, (u32*)to, slots, row, held);
    else if (bytes == 2) put_rows((const u16*)from, (u16*)to, slots, row, held);
    else put_rows((const u8*)from, (u8*)to, slots, row, held);
}

// Suppression. Boxes are (x0, y0, x1, y1), already in the order of falling scores.

__device__ inline float overlap(float4 a, float4 b) {
    float w = fminf(a.z, b.z) - fmaxf(a.x, b.x), h = fminf(a.w, b.w) - fmaxf(a.y, b.y);
    if (w <= 0 || h <= 0) return 0;
    float both = w * h;
    return both / ((a.z - a.x) * (a.w - a.y) + (b.z - b.x) * (b.w - b.y) - both);
}

// A bit for every later box that one box would suppress; 64 by 64 boxes a block of 64 threads.
extern "C" __global__ void eclip_overlaps(const float4* boxes, u64 n, float threshold, u64* masks) {
    __shared__ float4 theirs[64];
    u64 words = (n + 63) / 64, row = (u64)blockIdx.y * 64 + threadIdx.x, column = blockIdx.x;
    if (column * 64 + threadIdx.x < n) theirs[threadIdx.x] = boxes[column * 64 + threadIdx.x];
    __syncthreads();
    if (row >= n) return;
    u64 bits = 0;
    float4 own = boxes[row];
    for (u64 k = 0; k < 64 && column * 64 + k < n; ++k)
        if (column * 64 + k > row && overlap(own, theirs[k]) > threshold) bits |= 1ull << k;
    masks[row * words + column] = bits;
}

// One block walks the boxes; `out` in shared memory is which are suppressed. Window by window, as
// CONSUMED says: going on walks again, because the walk is short and its state as long as the input.
extern "C" __global__ void __launch_bounds__(THREADS) eclip_suppress(
    const u64* masks, const i64* order, const float* scores, u64 n, float lowest, i64* buffer,
    u64 capacity, i64* arena, u64 arena_words, i64* state, int opens
) {
    extern __shared__ u64 out[];
    u64 words = (n + 63) / 64, kept = 0, low = opens ? 0 : (u64)state[CONSUMED];
    for (u64 word = threadIdx.x; word < words; word += THREADS) out[word] = 0;
    __syncthreads();
    for (u64 box = 0; box < n; ++box) {
        if (!(scores[box] > lowest)) break;  // they fall
        if (out[box / 64] >> (box % 64) & 1) continue;
        if (threadIdx.x == 0) {
            if (kept >= low && kept < low + capacity) buffer[kept - low] = order[box];
            else if (opens && kept >= capacity && kept - capacity < arena_words)
                arena[kept - capacity] = order[box];
        }
        ++kept;
        __syncthreads();
        for (u64 word = box / 64 + threadIdx.x; word < words; word += THREADS)
            out[word] |= masks[box * words + word];
        __syncthreads();
    }
    if (opens && threadIdx.x == 0) {
        state[COUNT] = kept;
        close_request(state, capacity);
    }
}

// Routing: one block an expert, which walks all (token, choice) pairs and keeps its own in order.
// Window by window, as CONSUMED says; empty places hold -1. COUNT is the longest expert's.
extern "C" __global__ void __launch_bounds__(THREADS) eclip_route(
    const i64* chosen, u64 pairs, i64* buffer, u64 capacity, i64* counts, i64* state, int opens
) {
    __shared__ u32 sums[WARPS];
    u64 low = opens ? 0 : (u64)state[CONSUMED], before = 0;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64* mine = buffer + blockIdx.x * capacity;
    for (u64 first = 0; first < pairs; first += THREADS) {
        u64 pair = first + threadIdx.x;
        bool own = pair < pairs && chosen[pair] == (i64)blockIdx.x;
        u32 votes = __ballot_sync(~0u, own);
        if (lane == 0) sums[warp] = __popc(votes);
        __syncthreads();
        u64 position = before + __popc(votes & ((1u << lane) - 1));
        for (int other = 0; other < WARPS; ++other) {
            if (other < warp) position += sums[other];
            before += sums[other];
        }
        if (own && position >= low && position < low + capacity) mine[position - low] = (i64)pair;
        __syncthreads();
    }
    u64 held = before <= low ? 0 : (before - low < capacity ? before - low : capacity);
    for (u64 slot = held + threadIdx.x; slot < capacity; slot += THREADS) mine[slot] = -1;
    if (threadIdx.x == 0) counts[blockIdx.x] = (i64)before;
    if (!opens) return;
    if (is_last_block(state + FINISHED) && threadIdx.x == 0) {
        i64 longest = 0;
        for (u32 expert = 0; expert < gridDim.x; ++expert) {
            i64 count = ((volatile i64*)counts)[expert];
            if (count > longest) longest = count;
        }
        state[COUNT] = longest;
        close_request(state, capacity);
    }
}

// Expansion, which nothing bounds: input i stands in the output as often as its length says.
// `ends` are the sums of the lengths so far. Window by window, as CONSUMED says; a window may begin
// and end inside an input.
extern "C" __global__ void __launch_bounds__(THREADS) eclip_expand(
    const i64* ends, u64 n, i64* buffer, u64 capacity, i64* arena, u64 arena_words, i64* state,
    int opens
) {
    i64 count = n ? ends[n - 1] : 0, low = opens ? 0 : state[CONSUMED];
    i64 room = (i64)(capacity + (opens ? arena_words : 0));
    i64 high = count - low < room ? count : low + room;
    for (i64 p = low + (i64)blockIdx.x * blockDim.x + threadIdx.x; p < high;
         p += (i64)gridDim.x * blockDim.x) {
        u64 first = 0, last = n - 1;  // the first input whose outputs reach beyond p
        while (first < last) {
            u64 middle = (first + last) / 2;
            if (ends[middle] > p) last = middle;
            else first = middle + 1;
        }
        u64 slot = (u64)(p - low);
        if (slot < capacity) buffer[slot] = (i64)first;
        else arena[slot - capacity] = (i64)first;
    }
    if (opens && is_last_block(state + FINISHED) && threadIdx.x == 0) {
        state[COUNT] = count;
        close_request(state, capacity);
    }
}
