// The experts of each token from its logits, a warp each. Compiled at run time by NVRTC (cuda_routers.py).
//
//   FLOAT16       1: logits are fp16; 0: bf16
//   ROUNDED       1: weights are rounded to that type before they are stored as fp32
//   EXPERTS, TOP_K, SCORE, NORMALIZE, SCALED  as in choice.cuh
//   LISTS         1: one block, which makes the lists of the experts' launches, too: TOKENS as in lists.cuh; 0: a block a token
//   THREADS       of a block; as many as experts, if LISTS

#include "loads.cuh"
#include "choice.cuh"
#include "lists.cuh"

struct Arguments {
  const u16* logits;    // [tokens, row]
  long long* ids;       // [tokens, TOP_K]
  float* weights;       // [tokens, TOP_K]
  const u16* expert_scale;  // [EXPERTS], if SCALED
  int tokens, row;
  float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS) choose(Arguments a, Routing lists) {
  int lane = threadIdx.x & 31, token = LISTS ? threadIdx.x >> 5 : blockIdx.x, expert;
  float logits[CHOICES], weight;
  u16 numbers[CHOICES];
  let_next_begin();
#if LISTS
  constexpr int SLOTS = THREADS / 32 * TOP_K;
  __shared__ Tally tally;
  __shared__ int experts[SLOTS], ranks[SLOTS];
  __shared__ float weights[SLOTS];
  Block block;
  block.read(lists, threadIdx.x);
  int live = lists.live ? min(lists.live[0], a.tokens) : a.tokens;
#endif
  wait_for_earlier();
  if (token < a.tokens)
    UNROLL for (int i = 0; i < CHOICES; i++) numbers[i] = load_number(a.logits + (u64)token * a.row + min(CHOICES * lane + i, EXPERTS - 1));
#if LISTS
  clear_lists<THREADS>(lists, tally, threadIdx.x);
#endif
  if (token < a.tokens) {
    UNROLL for (int i = 0; i < CHOICES; i++) logits[i] = from_half(numbers[i]);
    choose_experts(logits, lane, a.scale, a.expert_scale, expert, weight);
    if (lane < TOP_K) {
      int slot = token * TOP_K + lane;
      if (ROUNDED) weight = from_half(to_half(weight));
      a.ids[slot] = expert;
      a.weights[slot] = weight;
#if LISTS
      experts[slot] = expert;
      weights[slot] = weight;
#endif
    }
  }
#if LISTS
  __syncthreads();
  make_lists<THREADS>(lists, tally, threadIdx.x, block, live * TOP_K, experts, weights, ranks);
#endif
}
