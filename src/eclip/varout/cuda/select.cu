// Compaction: its producer, a consumer, and both in one kernel. Follows state.cu.

__device__ inline bool is_set(FLAG bits) {
    return FLOATING ? (FLAG)(bits << 1) != 0 : bits != 0;
}

__device__ inline OUT output_of(const OUT* values, u64 i) {
    return VALUES ? values[i] : (OUT)i;
}

// Which items of a tile are set: a bit for each of the thread's items, and in `sums` how many come
// before each row of 32. Rows are in the order of the inputs. Returns how many are set in all.
__device__ inline u32 rank_tile(const FLAG* flags, u64 n, u64 tile, u32* sums, u32& mine) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 begin = tile * TILE;
    const FLAG* own_flags = flags + begin + threadIdx.x;
    FLAG given[ITEMS];  // all asked for before the first vote, which waits for what it votes on
    if (begin + TILE <= n) {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) given[item] = own_flags[item * THREADS];
    } else {
        int left = n > begin + threadIdx.x ? (int)(n - begin - threadIdx.x) : 0;
#pragma unroll
        for (int item = 0; item < ITEMS; ++item)
            given[item] = item * THREADS < left ? own_flags[item * THREADS] : (FLAG)0;
    }
    mine = 0;
    __syncthreads();  // of the tile before
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        bool set = is_set(given[item]);
        u32 votes = __ballot_sync(~0u, set);
        if (lane == 0) sums[item * WARPS + warp] = __popc(votes);
        mine |= (u32)set << item;
    }
    __syncthreads();
    if (warp == 0) {
        const int each = ITEMS * WARPS / 32;
        u32 here[each], own = 0;
#pragma unroll
        for (int k = 0; k < each; ++k) own += here[k] = sums[lane * each + k];
        u32 up = own;
        for (int step = 1; step < 32; step *= 2) {
            u32 other = __shfl_up_sync(~0u, up, step);
            if (lane >= step) up += other;
        }
        u32 before = up - own;
#pragma unroll
        for (int k = 0; k < each; ++k) {
            sums[lane * each + k] = before;
            before += here[k];
        }
        if (lane == 31) sums[ITEMS * WARPS] = up;
    }
    __syncthreads();
    return sums[ITEMS * WARPS];
}

// Outputs of a ranked tile whose position lies in [low, high) go to the window; with an arena, those
// from `high` on go there, as far as it reaches. Windows are halves of a buffer or all of it, so that
// none crosses its end and one division, of `low`, places all of a window. Most tiles lie in a window
// as a whole, and nothing has to be asked of each of their outputs.
__device__ inline void write_tile(
    const OUT* values, u64 tile, u32 mine, const u32* sums, u64 before, u64 low, u64 high,
    OUT* window, OUT* arena, u64 arena_words
) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 first = tile * TILE + threadIdx.x;
    bool inside = before >= low && before + sums[ITEMS * WARPS] <= high;
    OUT* begin = window + (i64)(before - low);  // used only where it lies in the window
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        bool set = mine >> item & 1;
        u32 votes = __ballot_sync(~0u, set);
        if (!set) continue;
        u32 rank = sums[item * WARPS + warp] + __popc(votes & ((1u << lane) - 1));
        OUT value = output_of(values, first + (u64)item * THREADS);
        u64 position = before + rank;
        if (inside) begin[rank] = value;
        else if (position >= low && position < high) window[position - low] = value;
        else if (position >= high && position - high < arena_words) arena[position - high] = value;
    }
}

// A tile's sum as others see it: the request's number, whether it is the tile's own sum (1) or that
// of all tiles up to it (2), and the sum.
__device__ inline u64 packed(u64 epoch, u64 kind, u64 sum) {
    return epoch << 34 | kind << 32 | sum;
}

__device__ inline u64 read_packed(const u64* at) { return *(volatile const u64*)at; }

// By the first warp: the number of outputs before this tile. Earlier tiles were begun earlier, so
// they run or have finished. Hundreds of tiles are under way at once and every look is a round trip
// to memory, so 128 tiles are looked at together.
__device__ inline u32 look_back(u64* tiles, u64 tile, u64 epoch, u32 own) {
    int lane = threadIdx.x % 32;
    if (tile == 0) {
        if (lane == 0) *(volatile u64*)tiles = packed(epoch, 2, own);
        return 0;
    }
    if (lane == 0) *(volatile u64*)(tiles + tile) = packed(epoch, 1, own);
    u32 before = 0;
    u32 totals = 0;
    for (i64 at = (i64)tile - 1 - lane; !totals; at -= 32 * BACK_AT_ONCE) {
        u64 seen[BACK_AT_ONCE];
        bool waiting;
        do {
            waiting = false;
#pragma unroll
            for (int k = 0; k < BACK_AT_ONCE; ++k) {
                i64 other = at - 32 * k;
                // Before the first tile there is nothing.
                seen[k] = other < 0 ? packed(epoch, 2, 0) : read_packed(tiles + other);
                waiting |= seen[k] >> 34 != epoch || (seen[k] >> 32 & 3) == 0;
            }
        } while (__any_sync(~0u, waiting));
#pragma unroll
        for (int k = 0; k < BACK_AT_ONCE; ++k) {
            if (totals) continue;  // nearer tiles had the sum of all that come before these
            totals = __ballot_sync(~0u, (seen[k] >> 32 & 3) == 2);
            if (!totals || lane < __ffs(totals)) before += (u32)seen[k];
        }
    }
    for (int step = 16; step; step /= 2) before += __shfl_xor_sync(~0u, before, step);
    if (lane == 0) *(volatile u64*)(tiles + tile) = packed(epoch, 2, before + own);
    return before;
}

__device__ inline u64 tiles_in(u64 n) { return n ? (n + TILE - 1) / TILE : 1; }

// The tile of the next ticket, if there is one left: its outputs among the first `capacity` are
// written, and the excess to an arena if there is one. The sum up to it stays behind for `resume`.
// Returns the ticket.
__device__ inline u64 scan_tile(
    const FLAG* flags, const OUT* values, u64 n, OUT* buffer, u64 capacity, OUT* arena,
    u64 arena_words, u64* tiles, i64* state
) {
    __shared__ u32 sums[ITEMS * WARPS + 1];
    __shared__ u64 ticket;
    __shared__ u64 epoch;
    __shared__ u32 before;
    u64 count = tiles_in(n);
    __syncthreads();  // of the tile before
    if (threadIdx.x == 0) {
        u64 number = (u64)((volatile i64*)state)[EPOCH];  // on its way while the ticket is
        u64 taken = atomicAdd((u64*)state + TICKET, 1ull);
        epoch = number;
        ticket = taken;
    }
    __syncthreads();
    u64 tile = ticket;
    if (tile >= count) return tile;
    u32 mine, own = rank_tile(flags, n, tile, sums, mine);
    if (threadIdx.x < 32) {
        u32 found = look_back(tiles, tile, epoch, own);
        if (threadIdx.x == 0) {
            before = found;
            if (tile == count - 1) ((volatile i64*)state)[COUNT] = (i64)found + own;
        }
    }
    __syncthreads();
    write_tile(values, tile, mine, sums, before, 0, capacity, buffer, arena, arena_words);
    return tile;
}

// Outputs [low, high) into the buffer: every tile's sum is known, so that only tiles with such
// outputs are read again.
__device__ inline void resume_tiles(
    const FLAG* flags, const OUT* values, u64 n, OUT* buffer, u64 modulo, u64 low, u64 high,
    const u64* tiles, u64 first_tile, u64 step
) {
    __shared__ u32 sums[ITEMS * WARPS + 1];
    u64 count = tiles_in(n);
    OUT* window = buffer + low % modulo;
    for (u64 tile = first_tile; tile < count; tile += step) {
        u64 end = (u32)read_packed(tiles + tile);
        u64 before = tile ? (u32)read_packed(tiles + tile - 1) : 0;
        if (end <= low) continue;
        if (before >= high) break;
        u32 mine;
        rank_tile(flags, n, tile, sums, mine);
        write_tile(values, tile, mine, sums, before, low, high, window, window, 0);
    }
}

// Outputs [low, high), of which those from `capacity` on are in the arena. Several a thread at once:
// an output is an index, a value and a store, each of which waits for the one before.
__device__ inline void consume_range(
    const float* x, float* y, const i64* buffer, u64 modulo, u64 capacity, const i64* arena, u64 low,
    u64 high
) {
    const i64* window = buffer + low % modulo;
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 p = low + (u64)blockIdx.x * blockDim.x + threadIdx.x; p < high; p += AT_ONCE * step) {
        i64 index[AT_ONCE];
        float value[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            u64 at = p + k * step;
            index[k] = -1;
            if (at < high) index[k] = at < capacity ? window[at - low] : arena[at - capacity];
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (index[k] >= 0) value[k] = x[index[k]];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (index[k] >= 0) y[index[k]] = APPLY(value[k]);
    }
}

// Opens a request: counts everything, writes what fits, which counts as produced.
// Launched with a block for each tile, so that the last tile's block can close the request while
// others still write, and finished blocks need not be counted. When that block knows its sum, the sums
// of all earlier tiles are published, by threads that had read the request's number and taken their
// tickets before: a sum carries the number and lies at the ticket. After that no block looks at the
// state again, and no block has yet to start.
extern "C" __global__ void __launch_bounds__(THREADS, SELECTING) eclip_select(
    const FLAG* flags, const OUT* values, u64 n, OUT* buffer, u64 capacity, OUT* arena,
    u64 arena_words, u64* tiles, i64* state, u64 handle, int loops
) {
    u64 tile = scan_tile(flags, values, n, buffer, capacity, arena, arena_words, tiles, state);
    if (tile == tiles_in(n) - 1 && threadIdx.x == 0) {
        close_request(state, capacity);
        if (loops) cudaGraphSetConditional(handle, state[PRODUCED] < state[COUNT]);
    }
}

// The producer goes on at PRODUCED, if the place of the next window is free. Four blocks a unit have
// the registers they need; left to itself the compiler takes more, and three run at once.
extern "C" __global__ void __launch_bounds__(THREADS, 4) eclip_resume(
    const FLAG* flags, const OUT* values, u64 n, OUT* buffer, u64 modulo, u64 window,
    const u64* tiles, const i64* state
) {
    u64 low = state[PRODUCED], count = state[COUNT];
    if (low >= count || low - state[CONSUMED] > modulo - window) return;
    u64 high = low + window < count ? low + window : count;
    resume_tiles(flags, values, n, buffer, modulo, low, high, tiles, blockIdx.x, gridDim.x);
}

extern "C" __global__ void __launch_bounds__(THREADS) eclip_consume(
    const float* x, float* y, const i64* buffer, u64 modulo, const i64* arena, u64 arena_words,
    int what, u64 window, i64* state, u64 handle
) {
    u64 low = state[CONSUMED], high = state[PRODUCED], count = state[COUNT];
    if (what == EVERYTHING) {
        // What an exhausted arena has no place for was not written; the host raises for it.
        low = 0, high = count < modulo + arena_words ? count : modulo + arena_words;
    } else if (what == WINDOW) {
        high = low + window < count ? low + window : count;
    } else if (what == WINDOW_KEEP && low + window < high) {
        high = low + window;
    }
    consume_range(x, y, buffer, modulo, what == EVERYTHING ? modulo : ~0ull, arena, low, high);
    if (what != WINDOW) return;
    if (is_last_block(state + FINISHED) && threadIdx.x == 0) {
        state[FINISHED] = 0;
        state[CONSUMED] = state[PRODUCED] = high;
        cudaGraphSetConditional(handle, high < count);
    }
}

// After producer and consumer of a turn have run side by side.
extern "C" __global__ void eclip_advance(u64 modulo, u64 window, i64* state, u64 handle) {
    i64 low = state[CONSUMED], high = state[PRODUCED], count = state[COUNT];
    if (high < count && high - low <= (i64)(modulo - window))
        state[PRODUCED] = high + (i64)window < count ? high + (i64)window : count;
    state[CONSUMED] = low + (i64)window < high ? low + (i64)window : high;
    cudaGraphSetConditional(handle, state[PRODUCED] < count);
}

// Waits until all blocks of a cooperative launch have come. The last to come begins the next turn;
// with ``closes`` it also closes the request, so that no block has to at the end.
__device__ inline void wait_for_all(i64* state, bool closes) {
    __syncthreads();
    if (threadIdx.x == 0) {
        i64 turn = ((volatile i64*)state)[TURN];
        __threadfence();
        if (atomicAdd((u64*)state + BARRIER, 1ull) == gridDim.x - 1) {
            __threadfence();
            if (closes) close_request(state, ~0ull >> 1);
            state[BARRIER] = 0;
            __threadfence();
            ((volatile i64*)state)[TURN] = turn + 1;
        } else {
            while (((volatile i64*)state)[TURN] == turn) __nanosleep(32);
        }
        __threadfence();
    }
    __syncthreads();
}

// Producer and consumer in one launch; a side that cannot go on waits for the other.
extern "C" __global__ void __launch_bounds__(THREADS) eclip_resident(
    const FLAG* flags, const OUT* values, u64 n, const float* x, float* y, OUT* buffer, u64 capacity,
    u64* tiles, i64* state
) {
    // With a block for each tile no block needs another tile.
    while (scan_tile(flags, values, n, buffer, capacity, buffer, 0, tiles, state) < tiles_in(n)
           && gridDim.x < tiles_in(n)) {}
    wait_for_all(state, true);
    u64 count = ((volatile i64*)state)[COUNT];
    for (u64 low = 0; low < count; low += capacity) {
        u64 high = low + capacity < count ? low + capacity : count;
        if (low) {
            resume_tiles(flags, values, n, buffer, capacity, low, high, tiles, blockIdx.x, gridDim.x);
            wait_for_all(state, false);
        }
        consume_range(x, y, (const i64*)buffer, capacity, ~0ull, 0, low, high);
        if (high < count) wait_for_all(state, false);
    }
}

// Every output is consumed where it is found. A block adds what it found and that it has finished in
// one word: every addition to a word takes its turn, about a nanosecond each.
extern "C" __global__ void __launch_bounds__(THREADS) eclip_merged(
    const FLAG* flags, u64 n, const float* x, float* y, i64* state
) {
    __shared__ u32 sums[WARPS];
    u64 step = (u64)gridDim.x * THREADS;
    u32 found = 0;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < n; i += READ_AT_ONCE * step) {
        FLAG given[READ_AT_ONCE];
        float value[READ_AT_ONCE];
#pragma unroll
        for (int k = 0; k < READ_AT_ONCE; ++k)
            given[k] = i + k * step < n ? flags[i + k * step] : (FLAG)0;
#pragma unroll
        for (int k = 0; k < READ_AT_ONCE; ++k)
            if (is_set(given[k])) value[k] = x[i + k * step];
#pragma unroll
        for (int k = 0; k < READ_AT_ONCE; ++k)
            if (is_set(given[k])) {
                y[i + k * step] = APPLY(value[k]);
                ++found;
            }
    }
    found = __reduce_add_sync(~0u, found);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = found;
    __syncthreads();
    if (threadIdx.x) return;
    u64 mine = 0;
    for (int warp = 0; warp < WARPS; ++warp) mine += sums[warp];
    u64 before = atomicAdd((u64*)state + SUM, 1ull << FINISHED_BIT | mine);
    if (before >> FINISHED_BIT == gridDim.x - 1) {
        state[COUNT] = (i64)((before & ((1ull << FINISHED_BIT) - 1)) + mine);
        state[SUM] = 0;
        close_request(state, state[COUNT]);
    }
}
