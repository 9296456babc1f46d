// Routed experts of one layer for prompts, on GPUs of compute capability 9.0: bit-planes and tables in arena pages,
// multiplied by the warpgroup matrix unit. Compiled at run time by NVRTC (cuda_prompts.py), which defines the constants
// named below; it includes nothing of a toolkit.
//
//   FLOAT16, ROWS, COLS, ROW_TILES, COL_TILES, PLANES, PP, LP, PAGE_SHIFT, GATED, KIND, BIAS, TOP_K, SHARED_BASE  as in moe.cu
//   LOW, HIGH     least and greatest width that a block can have
//   SLOTS         of a group, a multiple of 16 up to 256
//   COLUMNS, SUMS, INPUTS, OPERANDS  text of the matrix unit's instruction for them (cuda_prompts.py)
//   GROUPS_OF_WARPS  warpgroups of a block;  BLOCKS: wanted on a multiprocessor
//   ROOM          bytes of dynamic shared memory
//
// A warpgroup of four warps multiplies 64 rows by the slots of a group. Its warps decode weights straight into the operand
// that the matrix unit takes from registers, 16 rows a warp, while the unit works on what they decoded before. Activations lie
// in memory as the unit wants them in shared memory: an image [G, K / 64, SLOTS, 64], columns permuted so that a lane's eight
// neighbouring weights meet their inputs, 16-byte units of a row of 128 bytes exchanged by the row's number (its 128-byte
// swizzle).

#include "common.cuh"

// ---- arithmetic -----------------------------------------------------------------------------------

DI float exp2_near(float v) { float d; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(d) : "f"(v)); return d; }
DI float reciprocal(float v) { float d; asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(d) : "f"(v)); return d; }
DI float activate(float gate, float up) {
#if KIND == 1
  return gate * 0.5f * (1.0f + erff(gate * 0.7071067811865476f)) * up;
#elif KIND == 2
  float inner = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  return gate * reciprocal(1.0f + exp2_near(inner * -1.4426950408889634f)) * up;
#else
  return gate * reciprocal(1.0f + exp2_near(gate * -1.4426950408889634f)) * up;
#endif
}

// ---- barriers of shared memory, copies in bulk, the matrix unit ----------------------------------------------------

DI void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DI void barrier_expect(u32 at, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(at), "r"(bytes) : "memory"); }
DI void copy_bulk(u32 to, u64 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
DI void copy_line(u32 to, u64 from) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory"); }
DI void lines_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DI void lines_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
DI void meet(int number, int threads) { asm volatile("bar.sync %0,%1;" ::"r"(number), "r"(threads) : "memory"); }
DI void unit_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DI void unit_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DI void unit_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
#if FLOAT16
#define TYPES "f32.f16.f16"
#else
#define TYPES "f32.bf16.bf16"
#endif
// c [64 rows, SLOTS] += a [64 rows, 16] times 16 columns of the SLOTS rows at `b`.
DI void unit_multiply(float* c, const u32* a, u64 b) {
  asm volatile("{.reg .pred p; setp.eq.u32 p,0,0; wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16." TYPES " " SUMS "," INPUTS ",p,1,1,0;}"
               : OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Rows of 128 bytes, eight of them 1024 bytes from the next eight, 128-byte swizzle.
DI u64 operand(u32 at) { return (u64)(at >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

// Launches overlap: each begins while the one before it ends, waits for that one, then lets the next begin; so when a launch
// begins, everything before the one before it is complete, work lists among it.

// ---- where things are ---------------------------------------------------------------------------------------

struct Arguments {
  const unsigned char* x;  // image of the inputs
  const unsigned char* arena;
  const int* plane_pages;  // [E, PLANES, PP]
  const int* lut_pages;    // [E, LP]
  const float* bias;       // [E, N]
  const float* weights;    // [S]
  const int4* work;        // [G]: group, expert or -1, width, byte of its table in its region
  const int* slots;        // [G, SLOTS], those used first
  void* out;               // image of hidden if GATED, else [S, N] fp32
  int slot_count, groups;  // S, G
};
constexpr int STAGE = SLOTS * 128, WARPS = 4 * GROUPS_OF_WARPS, THREADS = 32 * WARPS, TILES = 2 * GROUPS_OF_WARPS;
constexpr int INNER = GATED ? ROWS / 2 : ROWS, INNER_TILES = INNER / 32, OUT_CHUNKS = (INNER + 63) / 64;
constexpr int CHUNKS = (COLS + 63) / 64, TILE_SHIFT = PAGE_SHIFT - 9, MOST_STAGES = 8;
constexpr int SMALL = ROOM - 256 - 8 * SLOTS;                   // barriers, slots and weights lie behind the rest
// A block has room for its tables, for planes of some tiles and for at least two chunks of activations. The more copies of a
// table there are, the fewer lanes share a bank.
template <int B> constexpr int PLANE_STAGES = B <= 4 ? 4 : B == 5 ? 3 : 2;
template <int B> constexpr int table_bytes(int copies) { return B < 4 ? 0 : (WARPS * 32 * copies) << B; }
template <int B> constexpr int stages_at(int copies) { return (table_bytes<B>(copies) + PLANE_STAGES<B> * WARPS * B * 256 + 1023) / 1024 * 1024; }
template <int B> constexpr int stages_beside(int copies) {
  int fit = (SMALL - stages_at<B>(copies)) / STAGE;
  return fit < MOST_STAGES ? fit : MOST_STAGES;
}
template <int B> constexpr int COPIES = stages_beside<B>(4) >= 2 ? 4 : stages_beside<B>(2) >= 2 ? 2 : 1;
template <int B> constexpr int PLANES_AT = table_bytes<B>(COPIES<B>);
template <int B> constexpr int STAGES_AT = stages_at<B>(COPIES<B>);
template <int B> constexpr int STAGES = stages_beside<B>(COPIES<B>);
enum { X_FULL = 0, X_EMPTY = MOST_STAGES };
DI constexpr u32 barrier(int number) { return SHARED_BASE + SMALL + 8 * number; }
// Of a warpgroup's two row tiles the second is the up rows that go with the gate rows of the first.
DI int row_tile(int t) {
  if (GATED) return (t & 1) * INNER_TILES + min(GROUPS_OF_WARPS * (int)blockIdx.x + (t >> 1), INNER_TILES - 1);
  return min(TILES * (int)blockIdx.x + t, ROW_TILES - 1);
}
DI const uint4* table_at(const Arguments& a, int4 work, int at) {
  int expert = work.y;
  at += work.w;
  u64 page = (u32)__ldg(a.lut_pages + expert * LP + (at >> PAGE_SHIFT));
  return reinterpret_cast<const uint4*>(a.arena + (page << PAGE_SHIFT) + (at & ((1 << PAGE_SHIFT) - 1)));
}

// ---- what is in flight ------------------------------------------------------------------------------------------

// Chunks of activations, copied by one thread into stages that all warps have left.
template <int B> struct Chunks {
  u64 from; int next, stage; u32 parity;
  DI Chunks(const Arguments& a, int4 work) : from((u64)a.x + (u64)work.x * CHUNKS * STAGE), next(0), stage(0), parity(1) {}
  DI void fetch() {
    if (next == CHUNKS) return;
    barrier_wait(barrier(X_EMPTY) + 8 * stage, parity);
    barrier_expect(barrier(X_FULL) + 8 * stage, STAGE);
    copy_bulk(SHARED_BASE + STAGES_AT<B> + stage * STAGE, from + (u64)next * STAGE, STAGE, barrier(X_FULL) + 8 * stage);
    next++;
    if (++stage == STAGES<B>) { stage = 0; parity ^= 1; }
  }
};
// Planes of a row tile, for the two warps that have sixteen of its rows each: a lane copies sixteen bytes of every second plane
// and reads eight of every one.
template <int B> struct Planes {
  static constexpr int MINE = (B + 1) / 2;                      // planes 2 j + half
  const int* pages; u64 start; u32 base[MINE], to, from; int first, page, half, pair, stage, read_stage;
  DI Planes(const Arguments& a, int4 work, int warp, int lane) : half(warp & 1), pair(warp >> 1), stage(0), read_stage(0) {
    pages = a.plane_pages + (work.y * PLANES + half) * PP;
    start = (u64)a.arena + lane * 16;
    from = PLANES_AT<B> + pair * (PLANE_STAGES<B> * B * 512) + lane * 16;
    to = SHARED_BASE + from + half * 512;
    from += half * 8;
    first = row_tile(pair) * COL_TILES;
    turn(first >> TILE_SHIFT);
  }
  DI void turn(int to_page) {
    page = to_page;
    UNROLL for (int j = 0; j < MINE; j++)
      if (2 * j + 1 < B || half == 0) base[j] = ((u32)__ldg(pages + 2 * j * PP + page) - page) << TILE_SHIFT;
  }
  DI void fetch(int kt) {
    if (kt < COL_TILES) {
      int tile = first + kt;
      if (tile >> TILE_SHIFT != page) turn(tile >> TILE_SHIFT);
      UNROLL for (int j = 0; j < MINE; j++)
        if (2 * j + 1 < B || half == 0) copy_line(to + (stage * B + 2 * j) * 512, start + (u64)(base[j] + tile) * 512);
      stage = stage + 1 == PLANE_STAGES<B> ? 0 : stage + 1;
    }
    lines_commit();
  }
  // When both warps are here, both have copied what is read now and have left the stage that is filled next.
  template <class Words> DI void read(const unsigned char* shared, Words& words) {
    lines_wait<PLANE_STAGES<B> - 2>();
    meet(1 + GROUPS_OF_WARPS + pair, 64);
    const unsigned char* at = shared + from + read_stage * (B * 512);
    UNROLL for (int p = 0; p < B; p++) {
      uint2 v = *reinterpret_cast<const uint2*>(at + p * 512);
      words[p][0] = v.x; words[p][1] = v.y;
    }
    read_stage = read_stage + 1 == PLANE_STAGES<B> ? 0 : read_stage + 1;
  }
};

// ---- decoders: sixteen rows of a warp, two of a lane ---------------------------------------------------------------
// `ask` reads tables, `place` puts them where they are looked up, `pair_up` begins a tile and `prepare` a slot S of 32 columns;
// `look_up` is for half K of them, and `combine` makes the matrix unit's operand of what it found.

constexpr u32 M1 = 0x11111111u, M2 = 0x55555555u, M3 = 0x33333333u;

template <int B> struct Registers {                            // tables of two rows: low bytes and high bytes of the entries
  static constexpr int WORDS = B == 2 ? 1 : (1 << B) / 4;
  u32 entries[2][2 * WORDS], lo[2][WORDS], hi[2][WORDS], words[B][2], even[2], odd[2], codes[2], found[2][2];
  DI void ask(const Arguments& a, int4 work, int warp, int lane) {
    UNROLL for (int i = 0; i < 2; i++) {
      int row = row_tile(warp >> 1) * 32 + (warp & 1) * 16 + i * 8 + (lane >> 2);
      const u32* from = reinterpret_cast<const u32*>(table_at(a, work, row * (2 << B)));
      UNROLL for (int w = 0; w < 2 * WORDS; w++) entries[i][w] = __ldg(from + w);
    }
  }
  DI void place(unsigned char*, int, int) {
    UNROLL for (int i = 0; i < 2; i++)
      UNROLL for (int w = 0; w < WORDS; w++) {
        lo[i][w] = prmt(entries[i][2 * w], entries[i][2 * w + 1], 0x6420); hi[i][w] = prmt(entries[i][2 * w], entries[i][2 * w + 1], 0x7531);
      }
  }
  DI void pair_up() {
    UNROLL for (int i = 0; i < 2; i++) { even[i] = choose(words[0][i], words[1][i], M2); odd[i] = choose(words[0][i], words[1][i], ~M2); }
  }
  template <int S> DI void prepare() {
    UNROLL for (int i = 0; i < 2; i++) {
      codes[i] = (S & 1 ? odd[i] : even[i]) & rotl(M3, S);
      if constexpr (B == 3) codes[i] |= words[B - 1][i] & rotl(M1, S + 2);
    }
  }
  template <int S, int K> DI void look_up() {                   // four weights from four nibbles of selectors
    UNROLL for (int i = 0; i < 2; i++) {
      constexpr int SECOND = B == 2 ? 0 : 1;
      u32 t = K ? rotr<16 + S>(codes[i]) : S == 0 ? codes[i] : codes[i] >> S;
      found[i][0] = prmt(lo[i][0], B == 2 ? 0 : lo[i][SECOND], t); found[i][1] = prmt(hi[i][0], B == 2 ? 0 : hi[i][SECOND], t);
    }
  }
  DI void combine(u32* a) const {
    UNROLL for (int i = 0; i < 2; i++) a[i] = prmt(found[i][0], found[i][1], 0x5140), a[2 + i] = prmt(found[i][0], found[i][1], 0x7362);
  }
};

// Tables in shared memory. With copies each warp has its own: word (r, copy) of an entry's line holds it for row r, in its low
// half, and r + 8; with four a lane has a bank of its own, with two no more than two lanes meet in one. Where there is room for
// one alone (MIXED) the two warps of a row tile share lines of sixteen words: word r holds rows r, in its low half, and r + 16, and
// half of the lanes look up their second row first, so that again no more than two meet. The address of a lookup is one dot
// product: a byte of codes times the length of a line, plus where the lane's words begin.
template <int OFFSET> DI u32 entry(u32 at) { u32 d; asm volatile("ld.shared.u16 %0,[%1+%2];" : "=r"(d) : "r"(at), "n"(SHARED_BASE + OFFSET)); return d; }
template <int Q, int LINE> DI u32 line(u32 codes, u32 at) {
  u32 d;
  asm("dp4a.u32.u32 %0,%1,%2,%3;" : "=r"(d) : "r"(codes), "r"((u32)LINE << 8 * Q), "r"(at));
  return d;
}

template <int B> struct Shared {
  static constexpr int C = COPIES<B>, LINE = C == 1 ? 64 : 32 * C;
  static constexpr bool MIXED = C == 1;
  static constexpr int PIECES = (1 << B) / 8, JOBS = WARPS * PIECES, AT_ONCE = THREADS / 8, ROUNDS = (JOBS + AT_ONCE - 1) / AT_ONCE;
  uint4 raw[ROUNDS][2];
  u32 pairs[4][2][2], words[B][2], where[2], even[2], odd[2], found[4][2];  // [planes 2q, 2q + 1][row][odd slots]
  bool second_first;
  DI void pair_up() {
    if constexpr (MIXED)
      UNROLL for (int p = 0; p < B; p++) swap(words[p][0], words[p][1]);
    UNROLL for (int i = 0; i < 2; i++)
      UNROLL for (int odd = 0; odd < 2; odd++)
        UNROLL for (int q = 0; q < 4; q++)
          pairs[q][i][odd] = 2 * q + 1 < B ? choose(words[2 * q][i], words[2 * q + 1 < B ? 2 * q + 1 : 0][i], odd ? ~M2 : M2) : 0;
  }
  DI void swap(u32& first, u32& second) const {
    u32 other = second_first ? first : second;
    first = second_first ? second : first;
    second = other;
  }
  // Bytes of codes of 32 columns: those of even and of odd place.
  template <int S> DI void prepare() {
    UNROLL for (int i = 0; i < 2; i++) {
      u32 low = choose(pairs[0][i][S & 1], pairs[1][i][S & 1], rotl(M3, S));     // planes 0-3 as nibbles, rotated by S
      if constexpr (B == 4) {
        even[i] = rotr<S>(low & rotl(0x0F0F0F0Fu, S)), odd[i] = rotr<S + 4>(low & rotl(0xF0F0F0F0u, S));
      } else {
        u32 top;
        if constexpr (B == 5) top = words[B > 4 ? 4 : 0][i] & rotl(M1, S + 4);
        else if constexpr (B == 6) top = pairs[2][i][S & 1] & rotl(M3, S + 4);
        else if constexpr (B == 7) top = and_or(words[B == 7 ? 6 : 0][i], rotl(M1, S + 6), pairs[2][i][S & 1] & rotl(M3, S + 4));
        else top = choose(pairs[2][i][S & 1], pairs[3][i][S & 1], rotl(M3, S + 4));
        even[i] = rotr<S>(choose(low, top, rotl(0x0F0F0F0Fu, S))), odd[i] = rotr<S + 4>(choose(low, top, rotl(0xF0F0F0F0u, S)));
      }
    }
  }
  template <int I, int Q> DI void look(u32* f) {
    f[0] = entry<MIXED ? 0 : 2 * I>(line<Q, LINE>(even[I], where[I]));
    f[1] = entry<MIXED ? 0 : 2 * I>(line<Q, LINE>(odd[I], where[I]));
  }
  template <int S, int K> DI void look_up() { look<0, 2 * K>(found[0]); look<1, 2 * K>(found[1]); look<0, 2 * K + 1>(found[2]); look<1, 2 * K + 1>(found[3]); }
  DI void combine(u32* a) const {
    UNROLL for (int i = 0; i < 4; i++) a[i] = mad(found[i][1], 65536u, found[i][0]);
    if constexpr (MIXED) { swap(a[0], a[1]); swap(a[2], a[3]); }
  }
  // Eight threads spread a piece of 8 entries for 8 rows and for those that share their words.
  struct Job {
    int row, piece, at;
    DI Job(int number) {
      int eight, r = threadIdx.x & 7;                           // eights of rows, two for each warp
      piece = (MIXED ? number / 2 : number) % PIECES;
      eight = MIXED ? number / (2 * PIECES) * 2 + number % 2 : number / PIECES;
      row = row_tile(eight / 2) * 32 + eight % 2 * (MIXED ? 8 : 16) + r;
      at = (MIXED ? eight / 2 * (LINE << B) + eight % 2 * 32 : eight * (LINE << B)) + piece * 8 * LINE + r * 4 * C;
    }
  };
  DI void ask(const Arguments& a, int4 work, int, int) {
    UNROLL for (int i = 0; i < ROUNDS; i++) {
      Job job(min(i * AT_ONCE + ((int)threadIdx.x >> 3), JOBS - 1));
      UNROLL for (int below = 0; below < 2; below++)
        raw[i][below] = __ldg(table_at(a, work, (job.row + below * (MIXED ? 16 : 8)) * (2 << B) + job.piece * 16));
    }
  }
  DI void place(unsigned char* tables, int warp, int lane) {
    int r = lane >> 2;
    second_first = MIXED && lane & 2;
    UNROLL for (int i = 0; i < 2; i++)
      where[i] = MIXED ? warp / 2 * (LINE << B) + warp % 2 * 2 + (r + (second_first != i) * 8) * 4 : warp * (LINE << B) + r * 4 * C + (lane & C - 1) * 4;
    int flip = threadIdx.x >> (MIXED ? 4 : 3) & (C < 4);        // eights of lanes take entries in different orders, so that banks differ
    UNROLL for (int i = 0; i < ROUNDS; i++) {
      int number = i * AT_ONCE + (threadIdx.x >> 3);
      if (JOBS % AT_ONCE && number >= JOBS) break;
      Job job(number);
      u32 upper[4] = {raw[i][0].x, raw[i][0].y, raw[i][0].z, raw[i][0].w}, lower[4] = {raw[i][1].x, raw[i][1].y, raw[i][1].z, raw[i][1].w};
      UNROLL for (int k = 0; k < 8; k++) {
        u32 v = prmt(upper[k / 2], lower[k / 2], (k ^ flip) & 1 ? 0x7632 : 0x5410);
        unsigned char* at = tables + job.at + (k ^ flip) * LINE;
        if (C == 4) *reinterpret_cast<uint4*>(at) = make_uint4(v, v, v, v);
        else if (C == 2) *reinterpret_cast<uint2*>(at) = make_uint2(v, v);
        else *reinterpret_cast<u32*>(at) = v;
      }
    }
  }
};

// ---- products -------------------------------------------------------------------------------------------------

// Sums of a lane: value 4 j + 2 i + e is row 8 i + lane / 4 of the warp's sixteen, slot 8 j + 2 (lane & 3) + e of the group.
typedef float Sums[SLOTS / 2];
DI void store_hidden(const Arguments& a, int4 work, Sums& sums, unsigned char* shared) {
  constexpr int MINE = SLOTS / 4, LINE = 80;                   // a warp finishes half of its slots
  int thread = threadIdx.x & 127, lane = thread & 31, r = lane >> 2, c = lane & 3, up_rows = thread >> 6, group = threadIdx.x >> 7;
  int place = GROUPS_OF_WARPS * blockIdx.x + group;            // columns 32 place .. 32 place + 31 of hidden
  const int* slots = reinterpret_cast<const int*>(shared + SMALL + 256);
  float* exchange = reinterpret_cast<float*>(shared + group * SLOTS * (128 + LINE));   // [MINE][128]
  unsigned char* tile = shared + group * SLOTS * (128 + LINE) + SLOTS * 128;           // [SLOTS][LINE]
  UNROLL for (int i = 0; i < MINE; i++) exchange[i * 128 + thread] = up_rows ? sums[i] : sums[i + MINE];
  meet(1 + group, 128);
  bool inside = place < INNER_TILES;
  UNROLL for (int i = 0; i < MINE; i++) {
    float kept = up_rows ? sums[i + MINE] : sums[i], given = exchange[i * 128 + (thread ^ 64)];
    float gate = up_rows ? given : kept, up = up_rows ? kept : given;
    int m = (thread >> 5 & 1) * 16 + (i >> 1 & 1) * 8 + r, n = (i >> 2) * 8 + up_rows * (SLOTS / 2) + 2 * c + (i & 1);
    if (BIAS && inside) { gate += a.bias[work.y * ROWS + place * 32 + m]; up += a.bias[work.y * ROWS + INNER + place * 32 + m]; }
    *reinterpret_cast<u16*>(tile + n * LINE + (m >> 1 & 3) * 16 + (m >> 3) * 4 + (m & 1) * 2) = to_half(inside ? activate(gate, up) : 0.0f);
  }
  meet(1 + group, 128);
  if (place >= 2 * OUT_CHUNKS) return;
  uint4* out = reinterpret_cast<uint4*>(a.out) + ((u64)work.x * OUT_CHUNKS + place / 2) * (STAGE / 16);
  for (int i = thread; i < SLOTS * 4; i += 128) {
    int n = i >> 2, unit = place % 2 * 4 + (i & 3);
    if (slots[n] < a.slot_count) out[n * 8 + (unit ^ (n & 7))] = *reinterpret_cast<const uint4*>(tile + n * LINE + (i & 3) * 16);
  }
}
DI void store_results(const Arguments& a, int4 work, Sums& sums, const unsigned char* shared) {
  int lane = threadIdx.x & 31, row = (blockIdx.x * WARPS + (threadIdx.x >> 5)) * 16 + (lane >> 2);
  const int* slots = reinterpret_cast<const int*>(shared + SMALL + 256);
  const float* weights = reinterpret_cast<const float*>(slots + SLOTS);
  float bias[2] = {0.0f, 0.0f};
  UNROLL for (int i = 0; i < 2; i++)
    if (BIAS && row + 8 * i < ROWS) bias[i] = a.bias[work.y * ROWS + row + 8 * i];
  UNROLL for (int j = 0; j < SLOTS / 8; j++)
    UNROLL for (int e = 0; e < 2; e++) {
      int n = 8 * j + 2 * (lane & 3) + e, slot = slots[n];
      if (slot >= a.slot_count) continue;
      float weight = weights[n], *out = reinterpret_cast<float*>(a.out) + (u64)slot * ROWS + row;
      UNROLL for (int i = 0; i < 2; i++)
        if (ROWS % (16 * WARPS) == 0 || row + 8 * i < ROWS) out[8 * i] = (sums[4 * j + 2 * i + e] + bias[i]) * weight;
    }
}
template <int B, bool IN_REGISTERS> struct Decoder { typedef Registers<B> Type; };
template <int B> struct Decoder<B, false> { typedef Shared<B> Type; };

template <int B> DI void run(const Arguments& a, int4 work, unsigned char* shared) {
  constexpr int LAG = STAGES<B> > 3 ? 2 : 1;                    // chunks until a stage is filled again
  static_assert(STAGES<B> >= 2 && GROUPS_OF_WARPS * SLOTS * 208 <= SMALL && SLOTS <= THREADS, "shared memory");
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, stage = 0, slot = a.slot_count;
  u32 parity = 0, before = 0, weights[2][4];
  // What does not depend on each other is asked for at once.
  if (threadIdx.x < SLOTS) slot = a.slots[work.x * SLOTS + threadIdx.x];
  Planes<B> planes(a, work, warp, lane);
  typename Decoder<B, (B < 4)>::Type decoder;
  decoder.ask(a, work, warp, lane);
  UNROLL for (int i = 0; i < PLANE_STAGES<B> - 1; i++) planes.fetch(i);
  Chunks<B> chunks(a, work);
  if (threadIdx.x == 0) {
    wait_for_earlier();
    let_next_begin();
    for (int i = 0; i < STAGES<B>; i++) chunks.fetch();
  }
  __syncwarp();
  float weight = !GATED && slot < a.slot_count ? a.weights[slot] : 0.0f;
  decoder.place(shared, warp, lane);
  __syncthreads();                                              // tables and barriers are there
  Sums sums;
  UNROLL for (int i = 0; i < SLOTS / 2; i++) sums[i] = 0.0f;
  u64 here = operand(SHARED_BASE + STAGES_AT<B>);               // of the chunk that is multiplied
  auto begin_tile = [&](int kt) {
    planes.read(shared, decoder.words);
    planes.fetch(kt + PLANE_STAGES<B> - 1);
    decoder.pair_up();
  };
  auto next_stage = [&] {
    before = barrier(X_EMPTY) + 8 * stage;
    here += STAGE / 16;
    if (++stage == STAGES<B>) { stage = 0; parity ^= 1; here = operand(SHARED_BASE + STAGES_AT<B>); }
  };
  auto release = [&](bool refill) {                             // the chunk before
    if (lane == 0) barrier_arrive(before);
    if (threadIdx.x == 0 && refill) chunks.fetch();
    __syncwarp();
  };
  // Half K of a tile's slot S is multiplied. Meanwhile the next half is looked up, which needs none of the operands that the unit
  // still reads; that the half before is done is waited for after that. Behind the last tile what is looked up is not used.
#define HALF(S, K)                                                                        \
  {                                                                                       \
    constexpr int PLACE = (S) % 2 * 2 + K;                      /* in its chunk */        \
    if constexpr (PLACE == 0) barrier_wait(barrier(X_FULL) + 8 * stage, parity);          \
    unit_fence();                                                                         \
    unit_multiply(sums, weights[K], here + 2 * PLACE);                                    \
    unit_commit();                                                                        \
    if constexpr (S == 3 && K == 1) begin_tile(kt + 1);                                   \
    if constexpr (K == 1) decoder.template prepare<(S + 1) % 4>();                        \
    decoder.template look_up<(S + K) % 4, 1 - K>();                                       \
    unit_wait<1>();                                                                       \
    if constexpr (PLACE == 0)                                                             \
      if (S > 0 || kt > 0) release(S == 0 || LAG == 1 || kt > 0);                         \
    decoder.combine(weights[1 - K]);                                                      \
    if constexpr (PLACE == 3) next_stage();                                               \
  }
#define CHUNK(S) HALF(S, 0) HALF(S, 1) HALF(S + 1, 0) HALF(S + 1, 1)
  begin_tile(0);
  decoder.template prepare<0>();
  decoder.template look_up<0, 0>();
  decoder.combine(weights[0]);
  ROLLED for (int kt = 0; kt < COL_TILES; kt++) {
    CHUNK(0)
    if (CHUNKS % 2 && kt == COL_TILES - 1) break;
    CHUNK(2)
  }
  unit_wait<0>();
  if (threadIdx.x < SLOTS) {
    int* slots = reinterpret_cast<int*>(shared + SMALL + 256);
    slots[threadIdx.x] = slot;
    if (!GATED) reinterpret_cast<float*>(slots + SLOTS)[threadIdx.x] = weight;
  }
  __syncthreads();                                              // slots are there, the stages are free
  if constexpr (GATED) store_hidden(a, work, sums, shared);
  else store_results(a, work, sums, shared);
}

extern __shared__ __align__(1024) unsigned char dynamic[];

#define EACH_WIDTH TAKE(2) TAKE(3) TAKE(4) TAKE(5) TAKE(6) TAKE(7) TAKE(8)

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) experts(const __grid_constant__ Arguments a) {
  int4 work = a.work[blockIdx.y];
  if (work.y < 0 || work.z < LOW || work.z > HIGH) {            // no group, or of no such width
    if (blockIdx.x + blockIdx.y == 0) wait_for_earlier();       // one block is enough, the others make room
    return;
  }
  if ((u32)__cvta_generic_to_shared(dynamic) != SHARED_BASE) __trap();
  if (threadIdx.x == 0) {
    for (int i = 0; i < MOST_STAGES; i++) { barrier_init(barrier(X_FULL + i), 1); barrier_init(barrier(X_EMPTY + i), WARPS); }
    barriers_ready();
  }
#define TAKE(B)                        \
  if constexpr (LOW <= B && B <= HIGH) \
    if (work.z == B) run<B>(a, work, dynamic);
  EACH_WIDTH
}

// The image of x [T, K], four threads for 32 columns of a slot, four of which a thread does at once. Columns beyond K are
// zero; unused slots stay as they are.
extern "C" __global__ void __launch_bounds__(256) arrange(const uint4* x, const int* slots, uint4* image, int slot_count, int groups) {
  constexpr int JOBS = 4;
  int first = blockIdx.x * (256 * JOBS) + threadIdx.x, slot[JOBS];
  wait_for_earlier();
  let_next_begin();
  UNROLL for (int j = 0; j < JOBS; j++) {
    int place = (first + 256 * j) / (8 * CHUNKS);
    slot[j] = place < groups * SLOTS ? slots[place] : slot_count;
  }
  u32 w[JOBS][4];
  UNROLL for (int j = 0; j < JOBS; j++) {
    int unit = (first + 256 * j) % (8 * CHUNKS);
    uint4 v = make_uint4(0, 0, 0, 0);
    if (slot[j] < slot_count && unit * 8 < COLS) v = x[(u64)(slot[j] / TOP_K) * (COLS / 8) + unit];
    w[j][0] = v.x; w[j][1] = v.y; w[j][2] = v.z; w[j][3] = v.w;
  }
  UNROLL for (int j = 0; j < JOBS; j++) {
    UNROLL for (int step = 1; step < 4; step *= 2)              // the four threads' words become a square, transposed
      UNROLL for (int i = 0; i < 4; i++)
        if (!(i & step)) {
          bool upper = threadIdx.x & step;
          u32 other = __shfl_xor_sync(~0u, upper ? w[j][i] : w[j][i + step], step);
          if (upper) w[j][i] = other; else w[j][i + step] = other;
        }
    int job = first + 256 * j, unit = job % (8 * CHUNKS), place = job / (8 * CHUNKS), n = place % SLOTS;
    if (slot[j] < slot_count)
      image[(((u64)(place / SLOTS) * CHUNKS + unit / 8) * SLOTS + n) * 8 + (unit % 8 ^ (n & 7))] = make_uint4(w[j][0], w[j][1], w[j][2], w[j][3]);
  }
}
