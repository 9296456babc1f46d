// y = x W^T for few rows of x, with what comes before and after it. Compiled at run time by NVRTC (cuda_products.py), which
// defines the constants named below.
//
//   FLOAT16       1: everything is fp16; 0: bf16
//   N, K          rows and columns of W
//   WARPS         of a block, which share its columns;  BLOCKS: wanted on a multiprocessor
//   STAGES        steps of 32 columns that a warp has in flight;  TURN: steps whose x it holds at a time
//   NORM          1: an RMS norm of the rows of x comes first
//   BIAS          1: a bias is added
//   GATED, KIND   1: W is INNER rows of a gate, as many of what it gates, and others; the result of the others is apart
//   ROUTED        > 0: the second of two is the sum of so many results of experts, of EXPERTS that there are
//   NT            tiles of eight tokens that a block takes
//   ADD           0: nothing is added; 1: rows of the output's shape; 2: two of them; 3: and the product is times a sigmoid
//
// The matrix unit multiplies weights [16 rows x 16 k] by tokens [16 k x 8]. A lane copies 16 bytes of rows r and r + 8, which
// are its own operands of two such products once the tokens' columns are taken in the same order. So nothing is shared
// between lanes, and the copies of a warp need no barrier. Weights do not depend on launches before this one: they
// are on their way before it waits for those.

#include "common.cuh"

// For what a launch that overlaps with this one wrote: not from the cache of a multiprocessor, not before the wait for it.
DI uint4 load_written(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DI u16 load_number(const u16* p) {
  u16 v;
  asm volatile("ld.global.cg.u16 %0,[%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}
DI float load_float(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0,[%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
DI u64 load_id(const u64* p) {
  u64 v;
  asm volatile("ld.global.cg.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DI void copy_async(u32 to, u64 from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16;" :: "r"(to), "l"(from) : "memory");
}
DI float rounded(float v) { return from_half(to_half(v)); }
DI float activate(float gate) {
#if KIND == 1
  return gate * 0.5f * (1.0f + erff(gate * 0.7071067811865476f));
#elif KIND == 2
  float inner = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.0f + expf(-inner));
#else
  return gate / (1.0f + expf(-gate));
#endif
}

struct Arguments {
  const u16* x;         // [tokens, K]
  const u16* weight;    // [N, K]
  const u16* norm;      // [K]
  const u16* bias;      // [N]
  const u16* add;       // [tokens, N]
  const u16* more;      // [tokens, N] added, too
  const u16* share;     // [tokens] logits
  u16* out;             // [tokens, N], or [tokens, INNER] if GATED
  u16* rest;            // [tokens, N - 2 INNER] if GATED
  u16* normed;          // [tokens, K] what is multiplied, if NORM; or null
  const float* results; // [tokens, ROUTED, N] of the experts of each token, in place of `more`
  const u64* ids;       // [tokens, ROUTED] of these experts
  const int* live;      // [1] tokens that have experts; or null: all have
  int tokens, x_row, add_row, more_row, share_row;
  float epsilon;
};

constexpr int ROWS = 16, TOKENS = 8 * NT, THREADS = 32 * WARPS;
constexpr int ALL_STEPS = K / 32, STEPS = (ALL_STEPS + WARPS - 1) / WARPS;
constexpr int PITCH = ROWS + 4;                                 // of a token's sums: no two lanes meet in a bank
constexpr int RING = WARPS * STAGES * 1024, SUMS = WARPS * TOKENS * PITCH * 4, SHARED = RING > SUMS ? RING : SUMS;
constexpr int GATED_TILES = GATED ? INNER / 8 : 0;              // each of 8 rows of the gate and their partners
extern __shared__ __align__(128) unsigned char dynamic[];       // copies, then sums; squares [WARPS, TOKENS]; norm [K]

// Row of W that row r of a block is.
DI int weight_row(int r) {
  int tile = blockIdx.x;
#if GATED
  if (tile < GATED_TILES) return tile * 8 + (r & 7) + (r >> 3) * INNER;
  return 2 * INNER + (tile - GATED_TILES) * ROWS + r;
#else
  return tile * ROWS + r;
#endif
}

// The weights that a lane copies and reads.
struct Weights {
  u64 from[2]; u32 to; const unsigned char* at;
  DI Weights(const Arguments& a, int first, int warp, int lane) {
    UNROLL for (int j = 0; j < 2; j++) {
      int row = min(weight_row((lane >> 2) + 8 * j), N - 1);
      from[j] = (u64)(a.weight + (u64)row * K + first * 32 + 8 * (lane & 3));
    }
    int offset = warp * (STAGES * 1024) + lane * 16;
    to = (u32)__cvta_generic_to_shared(dynamic) + offset;
    at = dynamic + offset;
  }
  DI void copy(int step) const {
    UNROLL for (int j = 0; j < 2; j++) copy_async(to + step % STAGES * 1024 + j * 512, from[j] + step * 64);
  }
  DI uint4 take(int step, int j) const { return *(const uint4*)(at + step % STAGES * 1024 + j * 512); }
};

#if NORM
DI float square_sum(uint4 v) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  float sum = 0;
  UNROLL for (int i = 0; i < 4; i++) {
    float low = from_half((u16)words[i]), high = from_half((u16)(words[i] >> 16));
    sum += low * low + high * high;
  }
  return sum;
}
DI u32 scaled(u32 x, u32 by, float scale) {
  float low = from_half((u16)x) * scale * from_half((u16)by), high = from_half((u16)(x >> 16)) * scale * from_half((u16)(by >> 16));
  return to_half(low) | (u32)to_half(high) << 16;
}
DI float with_lane(float v, int lane) { return v + __uint_as_float(__shfl_sync(~0u, __float_as_uint(v), lane)); }
#endif

#if ROUTED
// What the experts of a token give, added in their order and rounded.
DI float routed_sum(const Arguments& a, int token, int row) {
  bool live = !a.live || token < a.live[0];
  float sum = 0;
  UNROLL for (int j = 0; j < ROUTED; j++) {
    u64 slot = (u64)token * ROUTED + j, expert = load_id(a.ids + slot);
    float part = load_float(a.results + slot * N + row);
    sum += live && expert < EXPERTS ? part : 0;                 // -1 is a large number
  }
  return rounded(sum);
}
#endif

// One number of the result and all that is added to it.
DI void finish(const Arguments& a, int token, int row, float sum) {
#if BIAS
  sum += from_half(a.bias[row]);
#endif
#if ADD == 1
  sum += from_half(load_number(a.add + (u64)token * a.add_row + row));
#elif ADD >= 2
  float before = from_half(load_number(a.add + (u64)token * a.add_row + row));
#if ROUTED
  before += routed_sum(a, token, row);
#else
  before += from_half(load_number(a.more + (u64)token * a.more_row + row));
#endif
  float part = rounded(sum);
#if ADD == 3
  part = part / (1.0f + expf(-from_half(load_number(a.share + (u64)token * a.share_row))));
#endif
  sum = before + part;
#endif
#if GATED
  a.rest[(u64)token * (N - 2 * INNER) + row - 2 * INNER] = to_half(sum);
#else
  a.out[(u64)token * N + row] = to_half(sum);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) product(Arguments a) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = 8 * (lane & 3);
  int first = warp * STEPS, count = min(first + STEPS, ALL_STEPS) - first, own = lane >> 2;
  Weights weights(a, first, warp, lane);
  let_next_begin();
  UNROLL for (int i = 0; i < STAGES; i++) {
    if (i < count) weights.copy(i);
    commit();
  }
#if NORM
  float* squares = (float*)(dynamic + SHARED);
  uint4* norm = (uint4*)(dynamic + SHARED + WARPS * TOKENS * 4);
  constexpr int PIECES = (K / 8 + THREADS - 1) / THREADS;
  uint4 pieces[PIECES];
  UNROLL for (int i = 0; i < PIECES; i++) pieces[i] = __ldg((const uint4*)a.norm + min((int)threadIdx.x + i * THREADS, K / 8 - 1));
  u32 zero = (u32)a.tokens >> 31;
#endif
  wait_for_earlier();
  const u16* from[NT];
  UNROLL for (int t = 0; t < NT; t++) from[t] = a.x + (u64)min(own + 8 * t, a.tokens - 1) * a.x_row + first * 32 + column;
  float sums[NT][4] = {};
  uint4 x[TURN][NT];
  for (int turn = 0; turn < STEPS; turn += TURN) {
    UNROLL for (int j = 0; j < TURN; j++)
      UNROLL for (int t = 0; t < NT; t++)
        x[j][t] = turn + j < count ? load_written((const uint4*)(from[t] + (turn + j) * 32)) : make_uint4(0, 0, 0, 0);
#if NORM
    static_assert(STEPS <= TURN && NT == 1, "a norm needs all of x");
    UNROLL for (int i = 0; i < PIECES; i++)
      if ((int)threadIdx.x + i * THREADS < K / 8) norm[threadIdx.x + i * THREADS] = pieces[i];
    float sum = 0;
    UNROLL for (int j = 0; j < TURN; j++) sum += square_sum(x[j][0]);
    sum = with_lane(with_lane(sum, lane ^ 1), lane ^ 2);
    if ((lane & 3) == 0) squares[warp * TOKENS + own] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < WARPS; w++) sum += squares[w * TOKENS + own];
    float scale = rsqrtf(sum / K + a.epsilon);
    UNROLL for (int j = 0; j < TURN; j++) {
      if (j >= count) break;
      uint4 v = x[j][0], by = norm[(first + j) * 4 + (lane & 3)];
      v.x ^= zero, v.y ^= zero, v.z ^= zero, v.w ^= zero;       // else it is kept as it was made for the squares, in 64 registers
      x[j][0] = make_uint4(scaled(v.x, by.x, scale), scaled(v.y, by.y, scale), scaled(v.z, by.z, scale), scaled(v.w, by.w, scale));
      if (a.normed && blockIdx.x == 0 && own < a.tokens)
        *(uint4*)(a.normed + (u64)own * K + (first + j) * 32 + column) = x[j][0];
    }
#endif
    UNROLL for (int j = 0; j < TURN; j++) {
      int step = turn + j;
      wait<STAGES - 1>();
      if (step < count) {
        uint4 low = weights.take(step, 0), high = weights.take(step, 1);
        u32 left[4] = {low.x, high.x, low.y, high.y}, right[4] = {low.z, high.z, low.w, high.w};
        UNROLL for (int t = 0; t < NT; t++) {
          multiply(sums[t], left, x[j][t].x, x[j][t].y);
          multiply(sums[t], right, x[j][t].z, x[j][t].w);
        }
        if (STAGES < STEPS && step + STAGES < count) weights.copy(step + STAGES);
      }
      commit();
    }
  }
  __syncthreads();
  float* shared = (float*)dynamic;                              // [WARPS, TOKENS, PITCH]
  UNROLL for (int t = 0; t < NT; t++)
    UNROLL for (int i = 0; i < 4; i++)
      shared[(warp * TOKENS + 8 * t + 2 * (lane & 3) + (i & 1)) * PITCH + own + 8 * (i >> 1)] = sums[t][i];
  __syncthreads();
  auto total = [&](int token, int r) {
    float sum = 0;
    for (int w = 0; w < WARPS; w++) sum += shared[(w * TOKENS + token) * PITCH + r];
    return sum;
  };
  for (int i = threadIdx.x; i < TOKENS * ROWS; i += THREADS) {
    int token = i / ROWS, r = i % ROWS, row = weight_row(r);
    if (token >= a.tokens || row >= N) continue;
#if GATED
    if (blockIdx.x < GATED_TILES) {
      if (r >= 8) continue;
      float gate = total(token, r), up = total(token, r + 8);
#if BIAS
      gate += from_half(a.bias[row]);
      up += from_half(a.bias[row + INNER]);
#endif
      a.out[(u64)token * INNER + row] = to_half(rounded(activate(rounded(gate))) * rounded(up));
      continue;
    }
#endif
    finish(a, token, row, total(token, r));
  }
}
