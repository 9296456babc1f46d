// Routed experts of one layer from bit-planes and tables in arena pages. Compiled at run time by NVRTC
// (cuda_moe.py), which defines the constants named below; it includes nothing of a toolkit.
//
//   FLOAT16       1: x, tables and hidden are fp16; 0: bf16
//   ROWS, COLS    N and K of the module's blocks;  ROW_TILES, COL_TILES: in tiles of 32 x 128
//   PLANES, PP, LP, PAGE_SHIFT                     page table [E, PLANES, PP], [E, LP]; log2 of a page's bytes
//   LOW, HIGH     widths that this kernel takes;  CLASS: which of the two work lists it walks
//   GATED         1: gate_up with activation KIND; 0: down with router weight
//   TOP_K, BIAS, NT (token tiles of 8 in a group), WK (warps that split K of a row tile; a block has 2 * WK)
//   ITEMS         pairs of row tiles that a block takes (tables in shared memory only)
//   RESIDENT      bytes of shared memory for tables, 65536 at most: as many row tiles as fit are taken at once (the same)
//   PINGPONG      1: two turns of the loop instead of one, so that no register is copied (the same, up to 6 bits)
//   EXPAND        1: blocks are written out as matrices, for prompts, instead of multiplied
//   BLOCKS        wanted on a multiprocessor
//   DIRECT        1: one token, so that every slot is a group and no list is needed
//   HALVED        1: a block takes half of the rows of a pair of row tiles (DIRECT, tables in registers)
//   FIRST         1: the first launch of its module, which waits for what the launches before it wrote
//   QUEUED        0: a block for each item of each group; else the byte of shared memory that holds a block's next item:
//                 the grid is as large as the device, and blocks take the items of their list in turn
//   PAIR_BITS     widths up to this one, 3 at most, look up pairs of weights in half of the rows: 14 KB at 2 bits, 32 at 3
//   TABLE_BITS    first width whose tables lie in shared memory;  SHARED_BASE: where dynamic shared memory begins
//
// The matrix unit multiplies weights [16 rows x 16 k] by tokens [16 k x 8]: a lane decodes the words that it
// loads straight into its own operand, because the plane layout is in lane order (bitplane.py).

#ifndef DIRECT
#define DIRECT 0
#define HALVED 0
#endif
#ifndef QUEUED
#define QUEUED 0
#endif
#ifndef PAIR_BITS
#define PAIR_BITS 0
#endif

#include "common.cuh"

// ---- arithmetic ---------------------------------------------------------------------------------------------


DI u64 mad_wide(u32 a, u32 b, u64 c) { u64 d; asm("mad.wide.u32 %0,%1,%2,%3;" : "=l"(d) : "r"(a), "r"(b), "l"(c)); return d; }
DI uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// For what a launch that overlaps with this one wrote: not moved before the wait for it.
DI uint4 load_written(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DI float activate(float gate, float up) {
#if KIND == 1
  return gate * 0.5f * (1.0f + erff(gate * 0.7071067811865476f)) * up;
#elif KIND == 2
  float inner = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.0f + expf(-inner)) * up;
#else
  return gate / (1.0f + expf(-gate)) * up;
#endif
}

// ---- launches that overlap ------------------------------------------------------------------------------------
// A launch may begin while the one before it ends (cuda_moe.py says which), once all blocks of that one have begun. Blocks of
// gate_up's first launch wait for the launches before it; so what a later launch reads of theirs is there. A block of down
// waits for the blocks of gate_up that write its inputs, which have all begun: they count up `done` of their group. (A single
// token, DIRECT, has no such counters: down's first launch waits for the end of gate_up, and lets the next begin thereafter.)
// One block of every other launch waits at its end for the launch before it, so that "complete" always means that everything
// before is complete, too.

DI void at_the_end() {
  if ((!FIRST || !GATED) && blockIdx.x == 0 && blockIdx.y == 0) wait_for_earlier();
}
DI u32 load_acquire(const u32* p) { u32 v; asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
DI void add_release(u32* p, u32 v) { asm volatile("red.release.gpu.global.add.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory"); }
// Not known from one item of a queue to the next, so that what follows from it is not kept in registers in between.
DI int this_thread() { int t; asm volatile("mov.u32 %0,%%tid.x;" : "=r"(t)); return t; }
DI void rest() { asm volatile("nanosleep.u32 40;"); }

// ---- where things are ---------------------------------------------------------------------------------------

struct Arguments {
  const u16* x;            // [T, K] gated, else [S, K]
  const unsigned char* arena;
  const int* plane_pages;  // [E, PLANES, PP]
  const int* lut_pages;    // [E, LP]
  const float* bias;       // [E, N]
  const float* weights;    // [S]
  const int4* work;        // [2, G]: group, expert or -1, width, byte of its table in its region
  const int* slots;        // [G, 8 * NT]
  void* out;               // hidden [S, N/2] if GATED, else [S, N] fp32
  int slot_count, groups;  // S, G
  u32 tile_bytes;          // 512: not a literal, so that addresses are one multiply-add and not shifts
  u32* done;               // [G] pairs of row tiles of gate_up that are written, counted from zero
  int* queue;              // [1] items of this launch's list that are taken, beyond the first of each block
  u32 hidden_pairs;        // of a group, when all of gate_up is done
};
// What gate_up wrote for a group is there from here on.
DI void inputs_ready(const Arguments& a, int group) {
  if (GATED) return;
  if (DIRECT) {
    if (FIRST) { wait_for_earlier(); let_next_begin(); }
  } else {
    if (threadIdx.x == 0)
      while (load_acquire(a.done + group) < a.hidden_pairs) rest();
    __syncthreads();
  }
}
// Some pairs of row tiles of gate_up are written.
DI void written(const Arguments& a, int group, int pairs) {
  if (!GATED || DIRECT) return;
  __syncthreads();
  if (threadIdx.x == 0) add_release(a.done + group, pairs);
}
// For thread 0, which asks before the sums of an item: the block's next one.
DI int take_next(const Arguments& a) { return QUEUED && threadIdx.x == 0 ? (int)gridDim.x + atomicAdd(a.queue, 1) : 0; }
constexpr int TOKENS = 8 * NT, WARPS = 2 * WK, TILE_SHIFT = PAGE_SHIFT - 9;
constexpr int HALF_TILES = GATED ? ROW_TILES / 2 : 1;         // from a row tile to its partner
DI int row_tile(int item, int half) { return GATED ? item + half * HALF_TILES : min(2 * item + half, ROW_TILES - 1); }

// The planes of one expert: words `lane` of tile t. Page ids are read again for each tile: registers are scarcer than loads.
struct Planes {
  u64 pages, start; u32 tile_bytes;
  DI Planes(const Arguments& a, int expert, int lane)
      : pages((u64)(a.plane_pages + expert * (PLANES * PP))), start((u64)a.arena + lane * 16), tile_bytes(a.tile_bytes) {}
  DI u64 at(int p, u32 tile) const {
    u64 inside = mad_wide(tile & ((1 << TILE_SHIFT) - 1), tile_bytes, start);
    return mad_wide(__ldg((const u32*)mad_wide(tile >> TILE_SHIFT, 4, pages) + p * PP), tile_bytes << TILE_SHIFT, inside);
  }
};
extern __shared__ __align__(128) unsigned char dynamic[];

// The slot at a place of a group, slot_count where there is none.
DI int slot_at(const Arguments& a, int group, int place) {
  if (DIRECT) return place ? a.slot_count : group;
  return __ldg(a.slots + group * TOKENS + place);
}
// Sixteen bytes at byte `at` of the table in use.
DI const uint4* table_at(const Arguments& a, int4 work, int at) {
  int expert = work.y;
  at += work.w;
  u64 page = (u32)__ldg(a.lut_pages + expert * LP + (at >> PAGE_SHIFT));
  return reinterpret_cast<const uint4*>(a.arena + (page << PAGE_SHIFT) + (at & ((1 << PAGE_SHIFT) - 1)));
}
// Activations of the tokens whose columns a lane holds: 8 consecutive k of each of its NT tokens.
struct Inputs {
  u64 x[NT]; u32 bytes[NT];                                     // 16, or 0 where a group has no token
  DI Inputs(const Arguments& a, int group, int lane) {
    UNROLL for (int n = 0; n < NT; n++) {
      int slot = slot_at(a, group, n * 8 + (lane >> 2));
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
typedef float Sums[2][NT][4];                                  // rows r, r+8 | r+16, r+24 by NT * 8 tokens
// ROW_BLOCKS of 16 rows are summed at once, sum i of a lane being that of block i % ROW_BLOCKS. The K split is added up
// through shared memory: [2 halves][SPLIT parts], STRIDE apart, of [sums][32 lanes].
template <int ROW_BLOCKS> DI void clear(float (*acc)[NT][4]) {
  UNROLL for (int i = 0; i < 4 * ROW_BLOCKS * NT; i++) acc[i % ROW_BLOCKS][i / ROW_BLOCKS >> 2][i / ROW_BLOCKS & 3] = 0.0f;
}
template <int ROW_BLOCKS> DI void put(float* parts, float (*acc)[NT][4], int lane) {
  UNROLL for (int i = 0; i < 4 * ROW_BLOCKS * NT; i++) parts[i * 32 + lane] = acc[i % ROW_BLOCKS][i / ROW_BLOCKS >> 2][i / ROW_BLOCKS & 3];
}
// Of the pair of row tiles `pair`, from row block `block` on.
template <int SPLIT, int ROW_BLOCKS, int STRIDE> DI void finish(const Arguments& a, const float* parts, int pair, int block, int group, int expert, int lane, int warp) {
  constexpr int SUMS = 4 * ROW_BLOCKS * NT;
  ROLLED for (int i = warp; i < SUMS; i += WARPS) {
    int which = i / ROW_BLOCKS;
    int slot = slot_at(a, group, (which >> 2) * 8 + (lane & 3) * 2 + (which & 1));
    if (slot >= a.slot_count) continue;
    float sum[2] = {0.0f, 0.0f};
    UNROLL for (int half = 0; half < 2; half++)
      UNROLL for (int w = 0; w < SPLIT; w++) sum[half] += parts[(half * SPLIT + w) * STRIDE + i * 32 + lane];
    int row = (lane >> 2) + 16 * (i % ROW_BLOCKS + block) + 8 * ((which >> 1) & 1);
    if (GATED) {
      int n = pair * 32 + row;
      if (BIAS) { sum[0] += a.bias[expert * ROWS + n]; sum[1] += a.bias[expert * ROWS + n + ROWS / 2]; }
      reinterpret_cast<u16*>(a.out)[(u64)slot * (ROWS / 2) + n] = to_half(activate(sum[0], sum[1]));
    } else {
      float weight = __ldg(a.weights + slot);
      UNROLL for (int half = 0; half < 2; half++) {
        int n = (2 * pair + half) * 32 + row;
        if (n < ROWS) reinterpret_cast<float*>(a.out)[(u64)slot * ROWS + n] = (BIAS ? sum[half] + a.bias[expert * ROWS + n] : sum[half]) * weight;
      }
    }
  }
}

// ---- up to 4 bits: tables in registers, four lookups by one byte permute --------------------------------------

constexpr u32 M1 = 0x11111111u, M2 = 0x55555555u, M3 = 0x33333333u, POSITION = 0x32103210u;

template <int B> struct Table {                                // one row: low bytes and high bytes of its entries
  static constexpr int WORDS = B == 2 ? 1 : (1 << B) / 4;
  u32 lo[WORDS], hi[WORDS];
  DI void read(const u32* entries) {
    UNROLL for (int w = 0; w < WORDS; w++) {
      u32 a = entries[2 * w], b = entries[2 * w + 1];
      lo[w] = prmt(a, b, 0x6420); hi[w] = prmt(a, b, 0x7531);
    }
  }
};
// Four weights from four nibbles of selectors: planes 0-2 in t; 4 * plane 3 + position in u.
template <int B> DI void look(const Table<B>& table, u32 t, u32 u, u32& h01, u32& h23) {
  u32 lo = prmt(table.lo[0], B == 2 ? 0 : table.lo[B == 2 ? 0 : 1], t), hi = prmt(table.hi[0], B == 2 ? 0 : table.hi[B == 2 ? 0 : 1], t);
  if constexpr (B == 4) {
    lo = prmt(lo, prmt(table.lo[2], table.lo[3], t), u);
    hi = prmt(hi, prmt(table.hi[2], table.hi[3], t), u);
  }
  h01 = prmt(lo, hi, 0x5140); h23 = prmt(lo, hi, 0x7362);
}
DI void copy_async(u32 to, u64 from) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory"); }
DI void copy_async(u32 to, u64 from, u32 bytes) {              // the rest of 16 bytes is zero
  asm volatile("cp.async.ca.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DI void copy_async8(u32 to, u64 from) { asm volatile("cp.async.ca.shared.global [%0],[%1],8;" ::"r"(to), "l"(from) : "memory"); }

// A look-up in tables in shared memory: see below, "up to 8 bits".
template <int OFFSET> DI u32 entry(u32 at) { u32 d; asm volatile("ld.shared.u16 %0,[%1+%2];" : "=r"(d) : "r"(at), "n"(SHARED_BASE + OFFSET)); return d; }
template <int AT> DI void look_shared(u32 even, u32 odd, u32 lane4, u32* h) {
  UNROLL for (int q = 0; q < 4; q++) h[q] = mad(entry<AT>(prmt(odd, lane4, 0x5504 + q * 16)), 65536u, entry<AT>(prmt(even, lane4, 0x5504 + q * 16)));
}
// Two weights at once, whose codes are the nibbles of a byte.
template <int OFFSET> DI u32 pair_entry(u32 at) { u32 d; asm volatile("ld.shared.u32 %0,[%1+%2];" : "=r"(d) : "r"(at), "n"(SHARED_BASE + OFFSET)); return d; }
template <int AT> DI void look_pairs(u32 codes, u32 lane4, u32* h) {
  UNROLL for (int q = 0; q < 4; q++) h[q] = pair_entry<AT>(prmt(codes, lane4, 0x5504 + q * 16));
}
// Rows r + 8i. Those with odd i look up in shared memory, to relieve the ALU: single weights at 4 bits, SINGLES, two at a time
// below, PAIRS. A table of pairs has its entry for codes c and d of row r + 8 + 16j at byte (16 * d + c + (j << B)) * 256 +
// 128 * half + 16 * r, four times; so the tables for j = 1 lie where no code of j = 0 leads.
template <int B> constexpr bool SINGLES = B == 4;
template <int B> constexpr bool PAIRS = !EXPAND && B <= PAIR_BITS;
template <int B> constexpr bool MIXED = SINGLES<B> || PAIRS<B>;
template <int B> constexpr int SPREAD = PAIRS<B> ? (B == 2 ? 56 : 128) * 256 : SINGLES<B> ? 4096 : 0;  // bytes of such tables
template <int B, int ROW_BLOCKS> struct Merged {                // what slots share: planes 0 and 1; planes 2 and 3, or 2 alone
  u32 pair[2 * ROW_BLOCKS][2], more[2 * ROW_BLOCKS][2];
  DI Merged(const u32 (*words)[2 * ROW_BLOCKS]) {
    UNROLL for (int i = 0; i < 2 * ROW_BLOCKS; i++)
      UNROLL for (int odd = 0; odd < 2; odd++) {
        u32 mask = odd ? ~M2 : M2;
        pair[i][odd] = choose(words[0][i], words[1][i], mask);
        if constexpr (SINGLES<B>) more[i][odd] = i & 1 ? choose(words[2][i], words[3][i], mask) : words[2][i] & mask;
        else if constexpr (B > 2) more[i][odd] = words[2][i] & mask;
      }
  }
};
// Weights of slot S: a[rows r, r+8 | r+16, r+24][first, second k16][operand register].
template <int B, int ROW_BLOCKS, int S>
DI void decode_low(const Table<B>* table, const u32 (*words)[2 * ROW_BLOCKS], const Merged<B, ROW_BLOCKS>& merged, u32 lane4, u32 (*a)[2][4]) {
  UNROLL for (int i = 0; i < 2 * ROW_BLOCKS; i++) {
    u32 t = merged.pair[i][S & 1], u = 0, h[4];
    if constexpr (B == 2) t &= rotl(M3, S);
    else t = choose(t, merged.more[i][S & 1], rotl(M3, S));
    if (PAIRS<B> && (i & 1)) {
      if (i & 2) look_pairs<(256 << B)>(rotr<S>(t), lane4, h); else look_pairs<0>(rotr<S>(t), lane4, h);
    } else if (SINGLES<B> && (i & 1)) {
      u32 even = rotr<S>(t & rotl(0x0F0F0F0Fu, S)), odd = rotr<S + 4>(t & rotl(0xF0F0F0F0u, S));
      if (i & 2) look_shared<2>(even, odd, lane4, h); else look_shared<0>(even, odd, lane4, h);
    } else {
      if constexpr (B == 4) u = and_or(words[3][i], rotl(M1, S + 3), rotl(POSITION, S + 1));
      look<B>(table[MIXED<B> ? i >> 1 : i], S == 0 ? t : t >> S, B == 4 ? u >> (S + 1) : 0, h[0], h[1]);
      look<B>(table[MIXED<B> ? i >> 1 : i], rotr<16 + S>(t), B == 4 ? rotr<17 + S>(u) : 0, h[2], h[3]);
    }
    a[i >> 1][0][i & 1] = h[0]; a[i >> 1][0][2 + (i & 1)] = h[1]; a[i >> 1][1][i & 1] = h[2]; a[i >> 1][1][2 + (i & 1)] = h[3];
  }
}
template <int B, int ROW_BLOCKS, int S>
DI void slot_low(const Table<B>* table, const u32 (*words)[2 * ROW_BLOCKS], const Merged<B, ROW_BLOCKS>& merged, u32 lane4, const uint4* x, float (*acc)[NT][4]) {
  u32 a[ROW_BLOCKS][2][4];
  decode_low<B, ROW_BLOCKS, S>(table, words, merged, lane4, a);
  UNROLL for (int n = 0; n < NT; n++) {
    uint4 v = x[(S * NT + n) * 32];
    UNROLL for (int m = 0; m < ROW_BLOCKS; m++) { multiply(acc[m][n], a[m][0], v.x, v.y); multiply(acc[m][n], a[m][1], v.z, v.w); }
  }
}
// A lane copies just what it reads itself, so a warp's two stages need no barrier: [2][B planes, 4 * NT inputs][32 lanes].
template <int B> DI int run_low(const Arguments& a, int4 work, int item, unsigned char* shared) {
  constexpr int ROW_BLOCKS = HALVED ? 1 : 2, TABLE = (32 << B) * ROW_BLOCKS, PLANE = 256 * ROW_BLOCKS, STAGE = B * PLANE + NT * 2048;
  int thread = this_thread(), lane = thread & 31, warp = thread >> 5, wk = warp % WK, half = warp / WK, group = work.x, expert = work.y;
  int pair = HALVED ? item >> 1 : item, block = HALVED ? item & 1 : 0, tile = row_tile(pair, half) * COL_TILES;
  unsigned char* stages = shared + SPREAD<B>;
  unsigned char* tables = stages + STAGE;                      // raw entries [2 halves], in a stage that is used later
  float* parts = reinterpret_cast<float*>(stages);             // sums, in stages that are used no more
  stages += warp * 2 * STAGE;
  u32 to = (u32)__cvta_generic_to_shared(stages), to_planes = to + lane * (PLANE / 32), to_inputs = to + B * PLANE + lane * 16, lane4 = lane * 4 + half * 128;
  Planes planes(a, expert, lane);
  Inputs inputs(a, group, lane);
  auto fetch_planes = [&](int kt, u32 stage) {
    UNROLL for (int p = 0; p < B; p++) {
      if (HALVED) copy_async8(to_planes + stage + p * PLANE, planes.at(p, tile + kt) + block * 8);
      else copy_async(to_planes + stage + p * PLANE, planes.at(p, tile + kt));
    }
  };
  auto fetch_inputs = [&](int kt, u32 stage) {
    UNROLL for (int n = 0; n < NT; n++) {
      u64 x = mad_wide(kt, 256, inputs.x[n]);
      UNROLL for (int s = 0; s < 4; s++) copy_async(to_inputs + stage + (s * NT + n) * 512, x + s * 64, inputs.size(n, kt, s, lane));
    }
  };
  for (int i = thread; i < 2 * TABLE / 16; i += 32 * WARPS) {
    int h = i / (TABLE / 16), byte = i % (TABLE / 16) * 16, row = row_tile(pair, h) * 32 + block * 16;
    copy_async((u32)__cvta_generic_to_shared(tables + h * TABLE + byte), (u64)table_at(a, work, row * (2 << B) + byte));
  }
  if (wk < COL_TILES) fetch_planes(wk, 0);
  inputs_ready(a, group);
  if (wk < COL_TILES) fetch_inputs(wk, 0);
  commit();
  wait<0>();
  __syncthreads();
  Table<B> table[MIXED<B> ? ROW_BLOCKS : 2 * ROW_BLOCKS];
  UNROLL for (int i = 0; i < 2 * ROW_BLOCKS; i++)
    if (!MIXED<B> || i % 2 == 0)
      table[MIXED<B> ? i / 2 : i].read(reinterpret_cast<const u32*>(tables + half * TABLE + ((lane >> 2) + i * 8) * (2 << B)));
  if constexpr (SINGLES<B>)                                    // rows r + 8 (low half) and r + 24: two entries of a row, four copies
    for (int i = thread; i < 128; i += 32 * WARPS) {
      int r = i & 7, two = i >> 3 & 7, h = i >> 6;
      const u32* from = reinterpret_cast<const u32*>(tables + h * TABLE) + (r + 8) * 8 + two;
      u32 upper = from[0], lower = ROW_BLOCKS == 2 ? from[16 * 8] : 0;
      unsigned char* at = shared + two * 512 + h * 128 + r * 16;
      u32 v = prmt(upper, lower, 0x5410), w = prmt(upper, lower, 0x7632);
      *reinterpret_cast<uint4*>(at) = make_uint4(v, v, v, v);
      *reinterpret_cast<uint4*>(at + 256) = make_uint4(w, w, w, w);
    }
  if constexpr (PAIRS<B>)                                      // a second code d with all first codes c
    for (int i = thread; i < 16 * ROW_BLOCKS << B; i += 32 * WARPS) {
      int r = i & 7, d = i >> 3 & (1 << B) - 1, h = i >> (3 + B) & 1, j = i >> (4 + B);
      const unsigned char* from = tables + h * TABLE + (r + 8 + 16 * j) * (2 << B);
      u32 second = reinterpret_cast<const u16*>(from)[d];
      unsigned char* at = shared + (16 * d + (j << B)) * 256 + h * 128 + r * 16;
      UNROLL for (int c = 0; c < 1 << B; c++) {
        u32 v = prmt(reinterpret_cast<const u32*>(from)[c / 2], second, c & 1 ? 0x5432 : 0x5410);
        *reinterpret_cast<uint4*>(at + c * 256) = make_uint4(v, v, v, v);
      }
    }
  __syncthreads();
  float acc[ROW_BLOCKS][NT][4];
  clear<ROW_BLOCKS>(acc);
  u32 stage = 0;
  ROLLED for (int kt = wk; kt < COL_TILES; kt += WK) {
    if (kt + WK < COL_TILES) {
      fetch_planes(kt + WK, STAGE - stage);
      fetch_inputs(kt + WK, STAGE - stage);
    }
    commit();
    wait<1>();
    const unsigned char* loaded = stages + stage + lane * (PLANE / 32);
    const uint4* x = reinterpret_cast<const uint4*>(stages + stage + B * PLANE + lane * 16);
    u32 words[B][2 * ROW_BLOCKS];
    UNROLL for (int p = 0; p < B; p++) {
      if constexpr (HALVED) {
        uint2 v = *reinterpret_cast<const uint2*>(loaded + p * PLANE);
        words[p][0] = v.x; words[p][1] = v.y;
      } else {
        uint4 v = *reinterpret_cast<const uint4*>(loaded + p * PLANE);
        words[p][0] = v.x; words[p][1] = v.y; words[p][2] = v.z; words[p][3] = v.w;
      }
    }
    Merged<B, ROW_BLOCKS> merged(words);
    slot_low<B, ROW_BLOCKS, 0>(table, words, merged, lane4, x, acc);
    slot_low<B, ROW_BLOCKS, 1>(table, words, merged, lane4, x, acc);
    slot_low<B, ROW_BLOCKS, 2>(table, words, merged, lane4, x, acc);
    slot_low<B, ROW_BLOCKS, 3>(table, words, merged, lane4, x, acc);
    stage = STAGE - stage;
  }
  int following = take_next(a);
  put<ROW_BLOCKS>(parts + warp * (STAGE / 2), acc, lane);
  __syncthreads();
  finish<WK, ROW_BLOCKS, STAGE / 2>(a, parts, pair, block, group, expert, lane, warp);
  written(a, group, 1);
  return following;
}

// ---- up to 8 bits: tables in shared memory, every lane owning a bank ------------------------------------------
// Word `lane` of line (entry v, pair of row blocks j) holds entry v of rows r + 16j (low half) and r + 16j + 8 (high half),
// r = lane / 4, at byte v * 256 + j * 128 + lane * 4. A lane reads its own bank alone: random lookups never conflict. The
// address of a lookup is one byte permute: byte 0 is 4 * lane, byte 1 the code.

// `which` is the number of the table of a warp's row tile, in the bits of a byte above the code, already rotated by S.
template <int B, int S> DI void bytes_of(const u32* words, const u32* pair, const u32* pair2, const u32* high, const u32* high2, u32 which, u32& even, u32& odd) {
  u32 low, top;                                                 // planes 0-3 of eight weights as nibbles, rotated by S
  if constexpr (B == 3) low = and_or(pair[S & 1], rotl(M3, S), words[2] & rotl(M1, S + 2));
  else low = choose(pair[S & 1], pair2[S & 1], rotl(M3, S));
  if constexpr (B <= 4) top = which;
  else if constexpr (B == 5) top = and_or(words[4], rotl(M1, S + 4), which);
  else if constexpr (B == 6) top = and_or(high[S & 1], rotl(M3, S + 4), which);
  else if constexpr (B == 7) top = and_or(high[S & 1], rotl(M3, S + 4), and_or(words[6], rotl(M1, S + 6), which));
  else top = choose(high[S & 1], high2[S & 1], rotl(M3, S + 4));
  even = rotr<S>(choose(low, top, rotl(0x0F0F0F0Fu, S))); odd = rotr<S + 4>(choose(low, top, rotl(0xF0F0F0F0u, S)));
}
template <int I> DI void row_high(u32 even, u32 odd, u32 lane4, u32 (*a)[2][4]) {
  u32 h[4];
  look_shared<(I >> 1) * 128 + (I & 1) * 2>(even, odd, lane4, h);
  a[I >> 1][0][I & 1] = h[0]; a[I >> 1][0][2 + (I & 1)] = h[1]; a[I >> 1][1][I & 1] = h[2]; a[I >> 1][1][2 + (I & 1)] = h[3];
}
template <int B, int S> DI void decode_high(const u32 (*words)[B], const u32 (*pairs)[4][2], u32 lane4, u32 which, u32 (*a)[2][4]) {
  which = rotl_by<S>(which);
  u32 even[4], odd[4];
  UNROLL for (int i = 0; i < 4; i++) bytes_of<B, S>(words[i], pairs[0][i], pairs[1][i], pairs[2][i], pairs[3][i], which, even[i], odd[i]);
  row_high<0>(even[0], odd[0], lane4, a); row_high<1>(even[1], odd[1], lane4, a);
  row_high<2>(even[2], odd[2], lane4, a); row_high<3>(even[3], odd[3], lane4, a);
}
template <int B, int S> DI void slot_high(const u32 (*words)[B], const u32 (*pairs)[4][2], u32 lane4, u32 which, const uint4* x, Sums acc) {
  u32 a[2][2][4];
  decode_high<B, S>(words, pairs, lane4, which, a);
  UNROLL for (int n = 0; n < NT; n++)
    UNROLL for (int m = 0; m < 2; m++) { multiply(acc[m][n], a[m][0], x[n].x, x[n].y); multiply(acc[m][n], a[m][1], x[n].z, x[n].w); }
}
template <int B> DI void pair_up(const uint4* loaded, u32 (*words)[B], u32 (*pairs)[4][2]) {
  UNROLL for (int i = 0; i < 4; i++) {
    UNROLL for (int p = 0; p < B; p++) words[i][p] = reinterpret_cast<const u32*>(loaded + p)[i];
    UNROLL for (int odd = 0; odd < 2; odd++) {
      u32 mask = odd ? ~M2 : M2;
      UNROLL for (int q = 0; q < 4; q++) pairs[q][i][odd] = 2 * q + 1 < B ? choose(words[i][2 * q], words[i][2 * q + 1 < B ? 2 * q + 1 : 0], mask) : 0;
    }
  }
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
  while (2 * tiles * (256 << B) <= RESIDENT && tiles < 2 * ITEMS && WARPS % (2 * tiles) == 0) tiles *= 2;
  return tiles;
}
template <int B> DI int run_high(const Arguments& a, int4 work, int item, unsigned char* shared) {
  constexpr int TILES = tiles_at_once<B>(), SPLIT = WARPS / TILES, PART = 8 * NT * 32;
  int thread = this_thread(), lane = thread & 31, warp = thread >> 5, group = work.x, expert = work.y, mine = warp / SPLIT, wk = warp % SPLIT;
  int first = 2 * item, last = min(first + 2 * ITEMS, (ROW_TILES + 1) / 2 * 2);
  unsigned char* strip = shared + TILES * (256 << B);
  float* parts = reinterpret_cast<float*>(strip + Fill<B, TILES>::BYTES);  // [WARPS, or 2 * WARPS if TILES is 1][8 * NT][32]
  u32 which = B < 8 ? (u32)mine * (0x11111111u << (B & 3)) : 0;
  Planes planes(a, expert, lane);
  uint4 current[B], next[B];
  auto tile_of = [&](int step) { step = min(step, last - 1); return row_tile(step >> 1, step & 1); };
  auto fetch = [&](int tile, uint4* words) {
    UNROLL for (int p = 0; p < B; p++) words[p] = load_stream((const void*)planes.at(p, tile));
  };
  auto finish_items = [&](int step) {                           // of the phase that began with `step`
    if constexpr (TILES == 1) {
      if (step & 1) finish<SPLIT, 2, PART>(a, parts, step >> 1, 0, group, expert, lane, warp);
    } else {
      ROLLED for (int i = 0; i < TILES / 2; i++)
        if (step + 2 * i < last) finish<SPLIT, 2, PART>(a, parts + 2 * i * SPLIT * PART, (step >> 1) + i, 0, group, expert, lane, warp);
    }
  };
  Fill<B, TILES>::load(a, work, strip, thread, [&](int q) { return tile_of(first + q); });
  if (wk < COL_TILES) fetch(tile_of(first + mine) * COL_TILES + wk, current);
  Inputs inputs(a, group, lane);
  inputs_ready(a, group);
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
    clear<2>(acc);
    auto turn = [&](int kt, const uint4* loaded, uint4* ahead) {
      int following = kt + SPLIT < COL_TILES ? tile + kt + SPLIT : after;
      if (following >= 0) fetch(following, ahead);
      tile_high<B>(loaded, inputs, kt, lane, which, acc);
    };
    if constexpr (PINGPONG && B < 7) {                                // two turns, so that no register is copied
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
    put<2>(parts + (TILES == 1 ? (step & 1) * WARPS + warp : warp) * PART, acc, lane);
  }
  int following = take_next(a);
  __syncthreads();
  finish_items(first + (last - first - 1) / TILES * TILES);
  written(a, group, (last - first) / 2);
  return following;
}
// ---- whole blocks as plain matrices, for prompts ---------------------------------------------------------------

// One row tile: out [ROWS, COLS] gets the weights, by the same decoders.
template <int S> DI void write_slot(u16* out, int tile, int kt, int lane, const u32 (*a)[2][4]) {
  int k = kt * 128 + S * 32 + (lane & 3) * 8;
  UNROLL for (int i = 0; i < 4; i++) {
    int row = tile * 32 + (lane >> 2) + 8 * i;
    if (row < ROWS && k < COLS)
      *reinterpret_cast<uint4*>(out + (u64)row * COLS + k) = make_uint4(a[i >> 1][0][i & 1], a[i >> 1][0][2 + (i & 1)], a[i >> 1][1][i & 1], a[i >> 1][1][2 + (i & 1)]);
  }
}
template <int B> DI void expand_block(const Arguments& a, int4 work, u16* out, unsigned char* shared) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tile = blockIdx.x;
  Planes planes(a, work.y, lane);
  uint4 loaded[B];
  Table<B < TABLE_BITS ? B : 2> table[4];
  if constexpr (B < TABLE_BITS) {
    UNROLL for (int i = 0; i < 4; i++)
      table[i].read(reinterpret_cast<const u32*>(table_at(a, work, (tile * 32 + (lane >> 2) + 8 * i) * (2 << B))));
  } else {
    unsigned char* strip = shared + (256 << B);
    Fill<B, 1>::load(a, work, strip, threadIdx.x, [&](int) { return tile; });
    wait<0>();
    __syncthreads();
    Fill<B, 1>::spread(strip, shared, threadIdx.x);
    __syncthreads();
  }
  ROLLED for (int kt = warp; kt < COL_TILES; kt += WARPS) {
    UNROLL for (int p = 0; p < B; p++) loaded[p] = load_stream((const void*)planes.at(p, tile * COL_TILES + kt));
    u32 weights[2][2][4];
    if constexpr (B < TABLE_BITS) {
      u32 words[B][4];
      UNROLL for (int p = 0; p < B; p++) { words[p][0] = loaded[p].x; words[p][1] = loaded[p].y; words[p][2] = loaded[p].z; words[p][3] = loaded[p].w; }
      Merged<B, 2> merged(words);
#define SLOT(S) decode_low<B, 2, S>(table, words, merged, 0, weights); write_slot<S>(out, tile, kt, lane, weights);
      SLOT(0) SLOT(1) SLOT(2) SLOT(3)
#undef SLOT
    } else {
      u32 words[4][B], pairs[4][4][2];
      pair_up<B>(loaded, words, pairs);
#define SLOT(S) decode_high<B, S>(words, pairs, lane * 4, 0, weights); write_slot<S>(out, tile, kt, lane, weights);
      SLOT(0) SLOT(1) SLOT(2) SLOT(3)
#undef SLOT
    }
  }
}
#define EACH_WIDTH TAKE(2) TAKE(3) TAKE(4) TAKE(5) TAKE(6) TAKE(7) TAKE(8)

#if EXPAND
// scratch [blocks in y, ROWS, COLS] = the blocks of experts from `first` on, those that have tokens
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) expand(Arguments a, const int* bits, const int* offsets, const int* counts, int first) {
  int expert = first + blockIdx.y;
  if (counts[expert] == 0) return;
  if ((u32)__cvta_generic_to_shared(dynamic) != SHARED_BASE) __trap();
  int4 work = make_int4(0, expert, bits[expert], offsets[expert]);
  u16* out = reinterpret_cast<u16*>(a.out) + (u64)blockIdx.y * ROWS * COLS;
#define TAKE(B)                        \
  if constexpr (LOW <= B && B <= HIGH) \
    if (work.z == B) expand_block<B>(a, work, out, dynamic);
  EACH_WIDTH
}
#else
// Item `item` of a group, or ITEMS of them from there; returns thread 0's next one.
template <int B> DI int run_as(const Arguments& a, int4 work, int item) {
  if constexpr (B < TABLE_BITS) return run_low<(B < 4 ? B : 4)>(a, work, item, dynamic);
  else return run_high<(B > 4 ? B : 4)>(a, work, item, dynamic);
}
DI void run(const Arguments& a, int4 work, int item) {
#define TAKE(B)                        \
  if constexpr (LOW <= B && B <= HIGH) \
    if (work.z == B) {                 \
      run_as<B>(a, work, item);        \
      return;                          \
    }
  EACH_WIDTH
}
#if DIRECT
struct Direct {
  const long long* ids;    // [TOP_K] experts of the token; outside [0, experts): none
  const int* bits;         // [E]
  const int* offsets;      // [E] bytes of tables in their regions
  const int* live;         // [1] tokens that are real, or null
  float* statistics;       // [2, E] sums of router weights and squares, added to as `route` does; or null
  int experts;
};
DI void count(const Arguments& a, const Direct& d, int slot) {
  long long expert = d.ids[slot], mass = 0, square = 0;
  if (expert < 0 || expert >= d.experts) return;
  for (int other = 0; other < TOP_K; other++) {
    if (d.ids[other] != expert) continue;
    if (other < slot) return;                                   // an expert twice: the first of its slots counts
    double weight = a.weights[other];
    mass += __double2ll_rn(weight * 4294967296.0);
    square += __double2ll_rn(weight * weight * 4294967296.0);
  }
  d.statistics[expert] += (float)((double)mass / 4294967296.0);
  d.statistics[d.experts + expert] += (float)((double)square / 4294967296.0);
}
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) experts(Arguments a, Direct d) {
  if (FIRST && GATED) wait_for_earlier();
  if (!FIRST || GATED) let_next_begin();
  if ((u32)__cvta_generic_to_shared(dynamic) != SHARED_BASE) __trap();
  int slot = blockIdx.y;
  long long expert = d.ids[slot];
  bool none = expert < 0 || expert >= d.experts || (d.live && d.live[0] < 1);
  int4 work = none ? make_int4(0, -1, 0, 0) : make_int4(slot, (int)expert, d.bits[expert], d.offsets[expert]);
  int each = HALVED && work.z >= TABLE_BITS ? 2 : 1, item = blockIdx.x / each;
  if (work.y >= 0 && item * each == (int)blockIdx.x) run(a, work, item);
  if (FIRST && GATED && d.statistics && blockIdx.x == 0 && threadIdx.x == 0 && !none) count(a, d, slot);
  at_the_end();
}
#else
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) experts(Arguments a) {
  if (FIRST && GATED) wait_for_earlier();
  let_next_begin();
  if ((u32)__cvta_generic_to_shared(dynamic) != SHARED_BASE) __trap();
  auto listed = [&](int place) {
    uint4 v = load_written(reinterpret_cast<const uint4*>(a.work + CLASS * a.groups + place));
    return make_int4(v.x, v.y, v.z, v.w);
  };
#if QUEUED
  constexpr int UNITS = ((ROW_TILES + 1) / 2 + ITEMS - 1) / ITEMS;
  int* next = reinterpret_cast<int*>(dynamic + QUEUED);
  int item = blockIdx.x;
  int4 work = item < UNITS * a.groups ? listed(item / UNITS) : make_int4(0, -1, 0, 0);
  // A loop for each width, the widest being listed first: in one loop for all, registers would be shared, and spilled.
#define ALL(B)                                                                               \
  if constexpr (LOW <= B && B <= HIGH)                                                       \
    ROLLED while (work.y >= 0 && work.z == B) {                                              \
      int following = run_as<B>(a, work, item % UNITS * ITEMS);                              \
      __syncthreads(); /* the value before is read, the sums are free */                     \
      if (threadIdx.x == 0) *next = following;                                               \
      __syncthreads();                                                                       \
      item = *next;                                                                          \
      work = item < UNITS * a.groups ? listed(item / UNITS) : make_int4(0, -1, 0, 0);        \
    }
  ALL(8) ALL(7) ALL(6) ALL(5) ALL(4) ALL(3) ALL(2)
#else
  int4 work = listed(blockIdx.y);
  if (work.y >= 0) run(a, work, blockIdx.x * ITEMS);
#endif
  at_the_end();
}
#endif
#endif
