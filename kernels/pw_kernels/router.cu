// The router of some tokens in one launch: logits, and the experts of each token. Compiled at run time by NVRTC
// (cuda_routers.py), which defines the constants named below; needs clusters of blocks, compute capability 9.0.
//
//   FLOAT16       1: hidden states and weights are fp16; 0: bf16
//   N, K          rows and columns of W: FIRST rows of others, then EXPERTS of the router, then padding
//   CLUSTER       blocks, eight: each has one of the eight tokens of a tile;  TILES: of tokens
//   THREADS       of a block: a warp for each tile of its parts, and as many as experts, if LISTS
//   ROUNDED       1: weights are rounded to the type of x before they are stored as fp32
//   EXPERTS, TOP_K, SCORE, NORMALIZE, SCALED  as in choice.cuh
//   NORM          1: an RMS norm of the rows of x comes first
//   LISTS         1: the lists of the experts' launches, too: TOKENS as in lists.cuh
//
// A product with few rows has too few blocks to bring its tokens quickly, so a cluster shares its columns: a block takes two of
// the sixteen parts that the warps of a block of products.cu have, and multiplies all rows by them; a warp takes one of the two
// for eight tokens. Parts go to the block that has the token, by its shared memory; it adds them up in the order of products.cu,
// so that logits are the same to the bit, and its warps choose. What they chose goes to the first block, which makes the lists.
// Weights are on their way before the launch waits for the one before it.

#include "loads.cuh"
#include "choice.cuh"
#include "lists.cuh"
#include "clusters.cuh"

struct Arguments {
  const u16* x;         // [tokens, K]
  const u16* weight;    // [N, K]
  u16* others;          // [tokens, FIRST]; or null
  long long* ids;       // [tokens, TOP_K]
  float* weights;       // [tokens, TOP_K]
  const u16* expert_scale;  // [EXPERTS], if SCALED
  const u16* norm;      // [K]
  u16* normed;          // [tokens, K] what is multiplied, if NORM
  int tokens, x_row;
  float scale, epsilon;
};

#if NORM
#include "norms.cuh"
#endif

constexpr int PARTS = 16, OWN = PARTS / CLUSTER, WARPS = THREADS / 32, BUSY = OWN * TILES;
constexpr int ALL_STEPS = K / 32, STEPS = (ALL_STEPS + PARTS - 1) / PARTS;  // of 32 columns; of a part
constexpr int ROW_TILES = (FIRST + EXPERTS + 15) / 16, PITCH = 16 * ROW_TILES + 4;
constexpr int PIECES = OWN * STEPS * ROW_TILES * 2, SUMS_AT = PIECES * 512;
extern __shared__ __align__(128) unsigned char dynamic[];       // weights, as lanes multiply them; sums [PARTS, TILES, PITCH]; what was chosen
constexpr int SLOTS = 8 * TILES * TOP_K, CHOSEN_AT = SUMS_AT + PARTS * TILES * PITCH * 4;  // experts, weights, ranks [SLOTS]
constexpr int SQUARES_AT = CHOSEN_AT + (LISTS ? 12 * SLOTS : 0);                           // [PARTS, 8 TILES], if NORM

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS) router(Arguments a, Routing lists) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = 8 * (lane & 3), own = lane >> 2;
  int rank = rank_in_cluster(), tile = warp % TILES, mine = warp / TILES, part = rank * OWN + mine;
  bool busy = BUSY == WARPS || warp < BUSY;                     // else it copies and lists alone
  u32 shared = (u32)__cvta_generic_to_shared(dynamic);
  cluster_arrive();                                             // before anybody writes to it, a block has to be there
  ROLLED for (int piece = warp; piece < PIECES; piece += WARPS) {
    int half = piece & 1, m = piece / 2 % ROW_TILES, step = rank * OWN * STEPS + piece / (2 * ROW_TILES);
    int row = min(16 * m + 8 * half + own, N - 1);
    if (step < ALL_STEPS) copy_async(shared + piece * 512 + lane * 16, (u64)(a.weight + (u64)row * K + step * 32 + column));
  }
  commit();
#if LISTS
  __shared__ Tally tally;
  Block block;
  int live = a.tokens;
  if (rank == 0) block.read(lists, threadIdx.x), live = lists.live ? min(lists.live[0], live) : live;
#else
  let_next_begin();
#endif
  int first = part * STEPS * 32 + column, count = busy ? max(0, min(STEPS, ALL_STEPS - part * STEPS)) : 0;
#if NORM
  uint4 norm[STEPS];
  UNROLL for (int i = 0; i < STEPS; i++) norm[i] = __ldg((const uint4*)(a.norm + (i < count ? first + 32 * i : 0)));
#endif
  wait<0>();
  __syncthreads();
  wait_for_earlier();
  const u16* from = a.x + (u64)min(8 * tile + own, a.tokens - 1) * a.x_row + (busy ? first : 0);
  uint4 x[STEPS];
  UNROLL for (int i = 0; i < STEPS; i++) x[i] = i < count ? load_written((const uint4*)(from + 32 * i)) : make_uint4(0, 0, 0, 0);
  ask();
#if LISTS
  if (rank == 0) clear_lists<THREADS>(lists, tally, threadIdx.x);
#endif
#if NORM
  // Every block gets the squares of all parts.
  float square = 0;
  UNROLL for (int i = 0; i < STEPS; i++) square += square_sum(x[i]);
  square = with_lane(with_lane(square, lane ^ 1), lane ^ 2);
  cluster_wait();
  u32 squares = shared + SQUARES_AT + (part * 8 * TILES + 8 * tile + own) * 4;
  if (busy) UNROLL for (int i = 0; i < CLUSTER / 4; i++) push(squares, 4 * i + (lane & 3), square);
  cluster_arrive();
  cluster_wait();
  square = 0;
  UNROLL for (int p = 0; p < PARTS; p++) square += ((const float*)(dynamic + SQUARES_AT))[p * 8 * TILES + 8 * tile + own];
  float rms = rsqrtf(square / K + a.epsilon);
  UNROLL for (int i = 0; i < STEPS; i++) {
    x[i] = make_uint4(scaled(x[i].x, norm[i].x, rms), scaled(x[i].y, norm[i].y, rms), scaled(x[i].z, norm[i].z, rms), scaled(x[i].w, norm[i].w, rms));
    if (i < count && 8 * tile + own < a.tokens) *(uint4*)(a.normed + (u64)(8 * tile + own) * K + first + 32 * i) = x[i];
  }
#endif
  float sums[ROW_TILES][4] = {};
  UNROLL for (int i = 0; i < STEPS; i++) {
    if (i >= count) break;
    UNROLL for (int m = 0; m < ROW_TILES; m++) {
      const uint4* at = (const uint4*)(dynamic + ((mine * STEPS + i) * ROW_TILES + m) * 1024) + lane;
      uint4 low = at[0], high = at[32];
      u32 left[4] = {low.x, high.x, low.y, high.y}, right[4] = {low.z, high.z, low.w, high.w};
      multiply(sums[m], left, x[i].x, x[i].y);
      multiply(sums[m], right, x[i].z, x[i].w);
    }
  }
#if !NORM
  cluster_wait();
#endif
  // Of a tile's eight tokens each block has one.
  u32 to = shared + SUMS_AT + ((part * TILES + tile) * PITCH + own) * 4;
  if (busy) UNROLL for (int m = 0; m < ROW_TILES; m++)
    UNROLL for (int i = 0; i < 4; i++) push(to + 4 * (16 * m + 8 * (i >> 1)), 2 * (lane & 3) + (i & 1), sums[m][i]);
  cluster_arrive();
  cluster_wait();
#if LISTS
  let_next_begin();                                             // not earlier: experts would take the places of what runs beside
#endif
  int token = 8 * warp + rank;
  if (warp < TILES && token < a.tokens) {
    const float* parts = (const float*)(dynamic + SUMS_AT) + warp * PITCH;
    auto total = [&](int row) {
      float sum = 0;
      UNROLL for (int p = 0; p < PARTS; p++) sum += parts[p * TILES * PITCH + row];
      return from_half(to_half(sum));
    };
    float logits[CHOICES], weight;
    UNROLL for (int i = 0; i < CHOICES; i++) logits[i] = total(FIRST + min(CHOICES * lane + i, EXPERTS - 1));
    int expert;
    choose_experts(logits, lane, a.scale, a.expert_scale, expert, weight);
    if (lane < TOP_K) {
      int slot = token * TOP_K + lane;
      if (ROUNDED) weight = from_half(to_half(weight));
#if LISTS
      push(shared + CHOSEN_AT + 4 * slot, 0, __uint_as_float(expert));
      push(shared + CHOSEN_AT + 4 * (SLOTS + slot), 0, weight);
#endif
      a.ids[slot] = expert;
      a.weights[slot] = weight;
    }
    if (a.others && lane < FIRST) a.others[(u64)token * FIRST + lane] = to_half(total(lane));
  }
#if LISTS
  cluster_arrive();
  cluster_wait();                                               // by all: who has arrived and not waited may not leave
  if (rank) return;
  const int* experts = (const int*)(dynamic + CHOSEN_AT);
  const float* weights = (const float*)(experts + SLOTS);
  make_lists<THREADS>(lists, tally, threadIdx.x, block, live * TOP_K, experts, weights, (int*)(weights + SLOTS));
#endif
}
