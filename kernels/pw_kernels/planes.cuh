// What the kernels that read blocks share: arithmetic, page tables, decoders. Compiled at run time by NVRTC, which gets the
// constants named below; no header of a toolkit is included.
//
//   FLOAT16       1: x, tables and hidden are fp16; 0: bf16
//   ROWS, COLS    N and K of the module's blocks;  ROW_TILES, COL_TILES: in tiles of 32 x 128
//   PLANES, PP, LP, PAGE_SHIFT                     page table [E, PLANES, PP], [E, LP]; log2 of a page's bytes
//   LOW, HIGH     widths that the kernel takes
//   GATED         1: gate_up with activation KIND; 0: down with router weight
//   FIRST         1: the first launch of its module, which waits for what the launches before it wrote
//   TOP_K, BIAS, NT (token tiles of 8 in a group), WARPS of a block, BLOCKS wanted on a multiprocessor
//   TABLE_BITS    first width whose tables lie in shared memory;  SHARED_BASE: where dynamic shared memory begins
//
// The matrix unit multiplies weights [16 rows x 16 k] by tokens [16 k x 8]: a lane decodes the words that it
// loads straight into its own operand, because the plane layout is in lane order (bitplane.py).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
#define DI __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

// ---- arithmetic ---------------------------------------------------------------------------------------------

DI u32 prmt(u32 a, u32 b, u32 s) { u32 d; asm("prmt.b32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(s)); return d; }
template <int TABLE> DI u32 lop3(u32 a, u32 b, u32 c) {
  u32 d; asm("lop3.b32 %0,%1,%2,%3,%4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE)); return d;
}
DI u32 choose(u32 a, u32 b, u32 mask) { return lop3<0xE2>(a, mask, b); }     // (a & mask) | (b & ~mask)
DI u32 and_or(u32 a, u32 mask, u32 b) { return lop3<0xEA>(a, mask, b); }     // (a & mask) | b
DI u32 mad(u32 a, u32 b, u32 c) { u32 d; asm("mad.lo.u32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
DI constexpr u32 rotl(u32 x, int n) { return (n & 31) ? (x << (n & 31)) | (x >> (32 - (n & 31))) : x; }
template <int S> DI u32 rotl_by(u32 x) { if constexpr ((S & 31) == 0) return x; else return __funnelshift_l(x, x, S & 31); }
template <int S> DI u32 rotr(u32 x) { if constexpr ((S & 31) == 0) return x; else return __funnelshift_r(x, x, S & 31); }

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
DI void multiply(float* c, const u32* a, u32 b0, u32 b1) {
#if FLOAT16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif
  asm volatile(MMA " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DI u16 to_half(float v) {
  u16 h;
#if FLOAT16
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(v));
#else
  asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(h) : "f"(v));
#endif
  return h;
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

// ---- copies to shared memory that a thread waits for later -----------------------------------------------------

DI void copy_async(u32 to, u64 from) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory"); }
DI void copy_async(u32 to, u64 from, u32 bytes) {              // the rest of 16 bytes is zero
  asm volatile("cp.async.ca.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DI void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DI void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ---- launches that overlap ------------------------------------------------------------------------------------
// A launch may begin while the one before it ends (cuda_moe.py says which). All blocks of a module's first launch wait for
// the launches before it, then let the next begin; so what a later class of the same module reads is there, and it waits
// only at its end, so that "complete" always means that everything before is complete, too.

#if __CUDA_ARCH__ >= 900
DI void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DI void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DI void wait_for_earlier() {}
DI void let_next_begin() {}
#endif
// What gate_up wrote is there from here on.
DI void inputs_ready() {
  if (FIRST && !GATED) { wait_for_earlier(); let_next_begin(); }
}

// ---- where things are ---------------------------------------------------------------------------------------

extern __shared__ __align__(128) unsigned char dynamic[];

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
};
constexpr int TOKENS = 8 * NT, TILE_SHIFT = PAGE_SHIFT - 9;
constexpr int HALF_TILES = GATED ? ROW_TILES / 2 : 1;         // from a row tile to its partner
DI int row_tile(int item, int half) { return GATED ? item + half * HALF_TILES : min(2 * item + half, ROW_TILES - 1); }

// The planes of one expert: words `lane` of tile t of the first B planes. Page ids change rarely, so they are kept.
template <int B> struct Planes {
  const int* pages; u64 start; u32 tile_bytes, base[B]; int page;
  DI Planes(const Arguments& a, int expert, int lane)
      : pages(a.plane_pages + expert * (PLANES * PP)), start((u64)a.arena + lane * 16), tile_bytes(a.tile_bytes), page(-1) {}
  DI void seek(int tile) {
    if (tile >> TILE_SHIFT == page) return;
    page = tile >> TILE_SHIFT;
    UNROLL for (int p = 0; p < B; p++) base[p] = ((u32)__ldg(pages + p * PP + page) - page) << TILE_SHIFT;
  }
  DI u64 at(int p, int tile) const { return mad_wide(base[p] + tile, tile_bytes, start); }
};
// Sixteen bytes at byte `at` of the table in use.
DI const uint4* table_at(const Arguments& a, int4 work, int at) {
  int expert = work.y;
  at += work.w;
  u64 page = (u32)__ldg(a.lut_pages + expert * LP + (at >> PAGE_SHIFT));
  return reinterpret_cast<const uint4*>(a.arena + (page << PAGE_SHIFT) + (at & ((1 << PAGE_SHIFT) - 1)));
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

// Weights of slot S: a[rows r, r+8 | r+16, r+24][first, second k16][operand register].
template <int B, int S> DI void decode_low(const Table<B>* table, const u32 (*words)[4], const u32* even, const u32* odd, u32 (*a)[2][4]) {
  UNROLL for (int i = 0; i < 4; i++) {
    u32 pair = S & 1 ? odd[i] : even[i], t, u = 0;
    if constexpr (B == 2) t = pair & rotl(M3, S);
    else t = and_or(pair, rotl(M3, S), words[2][i] & rotl(M1, S + 2));
    if constexpr (B == 4) u = and_or(words[3][i], rotl(M1, S + 3), rotl(POSITION, S + 1));
    look<B>(table[i], S == 0 ? t : t >> S, B == 4 ? u >> (S + 1) : 0, a[i >> 1][0][i & 1], a[i >> 1][0][2 + (i & 1)]);
    look<B>(table[i], rotr<16 + S>(t), B == 4 ? rotr<17 + S>(u) : 0, a[i >> 1][1][i & 1], a[i >> 1][1][2 + (i & 1)]);
  }
}
template <int B> DI void pair_up(const u32 (*words)[4], u32* even, u32* odd) {
  UNROLL for (int i = 0; i < 4; i++) { even[i] = choose(words[0][i], words[1][i], M2); odd[i] = choose(words[0][i], words[1][i], ~M2); }
}

// ---- up to 8 bits: tables in shared memory, every lane owning a bank ------------------------------------------
// Word `lane` of line (entry v, pair of row blocks j) holds entry v of rows r + 16j (low half) and r + 16j + 8 (high half),
// r = lane / 4, at byte v * 256 + j * 128 + lane * 4. A lane reads its own bank alone: random lookups never conflict. The
// address of a lookup is one byte permute: byte 0 is 4 * lane, byte 1 the code.

template <int OFFSET> DI u32 entry(u32 at) { u32 d; asm volatile("ld.shared.u16 %0,[%1+%2];" : "=r"(d) : "r"(at), "n"(SHARED_BASE + OFFSET)); return d; }

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
template <int I, int COPIES> DI void row_high(u32 even, u32 odd, u32 base, u32 (*a)[2][4]) {
  constexpr int AT = (I >> 1) * 32 * COPIES + (I & 1) * 2;
  u32 h[4];
  UNROLL for (int q = 0; q < 4; q++) h[q] = mad(entry<AT>(prmt(odd, base, 0x7604 + q * 16)), 65536u, entry<AT>(prmt(even, base, 0x7604 + q * 16)));
  a[I >> 1][0][I & 1] = h[0]; a[I >> 1][0][2 + (I & 1)] = h[1]; a[I >> 1][1][I & 1] = h[2]; a[I >> 1][1][2 + (I & 1)] = h[3];
}
template <int B, int S, int COPIES = 4> DI void decode_high(const u32 (*words)[B], const u32 (*pairs)[4][2], u32 base, u32 which, u32 (*a)[2][4]) {
  which = rotl_by<S>(which);
  u32 even[4], odd[4];
  UNROLL for (int i = 0; i < 4; i++) bytes_of<B, S>(words[i], pairs[0][i], pairs[1][i], pairs[2][i], pairs[3][i], which, even[i], odd[i]);
  row_high<0, COPIES>(even[0], odd[0], base, a); row_high<1, COPIES>(even[1], odd[1], base, a);
  row_high<2, COPIES>(even[2], odd[2], base, a); row_high<3, COPIES>(even[3], odd[3], base, a);
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

typedef float Sums[2][NT][4];                                  // rows r, r+8 | r+16, r+24 by NT * 8 tokens
DI void clear(Sums acc) { UNROLL for (int i = 0; i < 8 * NT; i++) acc[i & 1][i >> 3][(i >> 1) & 3] = 0.0f; }

#define EACH_WIDTH TAKE(2) TAKE(3) TAKE(4) TAKE(5) TAKE(6) TAKE(7) TAKE(8)
