// Attention of a decode step of few sequences, with what comes before it: norms of heads, rotation, and the store of each
// sequence's new key and value. Compiled at run time by NVRTC (cuda_joint_attention.py), which defines the constants named
// below; needs clusters of blocks, compute capability 9.0.
//
//   FLOAT16        1: everything is fp16; 0: bf16
//   HEADS, GROUP   key heads; query heads of each, 8 at most
//   SIZE           of a head: 64, 128, 256 or 512;  TOKENS: of a page
//   CLUSTER        blocks that share the keys of one query at one key head
//   WARPS, BLOCKS  of a block; wanted on a multiprocessor
//   UNITS          copies that a warp has room for
//   NORMED         heads of a row of qkv that are normed, from the first query's on;  SHARED: 1: values are the keys, as they come
//   WINDOW, SOFTCAP  1: there is one
//
// A sequence has one query, of its last key, or none. Its other keys and values are of earlier steps: they are on their way
// before the launch waits for the one before it, which makes queries, keys and values of this step. Behind the wait a block
// norms and rotates the rows of its head; the one that has the new key stores it and its value.
//
// The warps of a cluster take tiles of 16 keys in turn, block by block, so that a warp can look up the pages of its first tiles
// while the length is read. It copies keys and values of its tiles for itself, UNITS - 1 copies ahead. The warps' sums meet in
// shared memory, the blocks' in that of the block that has the columns, in one order.
//
// The next launch may begin when the last copies are on their way and some have come: what it copies ahead would be in their way.

#include "loads.cuh"
#include "attention.cuh"
#include "clusters.cuh"

struct Arguments {
  const u16* qkv;          // [T, (HEADS * GROUP + 2 HEADS) * SIZE]; without values if SHARED
  const u16* cos;          // [T, SIZE]
  const u16* sin;
  const u16* norm;         // [NORMED, SIZE]
  u16* k_pages;            // [P, TOKENS, HEADS, SIZE]
  u16* v_pages;
  const int* tables;       // [T, M]
  const int* query_start;  // [T + 1]; the last: sequences with a query, which come first
  const int* seq_lens;     // [T]
  u16* out;                // [T, HEADS * GROUP, SIZE]
  u32 k_page, k_token, k_head, v_page, v_token, v_head, qkv_row, angle_row;
  int table_row, blocks, tokens, window;                        // M
  float scale, softcap, epsilon;
};

constexpr int THREADS = 32 * WARPS, OWN = UNITS * UNIT;         // bytes of a warp
constexpr int RING = WARPS * OWN, NEW_AT = RING + GROUP * SIZE * 2, PARTS_AT = NEW_AT + 4 * SIZE;
constexpr int COLUMNS = GROUP * SIZE / 4, OWNED = COLUMNS / CLUSTER;   // of a group, by four; that a block ends
constexpr int BRIEF = 16;                                       // tiles of a query that are in nobody's way
constexpr int EXTREMES_AT = PARTS_AT + 16 * COLUMNS;
static_assert(GROUP * VALUE_ROW * 4 <= OWN, "a warp leaves its sums where its copies were");
// [WARPS, UNITS] units, later [WARPS, GROUP, VALUE_ROW] sums, with maximum and sum of weights behind each row; queries
// [GROUP, SIZE]; new key and value; sums of blocks [CLUSTER, OWNED], their maximum and sum of weights
extern __shared__ __align__(128) unsigned char dynamic[];

// One query at one key head.
struct Query {
  int token, head, newest, low, tiles;                          // the new key, or -1; the first that is seen
  DI Query(const Arguments& a) {
    int query = blockIdx.x / CLUSTER;
    token = query / HEADS, head = query % HEADS;
  }
  DI void read(int length, int live, int window) {
    length = token < live ? length : 0;
    newest = length - 1, low = WINDOW ? max(0, length - window) : 0;
    tiles = (length - low + TILE - 1) / TILE;
  }
  DI int page(const Arguments& a, int key) const { return load_int(a.tables + (u64)token * a.table_row + min(key / TOKENS, a.blocks - 1)); }
};

// The copies of a warp: keys and values of its tiles, one unit after the other, and the pages of the next tile.
constexpr int TURN = CLUSTER * WARPS * TILE;
struct Copies {
  int key, page, later, unit;
  DI Copies(const Arguments& a, const Query& query, int first, int lane) : key(first), unit(0) {
    page = query.page(a, key + lane % TILE), later = query.page(a, key + TURN + lane % TILE);
  }
  // All rows but the new one; behind it are zeros.
  DI void copy(const Arguments& a, const Query& query, u32 shared, u32 to, int lane) {
    if (key <= query.newest) {
      bool keys = unit < SEGMENTS;
      int chunk = lane % CHUNKS, column = (keys ? unit : unit - SEGMENTS) * COLS + chunk * 8;
      u32 page_step = keys ? a.k_page : a.v_page, token_step = keys ? a.k_token : a.v_token;
      const u16* from = (keys ? a.k_pages + query.head * (u64)a.k_head : a.v_pages + query.head * (u64)a.v_head) + column;
      UNROLL for (int j = 0; j < TILE; j += 32 / CHUNKS) {
        int row = j + lane / CHUNKS, at = key + row;
        u32 its = __shfl_sync(~0u, page, row), here = to + place(row, chunk, CHUNKS);
        if (at < query.newest) copy_rows(shared + here, (u64)(from + (u64)its * page_step + (u32)(at % TOKENS) * token_step));
        else if (at > query.newest) *(uint4*)(dynamic + here) = make_uint4(0, 0, 0, 0);
      }
      if (++unit == 2 * SEGMENTS) {
        key += TURN, unit = 0, page = later;
        if (key + TURN <= query.newest) later = query.page(a, key + TURN + lane % TILE);
      }
    }
    commit();
  }
};

// One head of a row: a lane has columns d and d + SIZE / 2 for PER values of d, from PER * lane on.
constexpr int PER = SIZE / 64;
struct Loaded {
  u16 halves[2][PER];
  DI Loaded(const u16* from, int lane) {
    UNROLL for (int h = 0; h < 2; h++) {
      const u16* p = from + h * (SIZE / 2) + PER * lane;
      if constexpr (PER == 1) halves[h][0] = load_number(p);
      else UNROLL for (int i = 0; i < PER; i += 2) {
        u32 two = (u32)load_int((const int*)(p + i));
        halves[h][i] = (u16)two, halves[h][i + 1] = (u16)(two >> 16);
      }
    }
  }
  DI float at(int half, int i) const { return from_half(halves[half][i]); }
};
struct Row {
  float halves[2][PER];
  DI Row(const Loaded& from) { UNROLL for (int h = 0; h < 2; h++) UNROLL for (int i = 0; i < PER; i++) halves[h][i] = from.at(h, i); }
  DI void norm(const Loaded& weights, float epsilon, int lane) {
    float sum = 0;
    UNROLL for (int i = 0; i < PER; i++) sum += halves[0][i] * halves[0][i] + halves[1][i] * halves[1][i];
    UNROLL for (int step = 1; step < 32; step *= 2) sum += shuffled(sum, lane ^ step);
    float scale = rsqrtf(sum / SIZE + epsilon);
    UNROLL for (int h = 0; h < 2; h++) UNROLL for (int i = 0; i < PER; i++) halves[h][i] *= scale * weights.at(h, i);
  }
  DI void turn(const Loaded& cos, const Loaded& sin) {
    UNROLL for (int i = 0; i < PER; i++) {
      float low = halves[0][i], high = halves[1][i];
      halves[0][i] = low * cos.at(0, i) - high * sin.at(0, i);
      halves[1][i] = high * cos.at(1, i) + low * sin.at(1, i);
    }
  }
  DI void store(int half, u16* p) const {                       // at the lane's first column of a half
    if constexpr (PER == 1) *p = to_half(halves[half][0]);
    else UNROLL for (int i = 0; i < PER; i += 2) *(u32*)(p + i) = pair(halves[half][i], halves[half][i + 1]);
  }
  DI void store(u16* to, int lane) const { UNROLL for (int h = 0; h < 2; h++) store(h, to + h * (SIZE / 2) + PER * lane); }
};

// Behind the wait: queries, the new key and the new value of the block's head, by its warps in turn.
DI void make_rows(const Arguments& a, const Query& query, int page, bool stores, int lane, int warp) {
  ROLLED for (int row = warp; row < GROUP + 2; row += WARPS) {
    bool asks = row < GROUP, value = row > GROUP;
    int head = asks ? query.head * GROUP + row : HEADS * GROUP + query.head + (value ? HEADS : 0);
    bool normed = head < NORMED;
    Loaded loaded(a.qkv + (u64)query.token * a.qkv_row + (SHARED && value ? head - HEADS : head) * SIZE, lane);
    Loaded cos(a.cos + (u64)query.token * a.angle_row, lane), sin(a.sin + (u64)query.token * a.angle_row, lane);
    Loaded weights(normed ? a.norm + head * SIZE : a.cos, lane);
    ask();
    Row made(loaded);
    if (normed) made.norm(weights, a.epsilon, lane);
    if (!value) made.turn(cos, sin);
    if (asks) {
      UNROLL for (int h = 0; h < 2; h++) {
        int column = h * (SIZE / 2) + PER * lane;
        made.store(h, (u16*)(dynamic + RING + place(row, column / 8, SIZE / 8)) + column % 8);
      }
    } else {
      made.store((u16*)(dynamic + NEW_AT) + (value ? SIZE : 0), lane);
      u64 slot = (u32)(query.newest % TOKENS);
      if (stores) made.store(value ? a.v_pages + query.head * (u64)a.v_head + page * (u64)a.v_page + slot * a.v_token
                                   : a.k_pages + query.head * (u64)a.k_head + page * (u64)a.k_page + slot * a.k_token, lane);
    }
  }
}

// The first of MOST parts, in order; load(n) gives one, none waits for the one before.
template <int MOST, class Load> DI Result joined(int parts, Load load) {
  Result all[MOST], result;
  UNROLL for (int n = 0; n < MOST; n++) {
    all[n] = load(min(n, max(parts - 1, 0)));
    if (n < parts) result.peak = max(result.peak, all[n].peak);
  }
  UNROLL for (int n = 0; n < MOST; n++)
    if (n < parts) {
      float share = exp2_fast(all[n].peak - result.peak);
      const float4& v = all[n].sum;
      result.mass += all[n].mass * share;
      result.sum = {result.sum.x + v.x * share, result.sum.y + v.y * share, result.sum.z + v.z * share, result.sum.w + v.w * share};
    }
  return result;
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, BLOCKS) attend(Arguments a) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = CLUSTER > 1 ? (int)rank_in_cluster() : 0;
  if (CLUSTER > 1) cluster_arrive();                            // before anybody writes to it, a block has to be there
  u32 shared = (u32)__cvta_generic_to_shared(dynamic), own = warp * OWN;
  int first = (rank * WARPS + warp) * TILE;                     // key of the warp
  Query query(a);
  int length = load_int(a.seq_lens + query.token), live = load_int(a.query_start + a.tokens);
#if WINDOW
  query.read(length, live, a.window);
  first += query.low;
  Copies copies(a, query, first, lane);
#else
  Copies copies(a, query, first, lane);
  query.read(length, live, 0);
#endif
  int page = query.newest < 0 ? 0 : query.page(a, query.newest);
  ROLLED for (int i = 0; i < UNITS - 1; i++) copies.copy(a, query, shared, own + i * UNIT, lane);
  wait_for_earlier();
  if (query.tiles <= BRIEF) let_next_begin();
  int last = max(query.tiles - 1, 0) / WARPS % CLUSTER;         // the block that has the new key
  if (query.newest >= 0) make_rows(a, query, page, rank == last, lane, warp);
  __syncthreads();
  int slot = 0, key = first;
  // The next unit, with its piece of the new row; where the one before it was, another may come.
  auto take = [&](int piece) -> u32 {
    wait<UNITS - 2>();
    u32 here = own + slot * UNIT;
    int at = query.newest - key;
    if (at < TILE && lane < CHUNKS) *(uint4*)(dynamic + here + place(at, lane, CHUNKS)) = *((const uint4*)(dynamic + NEW_AT) + piece * CHUNKS + lane);
    __syncwarp();
    copies.copy(a, query, shared, own + (slot ? slot - 1 : UNITS - 1) * UNIT, lane);
    slot = slot == UNITS - 1 ? 0 : slot + 1;
    if (copies.key > query.newest) let_next_begin();
    return shared + here;
  };
  if (key <= query.newest) {
    Sums sums;
    Queries queries(shared + RING, lane);
    ROLLED for (; key <= query.newest; key += TURN) {
      float scores[2][4] = {}, weight[4];
      UNROLL for (int s = 0; s < SEGMENTS; s++) Sums::score(scores, queries, take(s), s, lane);
      UNROLL for (int i = 0; i < 4; i++) {
        float score = (scores[0][i] + scores[1][i]) * a.scale;
#if SOFTCAP
        score = capped(score, a.softcap);
#endif
        weight[i] = key + lane / 4 + i / 2 * 8 <= query.newest ? score * LOG2E : ABSENT;
      }
      u32 low, high;
      sums.weigh(weight, low, high, lane);
      UNROLL for (int s = 0; s < SEGMENTS; s++) sums.add(take(SEGMENTS + s), s, low, high, lane);
    }
    wait<0>();
    __syncwarp();
    float* to = (float*)(dynamic + own);
    sums.leave(to, to + SIZE, VALUE_ROW, lane);
  }
  if (first > query.newest) let_next_begin();
  __syncthreads();
  int parts = min(CLUSTER, (query.tiles + WARPS - 1) / WARPS);  // blocks that have a tile
  auto own_sum = [&](int i) {                                   // of the block's warps
    return joined<WARPS>(min(WARPS, query.tiles - rank * WARPS), [&](int n) {
      const float* row = (const float*)(dynamic + n * OWN) + i / (SIZE / 4) * VALUE_ROW;
      Result result;
      result.peak = row[SIZE], result.mass = row[SIZE + 1], result.sum = *(const float4*)(row + i % (SIZE / 4) * 4);
      return result;
    });
  };
  auto finish = [&](const Result& result, int i) {
    float share = 1.0f / result.mass;
    uint2 halves = {pair(result.sum.x * share, result.sum.y * share), pair(result.sum.z * share, result.sum.w * share)};
    if (parts == 0) halves = {0, 0};                            // of a sequence without a query
    *(uint2*)(a.out + ((u64)query.token * (HEADS * GROUP) + query.head * GROUP) * SIZE + 4 * i) = halves;
  };
  if (CLUSTER == 1) {
    ROLLED for (int i = threadIdx.x; i < COLUMNS; i += THREADS) finish(own_sum(i), i);
    return;
  }
  cluster_wait();
  ROLLED for (int i = threadIdx.x; i < COLUMNS && rank < parts; i += THREADS) {
    Result result = own_sum(i);
    int at = rank * OWNED + i % OWNED;
    push(shared + PARTS_AT + 16 * at, i / OWNED, result.sum);
    push(shared + EXTREMES_AT + 8 * at, i / OWNED, result.peak), push(shared + EXTREMES_AT + 8 * at + 4, i / OWNED, result.mass);
  }
  cluster_arrive();
  cluster_wait();
  ROLLED for (int i = threadIdx.x; i < OWNED; i += THREADS) {
    finish(joined<CLUSTER>(parts, [&](int n) {
      const float* extremes = (const float*)(dynamic + EXTREMES_AT) + 2 * (n * OWNED + i);
      Result result;
      result.peak = extremes[0], result.mass = extremes[1], result.sum = *((const float4*)(dynamic + PARTS_AT) + n * OWNED + i);
      return result;
    }), rank * OWNED + i);
  }
}
