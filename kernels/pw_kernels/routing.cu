// Which tokens an expert has, and the sum over the experts of a token. Compiled at run time by NVRTC (cuda_moe.py).
//
//   EXPERTS, TOKENS (slots of a group), TOP_K, THREADS of the block; FLOAT16, 1: `combine` writes fp16; 0: bf16
//
// One block groups the slots of each expert, lists the groups for both modules by class of width, those of a width in no
// order, and adds up router weights in fixed point, so that the sums do not depend on the order of the threads.

#include "common.cuh"

struct Routing {
  const long long* ids;   // [S] experts; outside [0, EXPERTS): no expert
  const float* weights;   // [S]
  const int* bits[2];     // [EXPERTS] widths of gate_up and down
  const int* offsets[2];  // [EXPERTS] bytes of their tables in their regions
  int4* work[2];          // [2 classes, G]: group, expert or -1, width, offset; the widest first, because they take longest
  int* slots;             // [G, TOKENS], S for an unused place
  int* ranks;             // [S] scratch
  int* counts;            // [EXPERTS] slots of each expert; or null
  float* statistics;      // [2, EXPERTS] sums of weights and squares, added to; or null
  const int* live;        // [1] tokens that are real, the others have no expert; or null: all are
  int* progress;          // [progress_count] counters of the launches behind, set to zero
  int slot_count, groups; // S, G
  int threshold;          // widest width of class 0
  int progress_count;
  int least[2], most[2];  // widths that the launches behind take; any other would leave them waiting, so the call is broken off
};

extern "C" __global__ void __launch_bounds__(THREADS) route(Routing a) {
  __shared__ u32 counts[EXPERTS];
  __shared__ int first[EXPERTS];
  __shared__ u64 mass[EXPERTS], square[EXPERTS];
  __shared__ int listed[2][9], all;                             // groups of each module and width
  let_next_begin();
  // All that a thread will need of its expert and of its first slot, at once; any others are read when it is their turn.
  int e = threadIdx.x, width[2] = {0, 0}, offset[2] = {0, 0}, count = a.slot_count;
  long long id = e < a.slot_count ? a.ids[e] : -1;
  float weight = a.statistics && e < a.slot_count ? a.weights[e] : 0.0f;
  UNROLL for (int m = 0; m < 2; m++)
    if (e < EXPERTS) { width[m] = min(max(a.bits[m][e], 0), 8); offset[m] = a.offsets[m][e]; }
  if (a.live) count = min(a.live[0] * TOP_K, a.slot_count);
  if (e >= count) id = -1;
  for (int i = e; i < EXPERTS; i += THREADS) { counts[i] = 0; mass[i] = 0; square[i] = 0; }
  for (int i = e; i < a.groups * TOKENS; i += THREADS) a.slots[i] = a.slot_count;
  for (int i = e; i < a.progress_count; i += THREADS) a.progress[i] = 0;
  for (int i = e; i < 2 * 9; i += THREADS) listed[i / 9][i % 9] = 0;
  if (e == 0) all = 0;
  __syncthreads();
  auto add = [&](long long expert, double mine) {               // the slot's rank
    if (a.statistics) {
      atomicAdd(&mass[expert], (u64)__double2ll_rn(mine * 4294967296.0));
      atomicAdd(&square[expert], (u64)__double2ll_rn(mine * mine * 4294967296.0));
    }
    return (int)atomicAdd(&counts[expert], 1);
  };
  int rank = id >= 0 && id < EXPERTS ? add(id, weight) : 0;
  for (int s = e + THREADS; s < count; s += THREADS) {
    long long expert = a.ids[s];
    if (expert >= 0 && expert < EXPERTS) a.ranks[s] = add(expert, a.statistics ? a.weights[s] : 0.0f);
  }
  __syncthreads();
  int place[2], start = 0, mine = e < EXPERTS ? (counts[e] + TOKENS - 1) / TOKENS : 0;
  if (e < EXPERTS) {
    if (a.counts) a.counts[e] = counts[e];
    if (a.statistics) {
      a.statistics[e] += (float)((double)(long long)mass[e] / 4294967296.0);
      a.statistics[EXPERTS + e] += (float)((double)(long long)square[e] / 4294967296.0);
    }
  }
  if (mine) {
    first[e] = start = atomicAdd(&all, mine);
    UNROLL for (int m = 0; m < 2; m++) place[m] = atomicAdd(&listed[m][width[m]], mine);
  }
  __syncthreads();
  if (mine)
    UNROLL for (int m = 0; m < 2; m++) {
      if (width[m] < a.least[m] || width[m] > a.most[m]) __trap();
      int high = width[m] > a.threshold;
      for (int b = high ? 8 : min(a.threshold, 8); b > width[m]; b--) place[m] += listed[m][b];
      int4* list = a.work[m] + high * a.groups + place[m];
      for (int i = 0; i < mine; i++) list[i] = make_int4(start + i, e, width[m], offset[m]);
    }
  UNROLL for (int m = 0; m < 2; m++) {                          // the rest of the lists
    int used[2] = {0, 0};
    UNROLL for (int b = 0; b <= 8; b++) used[0] += b > a.threshold ? 0 : listed[m][b], used[1] += b > a.threshold ? listed[m][b] : 0;
    UNROLL for (int high = 0; high < 2; high++)
      for (int i = used[high] + e; i < a.groups; i += THREADS) a.work[m][high * a.groups + i] = make_int4(0, -1, 0, 0);
  }
  if (id >= 0 && id < EXPERTS) a.slots[first[id] * TOKENS + rank] = e;
  for (int s = e + THREADS; s < count; s += THREADS) {
    long long expert = a.ids[s];
    if (expert >= 0 && expert < EXPERTS) a.slots[first[expert] * TOKENS + a.ranks[s]] = s;
  }
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
