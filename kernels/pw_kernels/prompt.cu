// Routed experts of one layer for many tokens, as in prompts: a tile is decoded once for up to 8 * NT tokens. Beside the constants
// of planes.cuh nothing is needed; WARPS is 8.
//
// A block takes 8 row tiles, one a warp. Its warps share the activations in shared memory, [2 stages][4 slots][NT][32 lanes]
// uint4, in the order in which lanes read them.

#define WARPS 8
#include "planes.cuh"

// Tables with COPIES copies of each row's entries: lines of 256 bytes hold an entry of 4 / COPIES row tiles.
template <int B> struct Shared {
  static constexpr int COPIES = B <= 6 ? 4 : B == 7 ? 2 : 1, LINE_TILES = 4 / COPIES, LINES = WARPS / LINE_TILES;
  static constexpr int BYTES = B < TABLE_BITS ? 0 : LINES * (256 << B);
};
template <int B, typename TileOf> DI void spread_wide(const Arguments& a, int4 work, unsigned char* tables, TileOf tile_of) {
  constexpr int COPIES = Shared<B>::COPIES, LINE_TILES = Shared<B>::LINE_TILES, PIECES = (1 << B) / 8;
  ROLLED for (int job = threadIdx.x; job < WARPS * 2 * 8 * PIECES; job += 32 * WARPS) {
    int r = job & 7, piece = (job >> 3) % PIECES, pair = (job >> 3) / PIECES & 1, tile = (job >> 3) / PIECES >> 1;
    int row = tile_of(tile) * 32 + pair * 16 + r;
    uint4 upper = __ldg(table_at(a, work, row * (2 << B) + piece * 16)), lower = __ldg(table_at(a, work, (row + 8) * (2 << B) + piece * 16));
    unsigned char* to = tables + tile / LINE_TILES * (256 << B) + piece * 8 * 256 + (tile % LINE_TILES) * 64 * COPIES + pair * 32 * COPIES + r * 4 * COPIES;
    UNROLL for (int k = 0; k < 8; k++) {
      u32 v = prmt(reinterpret_cast<const u32*>(&upper)[k / 2], reinterpret_cast<const u32*>(&lower)[k / 2], k & 1 ? 0x7632 : 0x5410);
      UNROLL for (int c = 0; c < COPIES; c++) reinterpret_cast<u32*>(to + k * 256)[c] = v;
    }
  }
}
template <int B> DI void run_wide(const Arguments& a, int4 work, unsigned char* shared) {
  constexpr int STAGE = 4 * NT * 512;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = work.x, expert = work.y;
  constexpr int HALF = WARPS / 2;
  // gated: gate tiles are the first half of the warps', the up tiles of the same rows the second
  auto tile_of = [&](int w) {
    return GATED ? min((int)blockIdx.x * HALF + w % HALF, HALF_TILES - 1) + w / HALF * HALF_TILES : min((int)blockIdx.x * WARPS + w, ROW_TILES - 1);
  };
  unsigned char* tables = shared;
  unsigned char* mine = shared + Shared<B>::BYTES + warp * B * 512 + lane * 16;      // the planes of the next tile, as the lane reads them
  unsigned char* inputs = shared + Shared<B>::BYTES + WARPS * B * 512;
  u32 to_mine = (u32)__cvta_generic_to_shared(mine), to_inputs = (u32)__cvta_generic_to_shared(inputs);
  int tile = tile_of(warp) * COL_TILES;
  Planes<B> planes(a, expert, lane);
  auto fetch_planes = [&](int kt) {
    planes.seek(tile + kt);
    UNROLL for (int p = 0; p < B; p++) copy_async(to_mine + p * 512, planes.at(p, tile + kt));
  };
  // a thread copies the columns of its lane for tokens of NT / WARPS tiles (one if there are fewer)
  constexpr int MINE = NT > WARPS ? NT / WARPS : 1;
  u64 from[MINE]; u32 size[MINE];
  int used = 0;
  UNROLL for (int n = 0; n < NT; n++) if (__ldg(a.slots + group * TOKENS + n * 8) < a.slot_count) used = n + 1;
  UNROLL for (int i = 0; i < MINE; i++) {
    int slot = __ldg(a.slots + group * TOKENS + (i * WARPS + warp) % NT * 8 + (lane >> 2));
    size[i] = slot < a.slot_count ? 16 : 0;
    if (slot >= a.slot_count) slot = 0;
    from[i] = (u64)(a.x + (u64)(GATED ? slot / TOP_K : slot) * COLS + (lane & 3) * 8);
  }
  auto fetch_inputs = [&](int kt) {
    u32 to = to_inputs + (kt & 1) * STAGE + lane * 16;
    UNROLL for (int j = 0; j < (4 * NT + WARPS - 1) / WARPS; j++) {
      int piece = j * WARPS + warp, s = piece / NT;             // slot and token tile
      if (4 * NT % WARPS && piece >= 4 * NT) break;
      bool inside = COLS % 128 == 0 || kt * 128 + s * 32 + (lane & 3) * 8 < COLS;
      copy_async(to + piece * 512, mad_wide(kt, 256, from[j % MINE]) + s * 64, inside ? size[j % MINE] : 0);
    }
  };
  fetch_planes(0);
  Table<B < TABLE_BITS ? B : 2> table[4];
  u32 base = 0, which = 0;
  if constexpr (B < TABLE_BITS) {
    UNROLL for (int i = 0; i < 4; i++)
      table[i].read(reinterpret_cast<const u32*>(table_at(a, work, (tile_of(warp) * 32 + (lane >> 2) + 8 * i) * (2 << B))));
  } else {
    constexpr int COPIES = Shared<B>::COPIES, LINE_TILES = Shared<B>::LINE_TILES;
    spread_wide<B>(a, work, tables, tile_of);
    int line = warp / LINE_TILES;
    base = (u32)(line * (256 << B)) & 0xFFFF0000u | (warp % LINE_TILES * 64 * COPIES + (lane >> 2) * 4 * COPIES + lane % COPIES * 4);
    which = B < 8 ? ((u32)line << (B - 4) & 15) * 0x11111111u : 0;
  }
  inputs_ready();
  fetch_inputs(0);
  commit();
  float acc[2][NT][4];
  clear(acc);
  ROLLED for (int kt = 0; kt < COL_TILES; kt++) {
    wait<0>();
    __syncthreads();                                            // inputs of kt are there; those of kt - 1 are done with
    uint4 loaded[B];
    UNROLL for (int p = 0; p < B; p++) loaded[p] = *reinterpret_cast<const uint4*>(mine + p * 512);
    if (kt + 1 < COL_TILES) { fetch_planes(kt + 1); fetch_inputs(kt + 1); }
    commit();
    const uint4* x = reinterpret_cast<const uint4*>(inputs + (kt & 1) * STAGE) + lane;
    auto slot = [&](int s, const u32 (*w)[2][4]) {
      constexpr int CHUNK = NT < 4 ? NT : NT <= 8 || B < 4 ? 4 : 2;
      UNROLL for (int n = 0; n < NT; n += CHUNK) {
        if (n >= used) break;
        uint4 v[CHUNK];
        UNROLL for (int i = 0; i < CHUNK; i++) v[i] = x[(s * NT + n + i) * 32];
        UNROLL for (int i = 0; i < CHUNK; i++)
          UNROLL for (int m = 0; m < 2; m++) { multiply(acc[m][n + i], w[m][0], v[i].x, v[i].y); multiply(acc[m][n + i], w[m][1], v[i].z, v[i].w); }
      }
    };
    u32 w[2][2][4];
    if constexpr (B < TABLE_BITS) {
      u32 words[B][4], even[4], odd[4];
      UNROLL for (int p = 0; p < B; p++) { words[p][0] = loaded[p].x; words[p][1] = loaded[p].y; words[p][2] = loaded[p].z; words[p][3] = loaded[p].w; }
      pair_up<B>(words, even, odd);
      decode_low<B, 0>(table, words, even, odd, w); slot(0, w);
      decode_low<B, 1>(table, words, even, odd, w); slot(1, w);
      decode_low<B, 2>(table, words, even, odd, w); slot(2, w);
      decode_low<B, 3>(table, words, even, odd, w); slot(3, w);
    } else {
      constexpr int COPIES = Shared<B>::COPIES;
      u32 words[4][B], pairs[4][4][2];
      pair_up<B>(loaded, words, pairs);
      decode_high<B, 0, COPIES>(words, pairs, base, which, w); slot(0, w);
      decode_high<B, 1, COPIES>(words, pairs, base, which, w); slot(1, w);
      decode_high<B, 2, COPIES>(words, pairs, base, which, w); slot(2, w);
      decode_high<B, 3, COPIES>(words, pairs, base, which, w); slot(3, w);
    }
  }
  __syncthreads();
  int row = tile_of(warp) * 32 + (lane >> 2);
  float* parts = reinterpret_cast<float*>(inputs) + (warp % HALF) * NT * 8 * 32 + lane;   // up for gate, [HALF][8 * NT][32]
  if (GATED) {
    if (warp >= HALF) UNROLL for (int i = 0; i < 8 * NT; i++) parts[i * 32] = acc[i & 1][i >> 3][(i >> 1) & 3];
    __syncthreads();
    if (warp >= HALF || (int)blockIdx.x * HALF + warp >= HALF_TILES) return;  // clamped above: another warp's rows
  } else if ((int)blockIdx.x * WARPS + warp >= ROW_TILES) {
    return;
  }
  UNROLL for (int n = 0; n < NT; n++) UNROLL for (int odd = 0; odd < 2; odd++) {
    int slot = __ldg(a.slots + group * TOKENS + n * 8 + (lane & 3) * 2 + odd);
    if (slot >= a.slot_count) continue;
    float weight = GATED ? 0.0f : __ldg(a.weights + slot);
    UNROLL for (int i = 0; i < 4; i++) {
      float sum = acc[i >> 1][n][(i & 1) * 2 + odd];
      int at = row + 8 * i;
      if (at >= ROWS) continue;
      if (BIAS) sum += a.bias[expert * ROWS + at];
      if (GATED) {
        float up = parts[(n * 8 + ((i & 1) * 2 + odd) * 2 + (i >> 1)) * 32];
        if (BIAS) up += a.bias[expert * ROWS + at + ROWS / 2];
        reinterpret_cast<u16*>(a.out)[(u64)slot * (ROWS / 2) + at] = to_half(activate(sum, up));
      } else {
        reinterpret_cast<float*>(a.out)[(u64)slot * ROWS + at] = sum * weight;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) prompts(Arguments a) {
  if (FIRST && GATED) { wait_for_earlier(); let_next_begin(); }
  if (TABLE_BITS <= HIGH && (u32)__cvta_generic_to_shared(dynamic) != SHARED_BASE) __trap();
  uint4 listed = load_written(reinterpret_cast<const uint4*>(a.work + blockIdx.y));
  int4 work = make_int4(listed.x, listed.y, listed.z, listed.w);
#define TAKE(B) \
  if constexpr (LOW <= B && B <= HIGH) \
    if (work.y >= 0 && work.z == B) run_wide<B>(a, work, dynamic);
  EACH_WIDTH
  wait_for_earlier();
}
