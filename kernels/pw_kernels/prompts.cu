// Routed experts of one layer for prompts, on GPUs of compute capability 9.0: bit-planes and tables in arena pages,
// multiplied by the warpgroup matrix unit. Compiled at run time by NVRTC (cuda_prompts.py), which defines the constants
// named below; it includes nothing of a toolkit.
//
//   FLOAT16, ROWS, COLS, ROW_TILES, COL_TILES, PLANES, PP, LP, PAGE_SHIFT, GATED, KIND, BIAS, TOP_K, SHARED_BASE  as in moe.cu
//   LOW, HIGH     widths that this launch takes, of those in the list CLASS that it walks (the second has two launches)
//   SLOTS         of a group, a multiple of 16 up to 256
//   COLUMNS, SUMS, INPUTS, OPERANDS  text of the matrix unit's instruction for them (cuda_prompts.py)
//   GROUPS_OF_WARPS  warpgroups of a block;  BLOCKS: wanted on a multiprocessor
//   ROOM          bytes of dynamic shared memory;  FIRST: 1: the first launch of its module
//
// A warpgroup of four warps multiplies 64 rows by the slots of a group. Its warps decode weights straight into the operand
// that the matrix unit takes from registers, 16 rows a warp, while the unit works on what they decoded before. Activations lie
// in memory as the unit wants them in shared memory: an image [G, K / 64, SLOTS, 64], columns permuted so that a lane's eight
// neighbouring weights meet their inputs, 16-byte units of a row of 128 bytes exchanged by the row's number (its 128-byte
// swizzle).

#include "common.cuh"

// ---- arithmetic -----------------------------------------------------------------------------------

DI float activate(float gate, float up) {
#if KIND == 1
  return gate * 0.5f * (1.0f + erff(gate * 0.7071067811865476f)) * up;
#elif KIND == 2
  float inner = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  return __fdividef(gate, 1.0f + __expf(-inner)) * up;
#else
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
#endif
}

// ---- barriers of shared memory, copies in bulk, the matrix unit ----------------------------------------------------

DI void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DI void barrier_expect(u32 at, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(at), "r"(bytes) : "memory"); }
DI void copy_bulk(u32 to, u64 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// A lane copies just the words that it reads itself, so no barrier is needed for them.
DI void copy_words(u32 to, u64 from) { asm volatile("cp.async.ca.shared.global [%0],[%1],8;" ::"r"(to), "l"(from) : "memory"); }
DI void words_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DI void words_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
DI void warpgroup_meet(int number) {
#define MEET(I) if (number == I - 1) asm volatile("bar.sync " #I ",128;" ::: "memory");
  MEET(1) MEET(2) MEET(3) MEET(4)
}
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
// begins, everything before the one before it is complete, work lists among it. Later launches of a module wait at their end.

// ---- where things are ---------------------------------------------------------------------------------------

struct Arguments {
  const unsigned char* x;  // image of the inputs
  const unsigned char* arena;
  const int* plane_pages;  // [E, PLANES, PP]
  const int* lut_pages;    // [E, LP]
  const float* bias;       // [E, N]
  const float* weights;    // [S]
  const int4* work;        // [2, G]: group, expert or -1, width, byte of its table in its region
  const int* slots;        // [G, SLOTS], those used first
  void* out;               // image of hidden if GATED, else [S, N] fp32
  int slot_count, groups;  // S, G
};
constexpr int STAGE = SLOTS * 128, WARPS = 4 * GROUPS_OF_WARPS, THREADS = 32 * WARPS, TILES = 2 * GROUPS_OF_WARPS;
constexpr int INNER = GATED ? ROWS / 2 : ROWS, INNER_TILES = INNER / 32, OUT_CHUNKS = (INNER + 63) / 64;
constexpr int CHUNKS = (COLS + 63) / 64, TILE_SHIFT = PAGE_SHIFT - 9, MOST_STAGES = 8;
constexpr int SMALL = ROOM - 256 - 8 * SLOTS;                   // barriers, slots and weights lie behind the rest
template <int B> constexpr int TABLE_BYTES = B < 4 ? 0 : TILES * (B == 8 ? 128 : 256) << B;
template <int B> constexpr int PLANE_STAGES = B <= 4 ? 4 : B <= 6 ? 3 : 2;
template <int B> constexpr int PLANES_AT = TABLE_BYTES<B>;
template <int B> constexpr int STAGES_AT = (PLANES_AT<B> + PLANE_STAGES<B> * WARPS * B * 256 + 1023) / 1024 * 1024;
template <int B> constexpr int stages() {
  int fit = (SMALL - STAGES_AT<B>) / STAGE;
  return fit < MOST_STAGES ? fit : MOST_STAGES;
}
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
    if (++stage == stages<B>()) { stage = 0; parity ^= 1; }
  }
};
// Planes of the sixteen rows of a warp: two words of a lane from each.
template <int B> struct Planes {
  const int* pages; u64 start; u32 base[B], to; int first, page, stage;
  DI Planes(const Arguments& a, int4 work, int tile, int warp, int lane)
      : pages(a.plane_pages + work.y * (PLANES * PP)), start((u64)a.arena + lane * 16 + (warp & 1) * 8),
        to(SHARED_BASE + PLANES_AT<B> + warp * PLANE_STAGES<B> * B * 256 + lane * 8), first(tile * COL_TILES), page(-1), stage(0) {}
  DI void fetch(int kt) {
    if (kt < COL_TILES) {
      int tile = first + kt;
      if (tile >> TILE_SHIFT != page) {
        page = tile >> TILE_SHIFT;
        UNROLL for (int p = 0; p < B; p++) base[p] = ((u32)__ldg(pages + p * PP + page) - page) << TILE_SHIFT;
      }
      UNROLL for (int p = 0; p < B; p++) copy_words(to + (stage * B + p) * 256, start + (u64)(base[p] + tile) * 512);
      stage = stage + 1 == PLANE_STAGES<B> ? 0 : stage + 1;
    }
    words_commit();
  }
};

// ---- decoders: sixteen rows of a warp, two of a lane, [first, second k16][operand register] -------------------------

constexpr u32 M1 = 0x11111111u, M2 = 0x55555555u, M3 = 0x33333333u;

template <int B> struct Registers {                            // tables of two rows: low bytes and high bytes of the entries
  static constexpr int WORDS = B == 2 ? 1 : (1 << B) / 4;
  u32 lo[2][WORDS], hi[2][WORDS], even[2], odd[2], words[B][2];
  DI void read_tables(const Arguments& a, int4 work, int t, int half, int lane) {
    UNROLL for (int i = 0; i < 2; i++) {
      int row = row_tile(t) * 32 + half * 16 + i * 8 + (lane >> 2);
      const u32* entries = reinterpret_cast<const u32*>(table_at(a, work, row * (2 << B)));
      UNROLL for (int w = 0; w < WORDS; w++) {
        u32 first = entries[2 * w], second = entries[2 * w + 1];
        lo[i][w] = prmt(first, second, 0x6420); hi[i][w] = prmt(first, second, 0x7531);
      }
    }
  }
  DI void pair_up() {
    UNROLL for (int i = 0; i < 2; i++) { even[i] = choose(words[0][i], words[1][i], M2); odd[i] = choose(words[0][i], words[1][i], ~M2); }
  }
  // Four weights from four nibbles of selectors.
  DI void look(int i, u32 t, u32& h01, u32& h23) const {
    constexpr int SECOND = B == 2 ? 0 : 1;
    u32 low = prmt(lo[i][0], B == 2 ? 0 : lo[i][SECOND], t), high = prmt(hi[i][0], B == 2 ? 0 : hi[i][SECOND], t);
    h01 = prmt(low, high, 0x5140); h23 = prmt(low, high, 0x7362);
  }
  template <int S> DI void decode(u32 (*a)[4]) const {
    UNROLL for (int i = 0; i < 2; i++) {
      u32 t = (S & 1 ? odd[i] : even[i]) & rotl(M3, S);
      if constexpr (B == 3) t |= words[B - 1][i] & rotl(M1, S + 2);
      look(i, S == 0 ? t : t >> S, a[0][i], a[0][2 + i]);
      look(i, rotr<16 + S>(t), a[1][i], a[1][2 + i]);
    }
  }
};

// Tables in shared memory: word (r, copy) of line (entry, half of the tile) holds that entry for rows r + 16 half, in its low
// half, and r + 8 + 16 half. With four copies a lane has a bank of its own; at 8 bits there is room for two, and two row
// tiles share the lines. The address of a lookup is one byte permute: code in byte 1, the rest in `where`.
template <int OFFSET> DI u32 entry(u32 at) { u32 d; asm volatile("ld.shared.u16 %0,[%1+%2];" : "=r"(d) : "r"(at), "n"(SHARED_BASE + OFFSET)); return d; }

template <int B> struct Shared {
  u32 pairs[4][2][2], words[B][2], which, where;               // [planes 2q, 2q + 1][row][odd slots]
  DI void place(int t, int half, int lane) {
    which = B < 8 ? (u32)(t & (256 >> B) - 1) * (0x11111111u << (B & 3)) : 0;
    where = half * 128 + (B == 8 ? (t & 1) * 64 + (lane >> 2) * 8 + (lane & 1) * 4 + (t >> 1 << 16) : lane * 4 + (t >> 8 - B << 16));
  }
  DI void pair_up() {
    UNROLL for (int i = 0; i < 2; i++)
      UNROLL for (int odd = 0; odd < 2; odd++)
        UNROLL for (int q = 0; q < 4; q++)
          pairs[q][i][odd] = 2 * q + 1 < B ? choose(words[2 * q][i], words[2 * q + 1 < B ? 2 * q + 1 : 0][i], odd ? ~M2 : M2) : 0;
  }
  template <int S, int I> DI void row(u32 mine, u32 (*a)[4]) const {
    u32 low = choose(pairs[0][I][S & 1], pairs[1][I][S & 1], rotl(M3, S)), top;   // planes 0-3 as nibbles, rotated by S
    if constexpr (B == 4) top = mine;
    else if constexpr (B == 5) top = and_or(words[B > 4 ? 4 : 0][I], rotl(M1, S + 4), mine);
    else if constexpr (B == 6) top = and_or(pairs[2][I][S & 1], rotl(M3, S + 4), mine);
    else if constexpr (B == 7) top = and_or(pairs[2][I][S & 1], rotl(M3, S + 4), and_or(words[B == 7 ? 6 : 0][I], rotl(M1, S + 6), mine));
    else top = choose(pairs[2][I][S & 1], pairs[3][I][S & 1], rotl(M3, S + 4));
    u32 even = rotr<S>(choose(low, top, rotl(0x0F0F0F0Fu, S))), odd = rotr<S + 4>(choose(low, top, rotl(0xF0F0F0F0u, S)));
    UNROLL for (int q = 0; q < 4; q++)
      a[q >> 1][2 * (q & 1) + I] = mad(entry<2 * I>(prmt(odd, where, 0x7604 + q * 16)), 65536u,
                                       entry<2 * I>(prmt(even, where, 0x7604 + q * 16)));
  }
  template <int S> DI void decode(u32 (*a)[4]) const {
    u32 mine = rotl_by<S>(which);
    row<S, 0>(mine, a);
    row<S, 1>(mine, a);
  }
  // Eight threads spread 8 entries of 8 rows and of the 8 rows below.
  DI static void fill(const Arguments& a, int4 work, unsigned char* tables) {
    constexpr int PIECES = (1 << B) / 8, JOBS = TILES * 2 * PIECES, AT_ONCE = THREADS / 8, ROUNDS = (JOBS + AT_ONCE - 1) / AT_ONCE;
    int r = threadIdx.x & 7;
    _Pragma("unroll 4") for (int i = 0; i < ROUNDS; i++) {
      int job = i * AT_ONCE + (threadIdx.x >> 3), piece, half, t;
      if (JOBS % AT_ONCE && job >= JOBS) break;
      if (B == 8) { t = job & 1; piece = (job >> 1) % PIECES; half = (job >> 1) / PIECES & 1; t += (job >> 1) / PIECES & ~1; }
      else { piece = job % PIECES; half = job / PIECES & 1; t = job / PIECES >> 1; }
      int row = row_tile(t) * 32 + half * 16 + r;
      uint4 upper = *table_at(a, work, row * (2 << B) + piece * 16), lower = *table_at(a, work, (row + 8) * (2 << B) + piece * 16);
      unsigned char* to = tables + piece * 8 * 256 + half * 128;
      to += B == 8 ? (t >> 1) * 65536 + (t & 1) * 64 + r * 8 : t * (256 << B) + r * 16;
      UNROLL for (int k = 0; k < 8; k++) {
        u32 v = prmt(reinterpret_cast<const u32*>(&upper)[k / 2], reinterpret_cast<const u32*>(&lower)[k / 2], k & 1 ? 0x7632 : 0x5410);
        if (B == 8) *reinterpret_cast<uint2*>(to + k * 256) = make_uint2(v, v);
        else *reinterpret_cast<uint4*>(to + k * 256) = make_uint4(v, v, v, v);
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
  warpgroup_meet(group);
  UNROLL for (int i = 0; i < MINE; i++) {
    float kept = up_rows ? sums[i + MINE] : sums[i], given = exchange[i * 128 + (thread ^ 64)];
    float gate = up_rows ? given : kept, up = up_rows ? kept : given;
    int m = (thread >> 5 & 1) * 16 + (i >> 1 & 1) * 8 + r, n = (i >> 2) * 8 + up_rows * (SLOTS / 2) + 2 * c + (i & 1);
    if (BIAS && place < INNER_TILES) { gate += a.bias[work.y * ROWS + place * 32 + m]; up += a.bias[work.y * ROWS + INNER + place * 32 + m]; }
    *reinterpret_cast<u16*>(tile + n * LINE + (m >> 1 & 3) * 16 + (m >> 3) * 4 + (m & 1) * 2) = place < INNER_TILES ? to_half(activate(gate, up)) : 0;
  }
  warpgroup_meet(group);
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
  constexpr int LAG = stages<B>() > 3 ? 2 : 1;                  // chunks until a stage is filled again
  static_assert(stages<B>() >= 2 && GROUPS_OF_WARPS * SLOTS * 208 <= SMALL, "shared memory");
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = warp >> 1, half = warp & 1, stage = 0;
  u32 parity = 0, before = 0;
  Planes<B> planes(a, work, row_tile(t), warp, lane);
  UNROLL for (int i = 0; i < PLANE_STAGES<B> - 1; i++) planes.fetch(i);
  Chunks<B> chunks(a, work);
  if (threadIdx.x == 0) {
    if (FIRST) { wait_for_earlier(); let_next_begin(); }
    for (int i = 0; i < stages<B>(); i++) chunks.fetch();
  }
  __syncwarp();
  typename Decoder<B, (B < 4)>::Type decoder;
  int* slots = reinterpret_cast<int*>(shared + SMALL + 256);
  for (int i = threadIdx.x; i < SLOTS; i += THREADS) {          // read after the last barrier alone
    int slot = a.slots[work.x * SLOTS + i];
    slots[i] = slot;
    if (!GATED) reinterpret_cast<float*>(slots + SLOTS)[i] = slot < a.slot_count ? a.weights[slot] : 0.0f;
  }
  if constexpr (B < 4) {
    decoder.read_tables(a, work, t, half, lane);
  } else {
    Shared<B>::fill(a, work, shared);
    decoder.place(t, half, lane);
  }
  __syncthreads();                                              // tables and barriers are there
  Sums sums;
  UNROLL for (int i = 0; i < SLOTS / 2; i++) sums[i] = 0.0f;
  u32 weights[2][2][4];
  int read_stage = 0;
  auto read_words = [&](int kt) {
    words_wait<PLANE_STAGES<B> - 2>();
    const unsigned char* from = shared + PLANES_AT<B> + ((warp * PLANE_STAGES<B> + read_stage) * B * 32 + lane) * 8;
    UNROLL for (int p = 0; p < B; p++) {
      uint2 v = *reinterpret_cast<const uint2*>(from + p * 256);
      decoder.words[p][0] = v.x; decoder.words[p][1] = v.y;
    }
    read_stage = read_stage + 1 == PLANE_STAGES<B> ? 0 : read_stage + 1;
    planes.fetch(kt + PLANE_STAGES<B> - 1);
    decoder.pair_up();
  };
  auto issue = [&](u32 (*w)[4], int slot) {                     // slot of 32 columns of a chunk
    unit_fence();
    UNROLL for (int k = 0; k < 2; k++) unit_multiply(sums, w[k], operand(SHARED_BASE + STAGES_AT<B> + stage * STAGE + slot * 64 + k * 32));
    unit_commit();
  };
  auto arrived = [&] { barrier_wait(barrier(X_FULL) + 8 * stage, parity); };
  auto next_stage = [&] { before = barrier(X_EMPTY) + 8 * stage; if (++stage == stages<B>()) { stage = 0; parity ^= 1; } };
  auto release = [&](bool refill) {                             // the chunk before
    if (lane == 0) barrier_arrive(before);
    if (threadIdx.x == 0 && refill) chunks.fetch();
    __syncwarp();
  };
  read_words(0);
  decoder.template decode<0>(weights[0]);
  ROLLED for (int kt = 0; kt < COL_TILES; kt++) {
    arrived();
    issue(weights[0], 0);
    unit_wait<1>();
    if (kt > 0) release(true);
    decoder.template decode<1>(weights[1]);
    issue(weights[1], 1);
    unit_wait<1>();
    if (CHUNKS % 2 && kt == COL_TILES - 1) break;
    decoder.template decode<2>(weights[0]);
    next_stage();
    arrived();
    issue(weights[0], 0);
    unit_wait<1>();
    release(LAG == 1 || kt > 0);
    decoder.template decode<3>(weights[1]);
    issue(weights[1], 1);
    unit_wait<1>();
    if (kt + 1 == COL_TILES) break;
    next_stage();
    read_words(kt + 1);
    decoder.template decode<0>(weights[0]);
  }
  unit_wait<0>();
  if (!FIRST && threadIdx.x == 0) { wait_for_earlier(); let_next_begin(); }
  __syncthreads();                                              // the stages are free
  if constexpr (GATED) store_hidden(a, work, sums, shared);
  else store_results(a, work, sums, shared);
}

extern __shared__ __align__(1024) unsigned char dynamic[];

#define EACH_WIDTH TAKE(2) TAKE(3) TAKE(4) TAKE(5) TAKE(6) TAKE(7) TAKE(8)

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) experts(const __grid_constant__ Arguments a) {
  int4 work = a.work[CLASS * a.groups + blockIdx.y];
  if (work.y < 0 || work.z < LOW || work.z > HIGH) {            // no group, or one of another launch
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

// The image of x [T, K], four threads for 32 columns of a slot. Columns beyond K are zero; unused slots stay as they are.
extern "C" __global__ void __launch_bounds__(256) arrange(const uint4* x, const int* slots, uint4* image, int slot_count, int groups) {
  int job = blockIdx.x * 256 + threadIdx.x, unit = job % (8 * CHUNKS), place = job / (8 * CHUNKS);
  wait_for_earlier();
  let_next_begin();
  int slot = place < groups * SLOTS ? slots[place] : slot_count;
  u32 w[4] = {0, 0, 0, 0};
  if (slot < slot_count && unit * 8 < COLS) {
    uint4 v = x[(u64)(slot / TOP_K) * (COLS / 8) + unit];
    w[0] = v.x; w[1] = v.y; w[2] = v.z; w[3] = v.w;
  }
  UNROLL for (int step = 1; step < 4; step *= 2)                // the four threads' words become a square, transposed
    UNROLL for (int i = 0; i < 4; i++)
      if (!(i & step)) {
        bool upper = threadIdx.x & step;
        u32 other = __shfl_xor_sync(~0u, upper ? w[i] : w[i + step], step);
        if (upper) w[i] = other; else w[i + step] = other;
      }
  if (slot < slot_count) {
    int n = place % SLOTS;
    image[(((u64)(place / SLOTS) * CHUNKS + unit / 8) * SLOTS + n) * 8 + (unit % 8 ^ (n & 7))] = make_uint4(w[0], w[1], w[2], w[3]);
  }
}
