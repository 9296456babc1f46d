// Attention of single queries over paged keys and values, as in decode steps. Compiled at run time by NVRTC
// (cuda_attention.py), which defines the constants named below.
//
//   FLOAT16        1: queries, keys and values are fp16; 0: bf16
//   HEADS, GROUP   heads that an item may be of; query heads of each, 8 at most
//   SHARE          of these heads that have a key head in common
//   SIZE           of a head: 64, 128 or 256;  TOKENS: of a page
//   WARPS          of a block that multiply (one more ends items): an even number
//   UNITS          copies that a warp has room for
//   PART           keys of a part, about; each is computed alone, so that a result does not depend on who computes it
//   LEAST, SHORTEST  parts of a query, as far as they have so many keys each, about
//   WINDOW, SOFTCAP, SINKS   1: there is one
//
// An item is a part of one query's keys at one such head; parts begin at the first key that the query sees and are of one
// length, since a short one takes a block as long to end as a whole one. Every block makes the list of all items from the
// lengths and takes every gridDim-th. Its warps share an item's tiles of 16 keys. The matrix unit multiplies
// keys [16 keys x 16 columns] by queries [16 columns x 8 heads], and values [16 columns x 16 keys] by weights [16 keys x 8 heads].
//
// What a warp reads comes in units of 16 rows of up to 128 columns: the queries of an item, then the keys and the values of
// each of its tiles. It copies them for itself, UNITS - 1 ahead, across items. When it has no more tiles of an item it leaves
// its sums in shared memory and goes on with the next; it waits for others only if they are a whole item behind. The last
// warp adds up what the others leave, writes it, and says that the part is done; who says so last merges all parts of the
// query, in a fixed order.
//
// Lengths and tables are read before the wait for the launch before, which writes queries, keys and values: what wrote them
// has ended when that one begins.

#include "common.cuh"
#include "attention.cuh"

// For what a launch that overlaps with this one, or another block, wrote.
DI float2 load_pair(const float* p) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0,%1},[%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}
DI float4 load_four(const float* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}

struct Arguments {
  const u16* q;            // [T, HEADS * GROUP, SIZE]
  const u16* k_pages;      // [P, TOKENS, HEADS / SHARE, SIZE]
  const u16* v_pages;
  const int* tables;       // [B, M]
  const int* query_start;  // [B + 1]
  const int* seq_lens;     // [B]
  const float* sinks;      // [HEADS * GROUP]
  u16* out;                // [T, HEADS * GROUP, SIZE]
  float* partial;          // [T, HEADS * GROUP, parts, SIZE]
  float* extremes;         // [T, HEADS * GROUP, parts, 2]: maximum (base 2) and sum
  u32* arrived;            // [T * HEADS] zeros, and zeros afterwards
  u32 k_page, k_token, k_head, v_page, v_token, v_head, q_token, q_head;
  int table_row, tokens, sequences, parts, window;
  float scale, softcap;
};

constexpr int THREADS = 32 * (WARPS + 1);
constexpr int MERGED = 8;                                       // parts on their way
constexpr int RING = WARPS * UNITS * UNIT, VALUES = WARPS * GROUP * VALUE_ROW;
// [WARPS, UNITS] units; [WARPS, GROUP] values, maximum and sum of a part; two barriers; whether the last part of a query came;
// of T tokens: parts before, positions, sequences, lengths of parts
extern __shared__ __align__(128) unsigned char dynamic[];

struct Part {
  int token, head, number, from, until;                         // keys
  DI int tiles() const { return (until - from + TILE - 1) / TILE; }
};

// Tiles are dealt to warps in turn, on from item to item: a warp's place in an item is the number of its first tile.
struct Deal {
  int first;                                                    // warp
  DI Deal() : first(0) {}
  DI int place(int warp) const { return warp >= first ? warp - first : warp - first + WARPS; }
  DI void next(const Part& part) { first = (u32)(first + part.tiles()) % WARPS; }
};

// All items: those of a token follow each other, and the heads of a part.
struct Work {
  int *before, *position, *sequence, *length;                   // [T + 1], [T], [T]; -1: sees no key; [T] keys of a part
  int total;
  DI int low(const Arguments& a, int token) const { return WINDOW ? max(0, position[token] + 1 - a.window) : 0; }
  DI int parts(int token) const { return before[token + 1] - before[token]; }
  DI Work(const Arguments& a, int lane, int warp) {
    before = (int*)dynamic + RING / 4 + VALUES + 2 * WARPS * GROUP + 5;
    position = before + a.tokens + 1, sequence = position + a.tokens, length = sequence + a.tokens;
    int *starts = (int*)dynamic, *lengths = starts + a.sequences + 1;   // no unit is on its way yet
    for (int b = threadIdx.x; b <= a.sequences; b += THREADS) {
      starts[b] = load_int(a.query_start + b);
      if (b < a.sequences) lengths[b] = load_int(a.seq_lens + b);
    }
    __syncthreads();
    for (int token = threadIdx.x; token < a.tokens; token += THREADS) {
      int first = 0, end = a.sequences;                         // the last that starts at the token or before
      while (end - first > 1) {
        int middle = (first + end) / 2;
        if (starts[middle] <= token) first = middle; else end = middle;
      }
      int at = lengths[first] - starts[first + 1] + token;
      bool there = token < starts[a.sequences] && at >= 0;      // with a key to see
      position[token] = there ? at : 0;
      sequence[token] = there ? first : -1;
      int keys = position[token] + 1 - low(a, token);
      int wanted = max(1, max((keys + PART / 2) / PART, min(LEAST, (keys + SHORTEST / 2) / SHORTEST)));
      length[token] = (keys + wanted * TILE - 1) / (wanted * TILE) * TILE;
      before[token + 1] = there ? (keys + length[token] - 1) / length[token] : 0;
    }
    __syncthreads();
    if (warp == 0) {
      u32 sum = 0;
      for (int first = 0; first < a.tokens; first += 32) {
        int token = first + lane;
        u32 count = token < a.tokens ? before[token + 1] : 0;
        UNROLL for (int step = 1; step < 32; step *= 2) {
          u32 other = __shfl_up_sync(~0u, count, step);
          if (lane >= step) count += other;
        }
        if (token < a.tokens) before[token + 1] = sum + count;
        sum += __shfl_sync(~0u, count, 31);
      }
      if (lane == 0) before[0] = 0;
    }
    __syncthreads();
    total = before[a.tokens] * HEADS;
  }
  DI Part part(const Arguments& a, int item, int lane) const {
    int row = item / HEADS, token = 0;
    for (int first = 0; first < a.tokens; first += 32) {
      u32 votes = __ballot_sync(~0u, first + lane < a.tokens && before[first + lane + 1] <= row);
      token += __popc(votes);
      if (votes != ~0u) break;
    }
    int number = row - before[token], from = low(a, token) + number * length[token];
    return {token, item % HEADS, number, from, min(position[token] + 1, from + length[token])};
  }
};

// A tile of keys, and the page of each of them.
struct Tile {
  Part part;
  int item, key, page;
  bool first;                                                   // of the warp in its part
  Deal deal;
  DI Tile() : item((int)blockIdx.x - (int)gridDim.x), key(0), page(0), first(true) { part.from = part.until = 0; }
};

// The copies of a warp: one unit after the other, and the pages of the next tile.
struct Copies {
  Tile now, later;
  int unit;                                                     // -1: queries
  DI void follow(const Arguments& a, const Work& work, Tile& tile, int lane, int warp) {
    tile.key += WARPS * TILE, tile.first = false;
    while (tile.key >= tile.part.until) {
      tile.item += gridDim.x, tile.first = true;
      if (tile.item >= work.total) return;
      tile.deal.next(tile.part);
      tile.part = work.part(a, tile.item, lane);
      tile.key = tile.part.from + tile.deal.place(warp) * TILE;
    }
    int key = min(tile.key + lane % TILE, tile.part.until - 1);
    tile.page = load_int(a.tables + (u64)work.sequence[tile.part.token] * a.table_row + key / TOKENS);
  }
  DI Copies(const Arguments& a, const Work& work, int lane, int warp) : unit(-1) {
    follow(a, work, now, lane, warp);
    later = now;
    if (later.item < work.total) follow(a, work, later, lane, warp);
  }
  DI void copy(const Arguments& a, const Work& work, u32 to, int lane, int warp) {
    if (now.item < work.total) {
      const Part& part = now.part;
      if (unit < 0) {
        const u16* from = a.q + (u64)part.token * a.q_token + (u64)part.head * GROUP * a.q_head;
        for (int i = lane; i < GROUP * SIZE / 8; i += 32) {
          int g = i / (SIZE / 8), chunk = i % (SIZE / 8);
          copy_rows(to + place(g, chunk, SIZE / 8), (u64)(from + g * a.q_head + chunk * 8));
        }
      } else {
        bool keys = unit < SEGMENTS;
        int chunk = lane % CHUNKS, column = (keys ? unit : unit - SEGMENTS) * COLS + chunk * 8;
        u32 page_step = keys ? a.k_page : a.v_page, token_step = keys ? a.k_token : a.v_token;
        const u16* from = (keys ? a.k_pages + part.head / SHARE * (u64)a.k_head : a.v_pages + part.head / SHARE * (u64)a.v_head) + column;
        UNROLL for (int j = 0; j < TILE; j += 32 / CHUNKS) {
          int row = j + lane / CHUNKS, key = min(now.key + row, part.until - 1);
          u32 page = __shfl_sync(~0u, now.page, row);
          copy_rows(to + place(row, chunk, CHUNKS), (u64)(from + (u64)page * page_step + (u32)(key % TOKENS) * token_step));
        }
      }
      if (++unit == 2 * SEGMENTS) {
        now = later;
        if (later.item < work.total) follow(a, work, later, lane, warp);
        unit = now.first ? -1 : 0;
      }
    }
    commit();
  }
};

// A sum over all keys of a query.
DI void finish(const Arguments& a, Result result, int token, int query_head, int column) {
#if SINKS
  result.add(a.sinks[query_head] * LOG2E, 1, float4{0, 0, 0, 0});
#endif
  *(uint2*)(a.out + ((u64)token * (HEADS * GROUP) + query_head) * SIZE + column) = result.halves();
}

// What the warps of a block have of an item: [WARPS, GROUP] rows of values, their maximum and their sum of weights.
struct Shared {
  float *values, *extremes;
  DI Shared() : values((float*)(dynamic + RING)), extremes(values + VALUES) {}
  DI void put(int row, int g, int column, const Result& result) const {
    *(float4*)(values + (row * GROUP + g) * VALUE_ROW + column) = result.sum;
    if (column == 0) extremes[(row * GROUP + g) * 2] = result.peak, extremes[(row * GROUP + g) * 2 + 1] = result.mass;
  }
  // The first rows of four columns of a head, in order.
  DI Result sum(int rows, int g, int column) const {
    Result result;
    UNROLL for (int n = 0; n < WARPS; n++)
      if (n < rows) {
        const float* extreme = extremes + (n * GROUP + g) * 2;
        result.add(extreme[0], extreme[1], *(const float4*)(values + (n * GROUP + g) * VALUE_ROW + column));
      }
    return result;
  }
};

// What one warp does when an item is computed: its sum over the warps is an answer, or one part of several.
DI void write_item(const Arguments& a, const Shared& shared, const Part& part, int rows, bool answer, int lane) {
  ROLLED for (int i = lane; i < GROUP * SIZE / 4; i += 32) {
    int g = i / (SIZE / 4), column = i % (SIZE / 4) * 4, query_head = part.head * GROUP + g;
    Result result = shared.sum(rows, g, column);
    if (answer) {
      finish(a, result, part.token, query_head, column);
    } else {
      u64 at = ((u64)part.token * (HEADS * GROUP) + query_head) * a.parts + part.number;
      *(float4*)(a.partial + at * SIZE + column) = result.sum;
      if (column == 0) *(float2*)(a.extremes + at * 2) = {result.peak, result.mass};
    }
  }
}

// Every STEP-th part, from `first` on, of four columns of a query head.
template <int STEP> DI Result merged(const Arguments& a, const Part& part, int parts, int first, int g, int column) {
  u64 at = ((u64)part.token * (HEADS * GROUP) + part.head * GROUP + g) * a.parts;
  Result result;
  ROLLED for (int n = first; n < parts; n += STEP * MERGED) {
    float2 extremes[MERGED];
    float4 values[MERGED];
    UNROLL for (int m = 0; m < MERGED; m++) {
      u64 from = at + min(n + m * STEP, parts - 1);
      extremes[m] = load_pair(a.extremes + from * 2), values[m] = load_four(a.partial + from * SIZE + column);
    }
    UNROLL for (int m = 0; m < MERGED; m++)
      if (n + m * STEP < parts) result.add(extremes[m].x, extremes[m].y, values[m]);
  }
  return result;
}

// All parts of a query at one head of items, in an order that does not depend on who merges: SHARES sums, then theirs.
constexpr int COLUMNS = GROUP * SIZE / 4, SHARES = COLUMNS <= 32 ? WARPS : COLUMNS <= 64 ? WARPS / 2 : 1;
DI void merge_alone(const Arguments& a, const Part& part, int parts, int lane) {
  ROLLED for (int i = lane; i < COLUMNS; i += 32) {
    int g = i / (SIZE / 4), column = i % (SIZE / 4) * 4;
    Result result;
    ROLLED for (int share = 0; share < min(SHARES, parts); share++) {
      Result other = merged<SHARES>(a, part, parts, share, g, column);
      result.add(other.peak, other.mass, other.sum);
    }
    finish(a, result, part.token, part.head * GROUP + g, column);
  }
}
// The same by all warps but the last, which comes along.
DI void merge_together(const Arguments& a, const Shared& shared, const Part& part, int parts, int lane, int warp) {
  ROLLED for (int i = warp / SHARES * 32 + lane; i < COLUMNS && warp < WARPS; i += WARPS / SHARES * 32) {
    int g = i / (SIZE / 4), column = i % (SIZE / 4) * 4;
    Result result = merged<SHARES>(a, part, parts, warp % SHARES, g, column);
    if (SHARES == 1) finish(a, result, part.token, part.head * GROUP + g, column);
    else shared.put(warp % SHARES, g, column, result);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < COLUMNS && SHARES > 1; i += THREADS) {
    int g = i / (SIZE / 4), column = i % (SIZE / 4) * 4;
    finish(a, shared.sum(min(SHARES, parts), g, column), part.token, part.head * GROUP + g, column);
  }
}

// Waits for the launch before; queries that see no key get zeros.
DI void begin(const Arguments& a, const Work& work) {
  wait_for_earlier();
  for (int token = blockIdx.x; token < a.tokens; token += gridDim.x)
    for (int i = threadIdx.x; work.sequence[token] < 0 && i < HEADS * GROUP * SIZE; i += THREADS)
      a.out[(u64)token * (HEADS * GROUP * SIZE) + i] = 0;
}

// The warp that ends the items of its block; whether the parts of the last are to be merged, too.
DI bool end_items(const Arguments& a, const Work& work, const Shared& shared, u32 left, u32 taken, int lane) {
  u32 parity = 0, last = 0;
  ROLLED for (int item = blockIdx.x; item < work.total; item += gridDim.x, parity ^= 1) {
    Part part = work.part(a, item, lane);
    int rows = min(WARPS, part.tiles()), parts = work.parts(part.token);
    barrier_wait(left, parity);
    write_item(a, shared, part, rows, parts == 1, lane);
    barrier_arrive(taken);
    last = 0;
    if (parts > 1) {
      u32* arrived = a.arrived + part.token * HEADS + part.head;
      __threadfence();
      __syncwarp();
      if (lane == 0) {
        last = atomicAdd(arrived, 1) == (u32)parts - 1;
        if (last) *arrived = 0;
      }
      last = __shfl_sync(~0u, last, 0);
      if (last) {
        __threadfence();
        if (item + (int)gridDim.x < work.total) merge_alone(a, part, parts, lane);
      }
    }
  }
  return last;
}

// One of the warps that multiply.
DI void compute_items(const Arguments& a, const Work& work, const Shared& shared, u32 left, u32 taken, int lane, int warp) {
  Copies copies(a, work, lane, warp);
  begin(a, work);
  u32 ring = (u32)__cvta_generic_to_shared(dynamic) + warp * (UNITS * UNIT), parity = 0;
  ROLLED for (int i = 0; i < UNITS - 1; i++) copies.copy(a, work, ring + i * UNIT, lane, warp);
  int slot = 0;
  Deal deal;
  // The next unit; where the one before it was, another may come.
  auto take = [&]() -> u32 {
    wait<UNITS - 2>();
    __syncwarp();
    copies.copy(a, work, ring + (slot ? slot - 1 : UNITS - 1) * UNIT, lane, warp);
    u32 here = ring + slot * UNIT;
    slot = slot == UNITS - 1 ? 0 : slot + 1;
    return here;
  };
  ROLLED for (int item = blockIdx.x; item < work.total; item += gridDim.x, parity ^= 1) {
    Part part = work.part(a, item, lane);
    int mine = deal.place(warp), key = part.from + mine * TILE;
    Sums sums;
    bool has_tiles = key < part.until;
    if (has_tiles) {
      Queries queries(take(), lane);
      for (; key < part.until; key += WARPS * TILE) {
        float scores[2][4] = {}, weight[4];
        UNROLL for (int s = 0; s < SEGMENTS; s++) Sums::score(scores, queries, take(), s, lane);
        UNROLL for (int i = 0; i < 4; i++) {
          float score = (scores[0][i] + scores[1][i]) * a.scale;
#if SOFTCAP
          score = capped(score, a.softcap);
#endif
          int at = key + lane / 4 + i / 2 * 8;
          weight[i] = at < part.until ? score * LOG2E : ABSENT;
        }
        u32 low, high;
        sums.weigh(weight, low, high, lane);
        UNROLL for (int s = 0; s < SEGMENTS; s++) sums.add(take(), s, low, high, lane);
      }
    }
    if (item != (int)blockIdx.x) barrier_wait(taken, parity ^ 1);   // the item before
    if (has_tiles) sums.leave(shared.values + mine * GROUP * VALUE_ROW, shared.extremes + 2 * mine * GROUP, 2, lane);
    barrier_arrive(left);
    deal.next(part);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(Arguments a) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Shared shared;
  u32 left = (u32)__cvta_generic_to_shared(shared.extremes + 2 * WARPS * GROUP), taken = left + 8;
  u32* last = (u32*)(shared.extremes + 2 * WARPS * GROUP + 4);
  let_next_begin();
  if (threadIdx.x == 0) barrier_init(left, 32 * WARPS), barrier_init(taken, 32);
  Work work(a, lane, warp);
  if (warp == WARPS) {
    begin(a, work);
    bool merges = end_items(a, work, shared, left, taken, lane);
    if (lane == 0) *last = merges;
  } else {
    compute_items(a, work, shared, left, taken, lane, warp);
  }
  __syncthreads();
  if (*last) {
    Part part = work.part(a, ((work.total - 1 - (int)blockIdx.x) / (int)gridDim.x) * (int)gridDim.x + (int)blockIdx.x, lane);
    merge_together(a, shared, part, work.parts(part.token), lane, warp);
  }
}
