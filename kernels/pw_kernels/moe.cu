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
//   EXPAND        1: blocks are written out as matrices, for prompts, instead of multiplied
//   BLOCKS        wanted on a multiprocessor
//   DIRECT        1: one token, so that every slot is a group and no list is needed
//   HALVED        1: a block takes half of the rows of a pair of row tiles (DIRECT)
//   FIRST         1: the first launch of its module, which waits for what the launches before it wrote
//   QUEUED        0: a block for each item of each group; else the byte of shared memory that holds a block's next item:
//                 the grid is as large as the device, and blocks take the items of their list in turn
//   SHARED_BASE   where dynamic shared memory begins
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

#include "common.cuh"

// ---- arithmetic ---------------------------------------------------------------------------------------------

// Below 5 bits the ALU binds. These two run beside it, where multiply-adds do: the upper half of a word in both halves, a sum
// in fp16 (no half of t may have all of bits 10 to 14), and LINE times byte Q of `codes`, plus `at`.
DI u32 upper(u32 t) {
  u32 d;
  asm("{.reg .b16 l,h; .reg .b32 s; mov.b32 {l,h},%1; mov.b32 s,{h,h}; add.rn.f16x2 %0,s,%2;}" : "=r"(d) : "r"(t), "r"(0x80008000u));
  return d;
}
constexpr int LINE = 128;                                      // bytes: a word for each lane
template <int Q> DI u32 line(u32 codes, u32 at) {
  u32 d;
  asm("dp4a.u32.u32 %0,%1,%2,%3;" : "=r"(d) : "r"(codes), "r"((u32)LINE << 8 * Q), "r"(at));
  return d;
}
DI u64 mad_wide(u32 a, u32 b, u64 c) { u64 d; asm("mad.wide.u32 %0,%1,%2,%3;" : "=l"(d) : "r"(a), "r"(b), "l"(c)); return d; }
template <class V> DI V load_stream(const void* p) {
  V v;
  if constexpr (sizeof(V) == 16) asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  else asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
// A page's number, asked for where this stands: before copies, which would else wait for each other's numbers.
DI u32 load_page(const void* p) { u32 v; asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(v) : "l"(p)); return v; }
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

// The planes of one expert: words `lane` of tile t.
struct Planes {
  u64 pages, start; u32 tile_bytes;
  DI Planes(const Arguments& a, int expert, int lane)
      : pages((u64)(a.plane_pages + expert * (PLANES * PP))), start((u64)a.arena + lane * 16), tile_bytes(a.tile_bytes) {}
  DI const u32* page_of(int p, u32 tile) const { return (const u32*)mad_wide(tile >> TILE_SHIFT, 4, pages) + p * PP; }
  DI u64 in_page(u32 page, u32 tile) const {
    return mad_wide(page, tile_bytes << TILE_SHIFT, mad_wide(tile & ((1 << TILE_SHIFT) - 1), tile_bytes, start));
  }
  DI u64 at(int p, u32 tile) const { return in_page(__ldg(page_of(p, tile)), tile); }
};
constexpr int TABLE_BITS = EXPAND ? 3 : 5;                     // first width whose tables are all in shared memory
extern __shared__ __align__(128) unsigned char dynamic[];

// The slot at a place of a group, slot_count where there is none.
DI int slot_at(const Arguments& a, int group, int place) {
  if (DIRECT) return place ? a.slot_count : group;
  return __ldg(a.slots + group * TOKENS + place);
}
// Sixteen bytes at byte `at` of the table in use.
DI const int* table_page(const Arguments& a, int4 work, int at) { return a.lut_pages + work.y * LP + (work.w + at >> PAGE_SHIFT); }
DI const uint4* table_in(const Arguments& a, int4 work, u64 page, int at) {
  return reinterpret_cast<const uint4*>(a.arena + (page << PAGE_SHIFT) + (work.w + at & ((1 << PAGE_SHIFT) - 1)));
}
DI const uint4* table_at(const Arguments& a, int4 work, int at) { return table_in(a, work, (u32)__ldg(table_page(a, work, at)), at); }
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
// Of a row tile a block takes ROW_BLOCKS of 16 rows: a lane has rows r, r + 8 of each in its words, and its sums by NT * 8 tokens.
constexpr int ROW_BLOCKS = HALVED ? 1 : 2, MY_ROWS = 2 * ROW_BLOCKS, SUMS = 4 * ROW_BLOCKS * NT;
typedef float Sums[ROW_BLOCKS][NT][4];
template <bool> struct WordsOf { typedef uint4 Type; };        // of a plane
template <> struct WordsOf<true> { typedef uint2 Type; };
typedef WordsOf<HALVED>::Type Words;
// Sum i of a lane is that of row block i % ROW_BLOCKS. The K split is added up through shared memory: [2 halves][SPLIT parts],
// STRIDE apart, of [sums][32 lanes].
DI void clear(Sums& acc) {
  UNROLL for (int i = 0; i < SUMS; i++) acc[i % ROW_BLOCKS][i / ROW_BLOCKS >> 2][i / ROW_BLOCKS & 3] = 0.0f;
}
DI void put(float* parts, const Sums& acc, int lane) {
  UNROLL for (int i = 0; i < SUMS; i++) parts[i * 32 + lane] = acc[i % ROW_BLOCKS][i / ROW_BLOCKS >> 2][i / ROW_BLOCKS & 3];
}
// Of the pair of row tiles `pair`, from row block `block` on.
template <int SPLIT, int STRIDE> DI void finish(const Arguments& a, const float* parts, int pair, int block, int group, int expert, int lane, int warp) {
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
template <int AT> DI void look_shared(u32 even, u32 odd, u32 at, u32* h) {
#define LOOK(Q) h[Q] = mad(entry<AT>(line<Q>(odd, at)), 65536u, entry<AT>(line<Q>(even, at)));
  LOOK(0) LOOK(1) LOOK(2) LOOK(3)
#undef LOOK
}
// Two weights at once, whose codes are the nibbles of a byte.
template <int OFFSET> DI u32 pair_entry(u32 at) { u32 d; asm volatile("ld.shared.u32 %0,[%1+%2];" : "=r"(d) : "r"(at), "n"(SHARED_BASE + OFFSET)); return d; }
template <int AT> DI void look_pairs(u32 codes, u32 at, u32* h) {
#define LOOK(Q) h[Q] = pair_entry<AT>(line<Q>(codes, at));
  LOOK(0) LOOK(1) LOOK(2) LOOK(3)
#undef LOOK
}
// Rows r + 8i. At 2 and 4 bits the last half of them look up in shared memory: single weights at 4 bits, two at a time at 2. Their
// tables are lines. Of single weights: line `code` holds entries of row r + 16 in the low halves of its words, of r + 24 in the
// high ones; the other half of the block has the next table. Of two weights: codes c and d have line 16 * d + c of a row's table,
// so that those of both rows and halves fit where no code of the others leads.
template <int B> constexpr int FIRST_SHARED = EXPAND || B == 3 ? 4 : HALVED ? (B == 4 ? 1 : 2) : 2;
template <int B> constexpr int SHARED_ROWS = FIRST_SHARED<B> < MY_ROWS ? MY_ROWS - FIRST_SHARED<B> : 0;
template <int B> DI constexpr int table_line(int half, int k) { return (B == 4 ? half : half + 2 * k) << B; }  // its first one
template <int B> constexpr int SPREAD = SHARED_ROWS<B> ? (B == 4 ? 32 : 64) * LINE : 0;  // bytes of all
template <int B> struct Merged {                // what slots share: planes 0 and 1; planes 2 and 3, or 2 alone
  u32 pair[MY_ROWS][2], more[MY_ROWS][2];
  DI Merged(const u32 (*words)[MY_ROWS]) {
    UNROLL for (int i = 0; i < MY_ROWS; i++)
      UNROLL for (int odd = 0; odd < 2; odd++) {
        u32 mask = odd ? ~M2 : M2;
        pair[i][odd] = choose(words[0][i], words[1][i], mask);
        if constexpr (B == 4) more[i][odd] = i >= FIRST_SHARED<B> ? choose(words[2][i], words[3][i], mask) : words[2][i] & mask;
        else if constexpr (B > 2) more[i][odd] = words[2][i] & mask;
      }
  }
};
// Weights of slot S: a[rows r, r+8 | r+16, r+24][first, second k16][operand register].
template <int B, int S>
DI void decode_low(const Table<B>* table, const u32 (*words)[MY_ROWS], const Merged<B>& merged, u32 at, u32 (*a)[2][4]) {
  UNROLL for (int i = 0; i < MY_ROWS; i++) {
    u32 t = merged.pair[i][S & 1], u = 0, h[4];
    if constexpr (B == 2) t &= rotl(M3, S);
    else t = choose(t, merged.more[i][S & 1], rotl(M3, S));
    if (i >= FIRST_SHARED<B>) {
      u32 even = rotr<S>(B == 4 ? t & rotl(0x0F0F0F0Fu, S) : t), odd = rotr<S + 4>(t & rotl(0xF0F0F0F0u, S));
      if (B == 4 && i == FIRST_SHARED<B>) look_shared<0>(even, odd, at, h);
      else if (B == 4) look_shared<2>(even, odd, at, h);
      else if (i == FIRST_SHARED<B>) look_pairs<0>(even, at, h);
      else look_pairs<table_line<B>(0, 1) * LINE>(even, at, h);
    } else {
      if constexpr (B == 4) u = rotr<S + 1>(and_or(words[3][i], rotl(M1, S + 3), rotl(POSITION, S + 1)));
      t = rotr<S>(t);
      look<B>(table[i], t, u, h[0], h[1]);
      look<B>(table[i], upper(t), upper(u), h[2], h[3]);
    }
    a[i >> 1][0][i & 1] = h[0]; a[i >> 1][0][2 + (i & 1)] = h[1]; a[i >> 1][1][i & 1] = h[2]; a[i >> 1][1][2 + (i & 1)] = h[3];
  }
}
template <int B, int S>
DI void slot_low(const Table<B>* table, const u32 (*words)[MY_ROWS], const Merged<B>& merged, u32 at, const uint4* x, Sums& acc) {
  u32 a[ROW_BLOCKS][2][4];
  decode_low<B, S>(table, words, merged, at, a);
  UNROLL for (int n = 0; n < NT; n++) {
    uint4 v = x[(S * NT + n) * 32];
    UNROLL for (int m = 0; m < ROW_BLOCKS; m++) { multiply(acc[m][n], a[m][0], v.x, v.y); multiply(acc[m][n], a[m][1], v.z, v.w); }
  }
}
// A lane copies just what it reads itself, so a warp's two stages need no barrier: [2][B planes, 4 * NT inputs][32 lanes].
template <int B> DI int run_low(const Arguments& a, int4 work, int item, unsigned char* shared) {
  constexpr int TABLE = (32 << B) * ROW_BLOCKS, PIECES = TABLE / 16, PLANE = 32 * sizeof(Words), STAGE = B * PLANE + NT * 2048;
  static_assert(2 * PIECES <= 32 * WARPS, "a thread copies one piece of the tables");
  int thread = this_thread(), lane = thread & 31, warp = thread >> 5, wk = warp % WK, half = warp / WK, group = work.x, expert = work.y;
  int pair = HALVED ? item >> 1 : item, block = HALVED ? item & 1 : 0, tile = row_tile(pair, half) * COL_TILES, last = tile + COL_TILES - 1;
  unsigned char* stages = shared + SPREAD<B>;
  unsigned char* tables = stages + STAGE;                      // raw entries [2 halves], in a stage that is used later
  float* parts = reinterpret_cast<float*>(stages);             // sums, in stages that are used no more
  stages += warp * 2 * STAGE;
  u32 to = (u32)__cvta_generic_to_shared(stages), to_planes = to + lane * (PLANE / 32), to_inputs = to + B * PLANE + lane * 16, at = lane * 4 + half * table_line<B>(1, 0) * LINE;
  Planes planes(a, expert, lane);
  Inputs inputs(a, group, lane);
  // All numbers of pages that the first copies need are asked for at once.
  int piece_half = thread / PIECES, piece = thread % PIECES * 16, entry = (row_tile(pair, piece_half) * 32 + block * 16) * (2 << B) + piece;
  u32 entry_page = 0, pages[B];
  if (thread < 2 * PIECES) entry_page = load_page(table_page(a, work, entry));
  UNROLL for (int p = 0; p < B; p++) pages[p] = load_page(planes.page_of(p, min(tile + wk, last)));
  if (thread < 2 * PIECES)
    copy_async((u32)__cvta_generic_to_shared(tables + piece_half * TABLE + piece), (u64)table_in(a, work, entry_page, entry));
  // Where the warp's tiles of this turn of the loop lie, if a page holds a plane of the whole row tile; else pages are looked up.
  bool one_page = (1 << TILE_SHIFT) % COL_TILES == 0 || tile >> TILE_SHIFT == last >> TILE_SHIFT;
  u64 from[B], from_x[NT];
  UNROLL for (int p = 0; p < B; p++) from[p] = planes.in_page(pages[p], min(tile + wk, last)) + block * 8;
  UNROLL for (int n = 0; n < NT; n++) from_x[n] = inputs.x[n] + wk * 256;
  auto copy_words = [&](int p, u32 stage, u64 words) {
    if (HALVED) copy_async8(to_planes + stage + p * PLANE, words);
    else copy_async(to_planes + stage + p * PLANE, words);
  };
  auto fetch_planes = [&](int ahead, int kt, u32 stage) {      // column tile kt, which is `ahead` tiles of the warp ahead
    if (one_page || !ahead) {
      UNROLL for (int p = 0; p < B; p++) copy_words(p, stage, from[p] + ahead * WK * 512);
    } else {
      UNROLL for (int p = 0; p < B; p++) copy_words(p, stage, planes.at(p, tile + kt) + block * 8);
    }
  };
  // Where shared memory is busiest, by lanes that have a token: what lies there for the others is multiplied, too, and nobody
  // looks at those sums.
  constexpr bool PRESENT = B != 3 || NT > 1;
  auto fetch_inputs = [&](bool wanted, int ahead, int kt, u32 stage) {
    UNROLL for (int n = 0; n < NT; n++)
      if (wanted && (!PRESENT || inputs.bytes[n]))
        UNROLL for (int s = 0; s < 4; s++) {
          u32 at = to_inputs + stage + (s * NT + n) * 512;
          u64 from = from_x[n] + ahead * WK * 256 + s * 64;
          if constexpr (PRESENT && COLS % 128 == 0) copy_async(at, from);
          else copy_async(at, from, inputs.size(n, kt, s, lane));
        }
  };
  if (wk < COL_TILES) fetch_planes(0, wk, 0);
  inputs_ready(a, group);
  fetch_inputs(wk < COL_TILES, 0, wk, 0);
  commit();
  wait<0>();
  __syncthreads();
  Table<B> table[MY_ROWS - SHARED_ROWS<B>];
  UNROLL for (int i = 0; i < MY_ROWS - SHARED_ROWS<B>; i++)
    table[i].read(reinterpret_cast<const u32*>(tables + half * TABLE + ((lane >> 2) + i * 8) * (2 << B)));
  UNROLL for (int k = 0; k < SHARED_ROWS<B>; k += B == 4 ? 2 : 1) {
    constexpr int EACH = B == 4 ? 8 : 1 << B;                  // jobs of a row: two entries; a second code with all first ones
    for (int job = thread; job < 16 * EACH; job += 32 * WARPS) {
      int r = job & 7, d = job >> 3 & EACH - 1, h = job >> 3 >= EACH;
      const u32* from = reinterpret_cast<const u32*>(tables + h * TABLE + (r + 8 * (FIRST_SHARED<B> + k)) * (2 << B));
      unsigned char* to = shared + (table_line<B>(0, k) + h * table_line<B>(1, 0)) * LINE + r * 16;
      if constexpr (B == 4) {
        u32 low = from[d], high = k + 1 < SHARED_ROWS<B> ? from[8 * 8 + d] : 0;
        u32 v = prmt(low, high, 0x5410), w = prmt(low, high, 0x7632);
        *reinterpret_cast<uint4*>(to + 2 * d * LINE) = make_uint4(v, v, v, v);
        *reinterpret_cast<uint4*>(to + 2 * d * LINE + LINE) = make_uint4(w, w, w, w);
      } else {
        u32 second = reinterpret_cast<const u16*>(from)[d];
        UNROLL for (int c = 0; c < 1 << B; c++) {
          u32 v = prmt(from[c / 2], second, c & 1 ? 0x5432 : 0x5410);
          *reinterpret_cast<uint4*>(to + (16 * d + c) * LINE) = make_uint4(v, v, v, v);
        }
      }
    }
  }
  __syncthreads();
  Sums acc;
  clear(acc);
  auto turn = [&](int stage, int kt) {
    bool more = kt + WK < COL_TILES;
    if (more) fetch_planes(stage + 1, kt + WK, (1 - stage) * STAGE);
    fetch_inputs(more, stage + 1, kt + WK, (1 - stage) * STAGE);
    commit();
    wait<1>();
    const Words* loaded = reinterpret_cast<const Words*>(stages + stage * STAGE) + lane;
    const uint4* x = reinterpret_cast<const uint4*>(stages + stage * STAGE + B * PLANE + lane * 16);
    u32 words[B][MY_ROWS];
    UNROLL for (int p = 0; p < B; p++) {
      Words v = loaded[32 * p];
      UNROLL for (int i = 0; i < MY_ROWS; i++) words[p][i] = reinterpret_cast<const u32*>(&v)[i];
    }
    Merged<B> merged(words);
    slot_low<B, 0>(table, words, merged, at, x, acc);
    slot_low<B, 1>(table, words, merged, at, x, acc);
    slot_low<B, 2>(table, words, merged, at, x, acc);
    slot_low<B, 3>(table, words, merged, at, x, acc);
  };
  ROLLED for (int kt = wk; kt < COL_TILES; kt += 2 * WK) {     // two tiles, so that stages and distances are literals
    turn(0, kt);
    if (COL_TILES % (2 * WK) == 0 || kt + WK < COL_TILES) turn(1, kt + WK);
    UNROLL for (int p = 0; p < B; p++) from[p] += 2 * WK * 512;
    UNROLL for (int n = 0; n < NT; n++) from_x[n] += 2 * WK * 256;
  }
  int following = take_next(a);
  put(parts + warp * (STAGE / 2), acc, lane);
  __syncthreads();
  finish<WK, STAGE / 2>(a, parts, pair, block, group, expert, lane, warp);
  written(a, group, 1);
  return following;
}

// ---- up to 8 bits: tables in shared memory, every lane owning a bank ------------------------------------------
// Word `lane` of line v of a row tile's table holds entry v of rows r (low half) and r + 8 (high half), r = lane / 4; lines for
// rows r + 16 and r + 24 come after those of all row tiles. A lane reads its own bank alone: random lookups never conflict.

constexpr int MOST_TABLES = EXPAND ? 0 : 65536;                // bytes
// Row tiles whose tables are in shared memory at once; the block's warps share them out, and the columns of each.
template <int B> DI constexpr int tiles_at_once() {
  int tiles = 1;
  while (2 * tiles * (ROW_BLOCKS * LINE << B) <= MOST_TABLES && tiles < 2 * ITEMS && WARPS % (2 * tiles) == 0) tiles *= 2;
  return tiles;
}
// Codes of eight weights as bytes.
template <int B, int S> DI void bytes_of(const u32* words, const u32* pair, const u32* pair2, const u32* high, const u32* high2, u32& even, u32& odd) {
  u32 low, top;                                                 // planes 0-3 of eight weights as nibbles, rotated by S; the others
  if constexpr (B == 3) low = and_or(pair[S & 1], rotl(M3, S), words[2] & rotl(M1, S + 2));
  else low = choose(pair[S & 1], pair2[S & 1], rotl(M3, S));
  if constexpr (B <= 4) top = 0;
  else if constexpr (B == 5) top = words[4] & rotl(M1, S + 4);
  else if constexpr (B == 6) top = high[S & 1] & rotl(M3, S + 4);
  else if constexpr (B == 7) top = and_or(high[S & 1], rotl(M3, S + 4), words[6] & rotl(M1, S + 6));
  else top = choose(high[S & 1], high2[S & 1], rotl(M3, S + 4));
  even = rotr<S>(choose(low, top, rotl(0x0F0F0F0Fu, S))); odd = rotr<S + 4>(choose(low, top, rotl(0xF0F0F0F0u, S)));
}
template <int I, int BELOW> DI void row_high(u32 even, u32 odd, u32 at, u32 (*a)[2][4]) {
  u32 h[4];
  look_shared<(I >> 1) * BELOW + (I & 1) * 2>(even, odd, at, h);
  a[I >> 1][0][I & 1] = h[0]; a[I >> 1][0][2 + (I & 1)] = h[1]; a[I >> 1][1][I & 1] = h[2]; a[I >> 1][1][2 + (I & 1)] = h[3];
}
template <int B, int S> DI void decode_high(const u32 (*words)[B], const u32 (*pairs)[MY_ROWS][2], u32 at, u32 (*a)[2][4]) {
  u32 even[MY_ROWS], odd[MY_ROWS];
  UNROLL for (int i = 0; i < MY_ROWS; i++) bytes_of<B, S>(words[i], pairs[0][i], pairs[1][i], pairs[2][i], pairs[3][i], even[i], odd[i]);
  constexpr int BELOW = (tiles_at_once<B>() << B) * LINE;
  row_high<0, BELOW>(even[0], odd[0], at, a); row_high<1, BELOW>(even[1], odd[1], at, a);
  if constexpr (!HALVED) { row_high<2, BELOW>(even[2], odd[2], at, a); row_high<3, BELOW>(even[3], odd[3], at, a); }
}
template <int B, int S> DI void slot_high(const u32 (*words)[B], const u32 (*pairs)[MY_ROWS][2], u32 at, const uint4* x, Sums& acc) {
  u32 a[ROW_BLOCKS][2][4];
  decode_high<B, S>(words, pairs, at, a);
  UNROLL for (int n = 0; n < NT; n++)
    UNROLL for (int m = 0; m < ROW_BLOCKS; m++) { multiply(acc[m][n], a[m][0], x[n].x, x[n].y); multiply(acc[m][n], a[m][1], x[n].z, x[n].w); }
}
template <int B> DI void pair_up(const Words* loaded, u32 (*words)[B], u32 (*pairs)[MY_ROWS][2]) {
  UNROLL for (int i = 0; i < MY_ROWS; i++) {
    UNROLL for (int p = 0; p < B; p++) words[i][p] = reinterpret_cast<const u32*>(loaded + p)[i];
    UNROLL for (int odd = 0; odd < 2; odd++) {
      u32 mask = odd ? ~M2 : M2;
      UNROLL for (int q = 0; q < 4; q++) pairs[q][i][odd] = 2 * q + 1 < B ? choose(words[i][2 * q], words[i][2 * q + 1 < B ? 2 * q + 1 : 0], mask) : 0;
    }
  }
}
// What is used is replaced at once: words by those of the next tile, `fetch`, and the inputs of a slot by those of the slot
// that comes DEPTH later, in tile `next` beyond the last.
constexpr int DEPTH = NT == 1 ? 4 : 2;
template <int B, typename Fetch> DI void tile_high(const Words* loaded, Fetch fetch, const Inputs& inputs, uint4 (*x)[NT], int kt, int next, int lane, u32 at, Sums& acc) {
  u32 words[MY_ROWS][B], pairs[4][MY_ROWS][2];
  pair_up<B>(loaded, words, pairs);
  fetch();
#define SLOT(S) slot_high<B, S>(words, pairs, at, x[S % DEPTH], acc); inputs.load(S + DEPTH < 4 ? kt : next, (S + DEPTH) % 4, lane, x[S % DEPTH]);
  SLOT(0) SLOT(1) SLOT(2) SLOT(3)
#undef SLOT
}
// The tables of some row tiles: copied as they are in the arena to a strip of shared memory while lookups in the tables before
// them go on, then spread out. Rows of the strip are 16 bytes apart beyond their size, so that reading 8 rows at once never
// conflicts. Eight threads spread 8 entries of 8 rows and of the 8 rows below.
template <int B, int TILES> struct Fill {
  static constexpr int PIECES = (1 << B) / 8, ROW = (2 << B) + 16, ROWS_OF = 16 * ROW_BLOCKS, COPIES = TILES * ROWS_OF * PIECES, EACH = ROW_BLOCKS * PIECES, JOBS = TILES * EACH;
  static constexpr int BYTES = TILES * ROWS_OF * ROW;
  template <typename TileOf> DI static void load(const Arguments& a, int4 work, unsigned char* strip, int thread, int block, TileOf tile_of) {
    UNROLL for (int i = 0; i < (COPIES + 32 * WARPS - 1) / (32 * WARPS); i++) {
      int job = i * 32 * WARPS + thread, row = job / PIECES, byte = job % PIECES * 16;
      if (COPIES % (32 * WARPS) && job >= COPIES) break;
      const uint4* from = table_at(a, work, (tile_of(row / ROWS_OF) * 32 + block * 16 + row % ROWS_OF) * (2 << B) + byte);
      copy_async((u32)__cvta_generic_to_shared(strip + row * ROW + byte), (u64)from);
    }
    commit();
  }
  DI static void spread(const unsigned char* strip, unsigned char* tables, int thread) {
    UNROLL for (int i = 0; i < (JOBS + 4 * WARPS - 1) / (4 * WARPS); i++) {
      int job = i * 4 * WARPS + (thread >> 3), part = job % EACH, piece = part % PIECES, pair = part / PIECES;
      if (JOBS % (4 * WARPS) && job >= JOBS) break;
      const unsigned char* from = strip + (job / EACH * ROWS_OF + pair * 16 + (thread & 7)) * ROW + piece * 16;
      uint4 upper = *reinterpret_cast<const uint4*>(from), lower = *reinterpret_cast<const uint4*>(from + 8 * ROW);
      unsigned char* to = tables + ((pair * TILES + job / EACH << B) + piece * 8) * LINE + (thread & 7) * 16;
      UNROLL for (int k = 0; k < 8; k++) {
        u32 v = prmt(reinterpret_cast<const u32*>(&upper)[k / 2], reinterpret_cast<const u32*>(&lower)[k / 2], k & 1 ? 0x7632 : 0x5410);
        *reinterpret_cast<uint4*>(to + k * LINE) = make_uint4(v, v, v, v);
      }
    }
  }
};
template <int B> DI int run_high(const Arguments& a, int4 work, int item, unsigned char* shared) {
  constexpr int TILES = tiles_at_once<B>(), SPLIT = WARPS / TILES, PART = SUMS * 32;
  int thread = this_thread(), lane = thread & 31, warp = thread >> 5, group = work.x, expert = work.y, mine = warp / SPLIT, wk = warp % SPLIT;
  int block = HALVED ? item & 1 : 0, first = HALVED ? item & ~1 : 2 * item, last = min(first + 2 * ITEMS, (ROW_TILES + 1) / 2 * 2);
  unsigned char* strip = shared + TILES * (ROW_BLOCKS * LINE << B);
  // [WARPS, or 2 * WARPS if TILES is 1][SUMS][32]; in the strip, if nothing more comes there
  float* parts = reinterpret_cast<float*>(strip + (TILES == 2 * ITEMS ? 0 : Fill<B, TILES>::BYTES));
  u32 at = lane * 4 + mine * (LINE << B);
  Planes planes(a, expert, lane);
  Words loaded[B];
  auto tile_of = [&](int step) { step = min(step, last - 1); return row_tile(step >> 1, step & 1); };
  auto fetch = [&](int tile) {
    UNROLL for (int p = 0; p < B; p++) loaded[p] = load_stream<Words>((const void*)(planes.at(p, tile) + block * 8));
  };
  auto finish_items = [&](int step) {                           // of the phase that began with `step`
    if constexpr (TILES == 1) {
      if (step & 1) finish<SPLIT, PART>(a, parts, step >> 1, block, group, expert, lane, warp);
    } else {
      ROLLED for (int i = 0; i < TILES / 2; i++)
        if (step + 2 * i < last) finish<SPLIT, PART>(a, parts + 2 * i * SPLIT * PART, (step >> 1) + i, block, group, expert, lane, warp);
    }
  };
  u32 pages[B], first_tile = tile_of(first + mine) * COL_TILES + min(wk, COL_TILES - 1);
  UNROLL for (int p = 0; p < B; p++) pages[p] = load_page(planes.page_of(p, first_tile));
  Fill<B, TILES>::load(a, work, strip, thread, block, [&](int q) { return tile_of(first + q); });
  UNROLL for (int p = 0; p < B; p++) loaded[p] = load_stream<Words>((const void*)(planes.in_page(pages[p], first_tile) + block * 8));
  Inputs inputs(a, group, lane);
  inputs_ready(a, group);
  uint4 x[DEPTH][NT];
  if (wk < COL_TILES)
    UNROLL for (int s = 0; s < DEPTH; s++) inputs.load(wk, s, lane, x[s]);
  ROLLED for (int step = first; step < last; step += TILES) {
    wait<0>();
    __syncthreads();                                            // the last tiles' lookups are over, their parts stored
    Fill<B, TILES>::spread(strip, shared, thread);
    if (step > first) finish_items(step - TILES);
    __syncthreads();
    int tile = tile_of(step + mine) * COL_TILES;
    int after = step + TILES < last ? tile_of(step + TILES + mine) * COL_TILES + wk : -1;
    if (step + TILES < last) Fill<B, TILES>::load(a, work, strip, thread, block, [&](int q) { return tile_of(step + TILES + q); });
    Sums acc;
    clear(acc);
    ROLLED for (int kt = wk; kt < COL_TILES; kt += SPLIT) {
      int next = kt + SPLIT < COL_TILES ? kt + SPLIT : wk, following = kt + SPLIT < COL_TILES ? tile + next : after;
      auto fetch_following = [&] { if (following >= 0) fetch(following); };
      tile_high<B>(loaded, fetch_following, inputs, x, kt, next, lane, at, acc);
    }
    put(parts + (TILES == 1 ? (step & 1) * WARPS + warp : warp) * PART, acc, lane);
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
  Words loaded[B];
  Table<B < TABLE_BITS ? B : 2> table[4];
  if constexpr (B < TABLE_BITS) {
    UNROLL for (int i = 0; i < 4; i++)
      table[i].read(reinterpret_cast<const u32*>(table_at(a, work, (tile * 32 + (lane >> 2) + 8 * i) * (2 << B))));
  } else {
    unsigned char* strip = shared + (256 << B);
    Fill<B, 1>::load(a, work, strip, threadIdx.x, 0, [&](int) { return tile; });
    wait<0>();
    __syncthreads();
    Fill<B, 1>::spread(strip, shared, threadIdx.x);
    __syncthreads();
  }
  ROLLED for (int kt = warp; kt < COL_TILES; kt += WARPS) {
    UNROLL for (int p = 0; p < B; p++) loaded[p] = load_stream<Words>((const void*)planes.at(p, tile * COL_TILES + kt));
    u32 weights[2][2][4];
    if constexpr (B < TABLE_BITS) {
      u32 words[B][4];
      UNROLL for (int p = 0; p < B; p++) { words[p][0] = loaded[p].x; words[p][1] = loaded[p].y; words[p][2] = loaded[p].z; words[p][3] = loaded[p].w; }
      Merged<B> merged(words);
#define SLOT(S) decode_low<B, S>(table, words, merged, 0, weights); write_slot<S>(out, tile, kt, lane, weights);
      SLOT(0) SLOT(1) SLOT(2) SLOT(3)
#undef SLOT
    } else {
      u32 words[MY_ROWS][B], pairs[4][MY_ROWS][2];
      pair_up<B>(loaded, words, pairs);
#define SLOT(S) decode_high<B, S>(words, pairs, lane * 4, weights); write_slot<S>(out, tile, kt, lane, weights);
      SLOT(0) SLOT(1) SLOT(2) SLOT(3)
#undef SLOT
    }
  }
}
// The compiler lays the last one out first. Narrow widths that came behind the long code of wide ones cost a mix of few tokens a fifth.
#define EACH_WIDTH TAKE(8) TAKE(7) TAKE(6) TAKE(5) TAKE(4) TAKE(3) TAKE(2)

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
  __trap();                                                     // a width that WeightPages rules out: down would wait for ever
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
  if (work.y >= 0) run(a, work, blockIdx.x);
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
  if (work.y >= 0) __trap();
#else
  int4 work = listed(blockIdx.y);
  if (work.y >= 0) run(a, work, blockIdx.x * ITEMS);
#endif
  at_the_end();
}
#endif
#endif
