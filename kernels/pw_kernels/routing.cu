// Which tokens an expert has, and the sum over the experts of a token. Compiled at run time by NVRTC (cuda_moe.py).
//
//   EXPERTS, TOKENS (slots of a group), TOP_K, THREADS of the block; FLOAT16, 1: `combine` writes fp16; 0: bf16
//
// `route` is one block that makes the lists of lists.cuh from a router's choice.

#include "common.cuh"
#include "lists.cuh"

constexpr int FEW_SLOTS = 64;

extern "C" __global__ void __launch_bounds__(THREADS) route(Routing a) {
  __shared__ Tally tally;
  // With more slots something may run beside, whose places the experts would take while they wait.
  bool few = a.slot_count <= FEW_SLOTS;
  if (few) let_next_begin();
  // All that a thread will need of its expert and of its first slot, at once; any others are read when it is their turn.
  int e = threadIdx.x, count = a.slot_count, place[2];
  Block block;
  block.read(a, e);
  if (a.live) count = min(a.live[0] * TOP_K, a.slot_count);
  wait_for_earlier();
  if (!few) let_next_begin();
  long long id = e < a.slot_count ? __ldcg(a.ids + e) : -1;
  float weight = a.statistics && e < a.slot_count ? __ldcg(a.weights + e) : 0.0f;
  if (e >= count) id = -1;
  clear_lists<THREADS>(a, tally, e);
  __syncthreads();
  int rank = id >= 0 && id < EXPERTS ? count_slot(a, tally, id, weight) : 0;
  ROLLED for (int s = e + THREADS; s < count; s += THREADS) {
    long long expert = __ldcg(a.ids + s);
    if (expert >= 0 && expert < EXPERTS) a.ranks[s] = count_slot(a, tally, expert, a.statistics ? __ldcg(a.weights + s) : 0.0f);
  }
  __syncthreads();
  int groups = place_groups(a, tally, e, block, place);
  __syncthreads();
  list_groups(a, tally, e, block, groups, place);
  if (id >= 0 && id < EXPERTS) a.slots[tally.first[id] * TOKENS + rank] = e;
  ROLLED for (int s = e + THREADS; s < count; s += THREADS) {
    long long expert = __ldcg(a.ids + s);
    if (expert >= 0 && expert < EXPERTS) a.slots[tally.first[expert] * TOKENS + a.ranks[s]] = s;
  }
  add_statistics(a, tally, e);
}

// out [T, width] = weighted results [S, width] of each token, added in slot order; width a multiple of 4.
// Zero for tokens from live[0] on.
extern "C" __global__ void __launch_bounds__(256) combine(const float4* results, const long long* ids, ushort4* out, int width,
                                                          const int* live) {
  int column = blockIdx.x * 256 + threadIdx.x;
  if (column >= width / 4) return;
  bool routed[TOP_K];                                           // the slots that have a result
  UNROLL for (int j = 0; j < TOP_K; j++) {
    long long e = ids[(u64)blockIdx.y * TOP_K + j];
    routed[j] = e >= 0 && e < EXPERTS && !(live && (int)blockIdx.y >= live[0]);
  }
  wait_for_earlier();
  float4 sum = make_float4(0, 0, 0, 0);
  UNROLL for (int j = 0; j < TOP_K; j++) {
    if (!routed[j]) continue;
    float4 v = __ldcs(results + ((u64)blockIdx.y * TOP_K + j) * (width / 4) + column);
    sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
  }
  out[(u64)blockIdx.y * (width / 4) + column] = make_ushort4(to_half(sum.x), to_half(sum.y), to_half(sum.z), to_half(sum.w));
}
