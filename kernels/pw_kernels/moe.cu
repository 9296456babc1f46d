// Routed experts of one layer from bit-planes and tables in arena pages, for few tokens: weights are decoded into the matrix
// unit's operands. Beside the constants of planes.cuh (cuda_moe.py defines them all):
//
//   CLASS         which of the two work lists the kernel walks;  SHARES, COSTS: how its items are shared out, see below
//   WK            warps that split K of a row tile; WARPS is 2 * WK
//   STAGES        tiles in flight of a warp (tables in registers only)
//   RESIDENT      bytes of shared memory for tables, 65536 at most: as many row tiles as fit are taken at once
//   PINGPONG      1: two turns of the loop, so that no register is copied, where registers suffice (tables in shared memory)

#define WARPS (2 * WK)
#include "planes.cuh"

// Activations of the tokens whose columns a lane holds: 8 consecutive k of each of its NT tokens.
struct Inputs {
  u64 x[NT]; u32 bytes[NT];                                     // 16, or 0 where a group has no token
  DI Inputs(const Arguments& a, int group, int lane) {
    UNROLL for (int n = 0; n < NT; n++) {
      int slot = __ldg(a.slots + group * TOKENS + n * 8 + (lane >> 2));
      bytes[n] = slot < a.slot_count ? 16 : 0;
      if (slot >= a.slot_count) slot = 0;
      x[n] = (u64)(a.x + (u64)(GATED ? slot / TOP_K : slot) * COLS + (lane & 3) * 8);
    }
  }
  DI u32 size(int n, int kt, int s, int lane) const {           // nothing beyond column K
    return COLS % 128 == 0 || kt * 128 + s * 32 + (lane & 3) * 8 < COLS ? bytes[n] : 0;
  }
  DI void load(int kt, int s, int lane, uint4* words) const {
    UNROLL for (int n = 0; n < NT; n++) {
      words[n] = make_uint4(0, 0, 0, 0);
      if (size(n, kt, s, lane)) words[n] = load_written((const uint4*)mad_wide(kt, 256, x[n]) + s * 4);
    }
  }
};
// The K split is added up through shared memory: [2 halves][WK or WARPS parts][8 * NT][32 lanes].
DI void put(float* parts, Sums acc, int lane) {
  UNROLL for (int i = 0; i < 8 * NT; i++) parts[i * 32 + lane] = acc[i & 1][i >> 3][(i >> 1) & 3];
}
template <int SPLIT> DI void finish(const Arguments& a, const float* parts, int item, int group, int expert, int lane, int warp) {
  ROLLED for (int i = warp; i < 8 * NT; i += WARPS) {
    int slot = __ldg(a.slots + group * TOKENS + (i >> 3) * 8 + (lane & 3) * 2 + ((i >> 1) & 1));
    if (slot >= a.slot_count) continue;
    float sum[2] = {0.0f, 0.0f};
    UNROLL for (int half = 0; half < 2; half++)
      UNROLL for (int w = 0; w < SPLIT; w++) sum[half] += parts[((half * SPLIT + w) * 8 * NT + i) * 32 + lane];
    int row = (lane >> 2) + 16 * (i & 1) + 8 * ((i >> 2) & 1);
    if (GATED) {
      int n = item * 32 + row;
      if (BIAS) { sum[0] += a.bias[expert * ROWS + n]; sum[1] += a.bias[expert * ROWS + n + ROWS / 2]; }
      reinterpret_cast<u16*>(a.out)[(u64)slot * (ROWS / 2) + n] = to_half(activate(sum[0], sum[1]));
    } else {
      float weight = __ldg(a.weights + slot);
      UNROLL for (int half = 0; half < 2; half++) {
        int n = (2 * item + half) * 32 + row;
        if (n < ROWS) reinterpret_cast<float*>(a.out)[(u64)slot * ROWS + n] = (BIAS ? sum[half] + a.bias[expert * ROWS + n] : sum[half]) * weight;
      }
    }
  }
}

// ---- up to 4 bits ---------------------------------------------------------------------------------------------

template <int B, int S> DI void slot_low(const Table<B>* table, const u32 (*words)[4], const u32* even, const u32* odd, const uint4* x, Sums acc) {
  u32 a[2][2][4];
  decode_low<B, S>(table, words, even, odd, a);
  UNROLL for (int n = 0; n < NT; n++) {
    uint4 v = x[(S * NT + n) * 32];
    UNROLL for (int m = 0; m < 2; m++) { multiply(acc[m][n], a[m][0], v.x, v.y); multiply(acc[m][n], a[m][1], v.z, v.w); }
  }
}
// Items first to last of a group: what a warp needs next is copied while it computes, also across items. A lane copies just
// what it reads itself, so a warp's stages need no barrier: [STAGES][B planes, 4 * NT inputs][32 lanes] uint4.
template <int B> DI void run_low(const Arguments& a, int4 work, int first, int last, unsigned char* shared) {
  constexpr int TABLE = 64 << B, STAGE = (B + 4 * NT) * 512, PARTS = WARPS * NT * 1024;
  constexpr bool SHORT = COL_TILES / WK < STAGES;              // a warp's turns for an item may not cover the copy of a table
  int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, wk = warp % WK, half = warp / WK, group = work.x, expert = work.y;
  unsigned char* tables = shared;                              // [2, odd and even items][2 halves] raw entries of 32 rows
  unsigned char* parts = shared + 4 * TABLE;                   // [2, odd and even items][2 halves][WK][8 * NT][32] float
  unsigned char* stages = parts + 2 * PARTS + warp * STAGES * STAGE + lane * 16;
  u32 to = (u32)__cvta_generic_to_shared(stages);
  Planes<B> planes(a, expert, lane);
  Inputs inputs(a, group, lane);
  auto copy_tables = [&](int item) {
    for (int i = thread; i < 2 * TABLE / 16; i += 32 * WARPS) {
      int h = i / (TABLE / 16), byte = i % (TABLE / 16) * 16;
      copy_async((u32)__cvta_generic_to_shared(tables + ((item & 1) * 2 + h) * TABLE + byte), (u64)table_at(a, work, row_tile(item, h) * TABLE + byte));
    }
  };
  int item = first, kt = wk;                                   // where copying is
  auto fetch_planes = [&](u32 stage) {
    if (item >= last) return;
    int tile = row_tile(item, half) * COL_TILES + kt;
    planes.seek(tile);
    UNROLL for (int p = 0; p < B; p++) copy_async(to + stage * STAGE + p * 512, planes.at(p, tile));
  };
  auto fetch_inputs = [&](u32 stage, int kt) {
    UNROLL for (int n = 0; n < NT; n++) {
      u64 x = mad_wide(kt, 256, inputs.x[n]);
      UNROLL for (int s = 0; s < 4; s++) copy_async(to + stage * STAGE + (B + s * NT + n) * 512, x + s * 64, inputs.size(n, kt, s, lane));
    }
  };
  auto advance = [&]() { kt += WK; if (kt >= COL_TILES) { kt = wk; item++; } };
  int ahead[STAGES - 1];
  copy_tables(first);
  if (wk < COL_TILES) UNROLL for (int i = 0; i < STAGES - 1; i++) { fetch_planes(i); ahead[i] = item < last ? kt : -1; advance(); }
  inputs_ready();
  if (wk < COL_TILES) UNROLL for (int i = 0; i < STAGES - 1; i++) { if (ahead[i] >= 0) fetch_inputs(i, ahead[i]); commit(); }
  u32 stage = 0, behind = STAGES - 1;
  ROLLED for (int now = first; now < last; now++) {
    Table<B> table[4];
    Sums acc;
    clear(acc);
    auto begin = [&]() {                                       // tables of this item are there, parts of the one before are stored
      __syncthreads();
      UNROLL for (int i = 0; i < 4; i++)
        table[i].read(reinterpret_cast<const u32*>(tables + ((now & 1) * 2 + half) * TABLE + ((lane >> 2) + i * 8) * (2 << B)));
      if (now + 1 < last) copy_tables(now + 1);
      if (now > first) finish<WK>(a, reinterpret_cast<const float*>(parts + ((now - 1) & 1) * PARTS), now - 1, group, expert, lane, warp);
    };
    if (wk >= COL_TILES) { wait<0>(); begin(); commit(); }
    ROLLED for (int turn = wk; turn < COL_TILES; turn += WK) {
      fetch_planes(behind);
      if (item < last) fetch_inputs(behind, kt);
      commit();
      advance();
      if (SHORT && turn == wk) wait<0>(); else wait<STAGES - 1>();
      if (turn == wk) begin();
      const uint4* loaded = reinterpret_cast<const uint4*>(stages + stage * STAGE);
      u32 words[B][4], even[4], odd[4];
      UNROLL for (int p = 0; p < B; p++) {
        uint4 v = loaded[p * 32];
        words[p][0] = v.x; words[p][1] = v.y; words[p][2] = v.z; words[p][3] = v.w;
      }
      pair_up<B>(words, even, odd);
      slot_low<B, 0>(table, words, even, odd, loaded + B * 32, acc);
      slot_low<B, 1>(table, words, even, odd, loaded + B * 32, acc);
      slot_low<B, 2>(table, words, even, odd, loaded + B * 32, acc);
      slot_low<B, 3>(table, words, even, odd, loaded + B * 32, acc);
      behind = stage;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    put(reinterpret_cast<float*>(parts + (now & 1) * PARTS) + warp * NT * 8 * 32, acc, lane);
  }
  wait<0>();
  __syncthreads();
  finish<WK>(a, reinterpret_cast<const float*>(parts + ((last - 1) & 1) * PARTS), last - 1, group, expert, lane, warp);
}

// ---- up to 8 bits ---------------------------------------------------------------------------------------------

template <int B, int S> DI void slot_high(const u32 (*words)[B], const u32 (*pairs)[4][2], u32 lane4, u32 which, const uint4* x, Sums acc) {
  u32 a[2][2][4];
  decode_high<B, S>(words, pairs, lane4, which, a);
  UNROLL for (int n = 0; n < NT; n++)
    UNROLL for (int m = 0; m < 2; m++) { multiply(acc[m][n], a[m][0], x[n].x, x[n].y); multiply(acc[m][n], a[m][1], x[n].z, x[n].w); }
}
template <int B> DI void tile_high(const uint4* loaded, const Inputs& inputs, int kt, int lane, u32 which, Sums acc) {
  u32 words[4][B], pairs[4][4][2];
  pair_up<B>(loaded, words, pairs);
  constexpr int AHEAD = NT <= 2 ? 4 : 1;                       // slots of activations in flight
  uint4 x[AHEAD][NT];
  UNROLL for (int s = 0; s < AHEAD; s++) inputs.load(kt, s, lane, x[s]);
  slot_high<B, 0>(words, pairs, lane * 4, which, x[0], acc);
  if (AHEAD == 1) inputs.load(kt, 1, lane, x[0]);
  slot_high<B, 1>(words, pairs, lane * 4, which, x[1 % AHEAD], acc);
  if (AHEAD == 1) inputs.load(kt, 2, lane, x[0]);
  slot_high<B, 2>(words, pairs, lane * 4, which, x[2 % AHEAD], acc);
  if (AHEAD == 1) inputs.load(kt, 3, lane, x[0]);
  slot_high<B, 3>(words, pairs, lane * 4, which, x[3 % AHEAD], acc);
}
// The tables of some row tiles: copied as they are in the arena to a strip of shared memory while lookups in the tables before
// them go on, then spread out. Rows of the strip are 16 bytes apart beyond their size, so that reading 8 rows at once never
// conflicts. Eight threads spread 8 entries of 8 rows and of the 8 rows below.
template <int B, int TILES> struct Fill {
  static constexpr int PIECES = (1 << B) / 8, ROW = (2 << B) + 16, COPIES = TILES * 32 * PIECES, EACH = 2 * PIECES, JOBS = TILES * EACH;
  static constexpr int BYTES = TILES * 32 * ROW;
  template <typename TileOf> DI static void load(const Arguments& a, int4 work, unsigned char* strip, int thread, TileOf tile_of) {
    UNROLL for (int i = 0; i < (COPIES + 32 * WARPS - 1) / (32 * WARPS); i++) {
      int job = i * 32 * WARPS + thread, row = job / PIECES, byte = job % PIECES * 16;
      if (COPIES % (32 * WARPS) && job >= COPIES) break;
      const uint4* from = table_at(a, work, (tile_of(row / 32) * 32 + row % 32) * (2 << B) + byte);
      copy_async((u32)__cvta_generic_to_shared(strip + row * ROW + byte), (u64)from);
    }
    commit();
  }
  DI static void spread(const unsigned char* strip, unsigned char* tables, int thread) {
    UNROLL for (int i = 0; i < (JOBS + 4 * WARPS - 1) / (4 * WARPS); i++) {
      int job = i * 4 * WARPS + (thread >> 3), part = job % EACH, piece = part % PIECES, pair = part / PIECES;
      if (JOBS % (4 * WARPS) && job >= JOBS) break;
      const unsigned char* from = strip + (job / EACH * 32 + pair * 16 + (thread & 7)) * ROW + piece * 16;
      uint4 upper = *reinterpret_cast<const uint4*>(from), lower = *reinterpret_cast<const uint4*>(from + 8 * ROW);
      unsigned char* to = tables + job / EACH * (256 << B) + piece * 8 * 256 + pair * 128 + (thread & 7) * 16;
      UNROLL for (int k = 0; k < 8; k++) {
        u32 v = prmt(reinterpret_cast<const u32*>(&upper)[k / 2], reinterpret_cast<const u32*>(&lower)[k / 2], k & 1 ? 0x7632 : 0x5410);
        *reinterpret_cast<uint4*>(to + k * 256) = make_uint4(v, v, v, v);
      }
    }
  }
};
// Row tiles whose tables are in shared memory at once; the block's warps share them out, and the columns of each.
template <int B> DI constexpr int tiles_at_once() {
  int tiles = 1;
  while (2 * tiles * (256 << B) <= RESIDENT && WARPS % (2 * tiles) == 0) tiles *= 2;
  return tiles;
}
template <int B> DI void run_high(const Arguments& a, int4 work, int first, int last, unsigned char* shared) {
  constexpr int TILES = tiles_at_once<B>(), SPLIT = WARPS / TILES, PART = 8 * NT * 32;
  int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, group = work.x, expert = work.y, mine = warp / SPLIT, wk = warp % SPLIT;
  first *= 2;
  last *= 2;                                                    // in row tiles from here on
  unsigned char* strip = shared + TILES * (256 << B);
  float* parts = reinterpret_cast<float*>(strip + Fill<B, TILES>::BYTES);  // [WARPS, or 2 * WARPS if TILES is 1][8 * NT][32]
  u32 which = B < 8 ? (u32)mine * (0x11111111u << (B & 3)) : 0;
  Planes<B> planes(a, expert, lane);
  uint4 current[B], next[B];
  auto tile_of = [&](int step) { step = min(step, last - 1); return row_tile(step >> 1, step & 1); };
  auto fetch = [&](int tile, uint4* words) {
    planes.seek(tile);
    UNROLL for (int p = 0; p < B; p++) words[p] = load_stream((const void*)planes.at(p, tile));
  };
  auto finish_items = [&](int step) {                           // of the phase that began with `step`
    if constexpr (TILES == 1) {
      if (step & 1) finish<SPLIT>(a, parts, step >> 1, group, expert, lane, warp);
    } else {
      ROLLED for (int i = 0; i < TILES / 2; i++)
        if (step + 2 * i < last) finish<SPLIT>(a, parts + 2 * i * SPLIT * PART, (step >> 1) + i, group, expert, lane, warp);
    }
  };
  Fill<B, TILES>::load(a, work, strip, thread, [&](int q) { return tile_of(first + q); });
  if (wk < COL_TILES) fetch(tile_of(first + mine) * COL_TILES + wk, current);
  Inputs inputs(a, group, lane);
  inputs_ready();
  ROLLED for (int step = first; step < last; step += TILES) {
    wait<0>();
    __syncthreads();                                            // the last tiles' lookups are over, their parts stored
    Fill<B, TILES>::spread(strip, shared, thread);
    if (step > first) finish_items(step - TILES);
    __syncthreads();
    int tile = tile_of(step + mine) * COL_TILES;
    int after = step + TILES < last ? tile_of(step + TILES + mine) * COL_TILES + wk : -1;
    if (step + TILES < last) Fill<B, TILES>::load(a, work, strip, thread, [&](int q) { return tile_of(step + TILES + q); });
    Sums acc;
    clear(acc);
    auto turn = [&](int kt, const uint4* loaded, uint4* ahead) {
      int following = kt + SPLIT < COL_TILES ? tile + kt + SPLIT : after;
      if (following >= 0) fetch(following, ahead);
      tile_high<B>(loaded, inputs, kt, lane, which, acc);
    };
    if constexpr (PINGPONG && B + NT < 8) {                                // two turns, so that no register is copied
      constexpr bool ODD = COL_TILES % (2 * SPLIT) != 0;        // for some warps
      ROLLED for (int kt = wk; kt < COL_TILES; kt += 2 * SPLIT) {
        turn(kt, current, next);
        if (ODD && kt + SPLIT >= COL_TILES) {
          UNROLL for (int p = 0; p < B; p++) current[p] = next[p];
          break;
        }
        turn(kt + SPLIT, next, current);
      }
    } else {
      ROLLED for (int kt = wk; kt < COL_TILES; kt += SPLIT) {
        turn(kt, current, next);
        UNROLL for (int p = 0; p < B; p++) current[p] = next[p];
      }
    }
    put(parts + (TILES == 1 ? (step & 1) * WARPS + warp : warp) * PART, acc, lane);
  }
  __syncthreads();
  finish_items(first + (last - first - 1) / TILES * TILES);
}
// ---- the kernel -----------------------------------------------------------------------------------------------

// The items of a class in the order of its list are cut where groups end and into SHARES parts that should take equal time;
// COSTS holds a byte for each width from 1 on. Block b < SHARES takes what is left of share b before the first end of a group;
// block SHARES + i begins with group i. So a block starts once, for long, and the short pieces come last.
DI u32 cost(int width) { return width ? (u32)((u64)COSTS >> (8 * width - 8)) & 255 : 0; }
DI u32 scan(u32 value, int lane) {                              // sum of the lanes up to this one
  UNROLL for (int step = 1; step < 32; step *= 2) {
    u32 other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) experts(Arguments a) {
  constexpr int PAIRS = (ROW_TILES + 1) / 2;
  if (FIRST && GATED) wait_for_earlier();
  if (!FIRST || GATED) let_next_begin();
  if (TABLE_BITS <= HIGH && (u32)__cvta_generic_to_shared(dynamic) != SHARED_BASE) __trap();
  const int4* list = a.work + CLASS * a.groups;
  int lane = threadIdx.x & 31, place = -1;
  auto entry_of = [&](int i) {
    uint4 v = i < a.groups ? load_written(reinterpret_cast<const uint4*>(list + i)) : make_uint4(0, ~0u, 0, 0);
    return make_int4(v.x, v.y, v.z, v.w);
  };
  u32 total = 0, begin = 0;                                     // `begin`: of the group at `place`, in the order of all items
  ROLLED for (int i = 0; i < a.groups; i += 32) total += cost(entry_of(i + lane).z);
  u64 all = __shfl_sync(~0u, scan(total, lane), 31) * PAIRS;
  u32 from = blockIdx.x < SHARES ? (u32)(all * blockIdx.x / SHARES) : ~0u;
  ROLLED for (int i = 0; i < a.groups && place < 0; i += 32) {
    u32 mine = cost(entry_of(i + lane).z), up_to = scan(mine, lane);
    bool here = blockIdx.x < SHARES ? begin + up_to * PAIRS > from : i + lane == (int)blockIdx.x - SHARES;
    u32 inside = __ballot_sync(~0u, here);
    int at = inside ? __ffs(inside) - 1 : 31;
    begin += __shfl_sync(~0u, inside ? up_to - mine : up_to, at) * PAIRS;
    if (inside) place = i + at;
  }
  int4 work = place < 0 ? make_int4(0, -1, 0, 0) : entry_of(place);
  u32 each = cost(work.z), end = begin + each * PAIRS;
  if (blockIdx.x >= SHARES) from = begin;
  // The share that `from` lies in ends at `to`; a group that begins where a share does is that share's.
  u32 next = blockIdx.x < SHARES ? blockIdx.x + 1 : all ? (u32)(((u64)from * SHARES + (u32)all - 1) / (u32)all) : 0;
  u32 to = min(end, (u32)(all * next / SHARES));
  int first = each ? (from - begin + each - 1) / each : 0, last = each ? (to - begin + each - 1) / each : 0;
  if (work.y >= 0 && first < last) {
#define TAKE(B)                                             \
  if constexpr (LOW <= B && B <= HIGH)                      \
    if (work.z == B) {                                      \
      if constexpr (B < TABLE_BITS) run_low<(B < 4 ? B : 4)>(a, work, first, last, dynamic);    \
      else run_high<(B > 4 ? B : 4)>(a, work, first, last, dynamic);                           \
    }
    EACH_WIDTH
  }
  wait_for_earlier();
}
