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
//   NT            tiles of eight tokens that a block takes;  MT: tiles of 16 rows of W
//   ADD           0: nothing is added; 1: rows of the output's shape; 2: two of them; 3: and the product is times a sigmoid
//
// The matrix unit multiplies weights [16 rows x 16 k] by tokens [16 k x 8]. A lane copies 16 bytes of rows r and r + 8, which
// are its own operands of two such products once the tokens' columns are taken in the same order. So nothing is shared
// between lanes, and the copies of a warp need no barrier. Weights do not depend on launches before this one: they
// are on their way before it waits for those.

#include "loads.cuh"

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

constexpr int ROWS = 16, TALL = ROWS * MT, TOKENS = 8 * NT, THREADS = 32 * WARPS;
constexpr int ALL_STEPS = K / 32, STEPS = (ALL_STEPS + WARPS - 1) / WARPS;
constexpr bool EVEN = ALL_STEPS == WARPS * STEPS;               // no branch is left then
constexpr int STAGE = MT * 1024;                                // bytes of a warp's step
constexpr int PITCH = TALL + 4;                                 // of a token's sums: no two lanes meet in a bank
constexpr int RING = WARPS * STAGES * STAGE, SUMS = WARPS * TOKENS * PITCH * 4, SHARED = RING > SUMS ? RING : SUMS;
constexpr int GATED_TILES = GATED ? INNER / 8 : 0;              // each of 8 rows of the gate and their partners
extern __shared__ __align__(128) unsigned char dynamic[];       // copies, then sums; squares [WARPS, TOKENS]; norm [K]

// Row of W that row r of a tile is.
DI int weight_row(int tile, int r) {
#if GATED
  if (tile < GATED_TILES) return tile * 8 + (r & 7) + (r >> 3) * INNER;
  return 2 * INNER + (tile - GATED_TILES) * ROWS + r;
#else
  return tile * ROWS + r;
#endif
}

// The weights that a lane copies and reads.
struct Weights {
  u64 from[2 * MT]; u32 to; const unsigned char* at;
  DI Weights(const Arguments& a, int first, int warp, int lane) {
    UNROLL for (int j = 0; j < 2 * MT; j++) {
      int row = min(weight_row(blockIdx.x * MT + j / 2, (lane >> 2) + 8 * (j & 1)), N - 1);
      from[j] = (u64)(a.weight + (u64)row * K + first * 32 + 8 * (lane & 3));
    }
    int offset = warp * (STAGES * STAGE) + lane * 16;
    to = (u32)__cvta_generic_to_shared(dynamic) + offset;
    at = dynamic + offset;
  }
  DI void copy(int step) const {
    UNROLL for (int j = 0; j < 2 * MT; j++) copy_async(to + step % STAGES * STAGE + j * 512, from[j] + step * 64);
  }
  DI uint4 take(int step, int j) const { return *(const uint4*)(at + step % STAGES * STAGE + j * 512); }
};

#if NORM
#include "norms.cuh"
#endif

// What is added to one number of the result; asked for long before it is needed.
struct Added {
#if ROUTED
  float parts[ROUTED]; u64 ids[ROUTED]; bool live;
#elif ADD >= 2
  u16 more;
#endif
  u16 first, logit;

  DI void load(const Arguments& a, int token, int row) {
#if ADD
    first = load_number(a.add + (u64)token * a.add_row + row);
#endif
#if ROUTED
    live = !a.live || token < a.live[0];
    UNROLL for (int j = 0; j < ROUTED; j++) {
      u64 slot = (u64)token * ROUTED + j;
      ids[j] = load_id(a.ids + slot);
      parts[j] = load_float(a.results + slot * N + row);
    }
#elif ADD >= 2
    more = load_number(a.more + (u64)token * a.more_row + row);
#endif
#if ADD == 3
    logit = load_number(a.share + (u64)token * a.share_row);
#endif
  }
#if ROUTED
  // What the experts of a token give, added in their order and rounded.
  DI float routed() const {
    float sum = 0;
    UNROLL for (int j = 0; j < ROUTED; j++) sum += live && ids[j] < EXPERTS ? parts[j] : 0;  // -1 is a large number
    return rounded(sum);
  }
#endif
  // The product and all of it.
  DI float sum(float product) const {
#if ADD == 1
    product += from_half(first);
#elif ADD >= 2
#if ROUTED
    float before = from_half(first) + routed();
#else
    float before = from_half(first) + from_half(more);
#endif
    float part = rounded(product);
#if ADD == 3
    part = part / (1.0f + expf(-from_half(logit)));
#endif
    product = before + part;
#endif
    return product;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) product(Arguments a) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = 8 * (lane & 3);
  int first = warp * STEPS, count = EVEN ? STEPS : min(first + STEPS, ALL_STEPS) - first, own = lane >> 2;
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
  constexpr int RESULTS = (TOKENS * TALL + THREADS - 1) / THREADS;
  auto place = [&](int i, int& token, int& r) {                 // of a thread's i-th result
    i = i * THREADS + threadIdx.x;
    token = i / TALL, r = i % TALL;
    return i < TOKENS * TALL && token < a.tokens;
  };
  auto row_of = [&](int r) { return weight_row(blockIdx.x * MT + r / ROWS, r % ROWS); };
#if ADD
  Added added[RESULTS];
  UNROLL for (int i = 0; i < RESULTS; i++) {
    int token, r;
    if (place(i, token, r)) added[i].load(a, token, min(row_of(r), N - 1));
  }
#endif
  float sums[MT][NT][4] = {};
  uint4 x[TURN][NT];
  for (int turn = 0; turn < STEPS; turn += TURN) {
    UNROLL for (int j = 0; j < TURN; j++)
      UNROLL for (int t = 0; t < NT; t++)
        x[j][t] = turn + j < count ? load_written((const uint4*)(from[t] + (turn + j) * 32)) : make_uint4(0, 0, 0, 0);
    ask();
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
        UNROLL for (int m = 0; m < MT; m++) {
          uint4 low = weights.take(step, 2 * m), high = weights.take(step, 2 * m + 1);
          u32 left[4] = {low.x, high.x, low.y, high.y}, right[4] = {low.z, high.z, low.w, high.w};
          UNROLL for (int t = 0; t < NT; t++) {
            multiply(sums[m][t], left, x[j][t].x, x[j][t].y);
            multiply(sums[m][t], right, x[j][t].z, x[j][t].w);
          }
        }
        if (STAGES < STEPS && step + STAGES < count) weights.copy(step + STAGES);
      }
      commit();
    }
  }
  __syncthreads();
  float* shared = (float*)dynamic;                              // [WARPS, TOKENS, PITCH]
  UNROLL for (int m = 0; m < MT; m++)
    UNROLL for (int t = 0; t < NT; t++)
      UNROLL for (int i = 0; i < 4; i++)
        shared[(warp * TOKENS + 8 * t + 2 * (lane & 3) + (i & 1)) * PITCH + 16 * m + own + 8 * (i >> 1)] = sums[m][t][i];
  __syncthreads();
  auto total = [&](int token, int r) {
    float sum = 0;
    for (int w = 0; w < WARPS; w++) sum += shared[(w * TOKENS + token) * PITCH + r];
    return sum;
  };
  UNROLL for (int i = 0; i < RESULTS; i++) {
    int token, r;
    if (!place(i, token, r)) continue;
    int row = row_of(r);
    if (row >= N) continue;
#if GATED
    if (blockIdx.x * MT + r / ROWS < GATED_TILES) {
      if (r % ROWS >= 8) continue;
      float gate = total(token, r), up = total(token, r + 8);
#if BIAS
      gate += from_half(a.bias[row]);
      up += from_half(a.bias[row + INNER]);
#endif
      a.out[(u64)token * INNER + row] = to_half(rounded(activate(rounded(gate))) * rounded(up));
      continue;
    }
#endif
    float sum = total(token, r);
#if BIAS
    sum += from_half(a.bias[row]);
#endif
#if ADD
    sum = added[i].sum(sum);
#endif
#if GATED
    a.rest[(u64)token * (N - 2 * INNER) + row - 2 * INNER] = to_half(sum);
#else
    a.out[(u64)token * N + row] = to_half(sum);
#endif
  }
}
