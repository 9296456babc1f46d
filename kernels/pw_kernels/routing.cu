// Which tokens an expert has, and the sum over the experts of a token. Compiled at run time by NVRTC (cuda_moe.py).
//
//   EXPERTS, TOKENS (slots of a group), TOP_K, THREADS of the block, BFLOAT16 / FLOAT16 output of `combine`
//
// One block groups the slots of each expert, lists the groups for both modules by class of width, and adds up
// router weights in fixed point, so that the sums do not depend on the order of the threads.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct Routing {
  const long long* ids;   // [S] experts; outside [0, EXPERTS): no expert
  const float* weights;   // [S]
  const int* bits[2];     // [EXPERTS] widths of gate_up and down
  const int* offsets[2];  // [EXPERTS] bytes of their tables in their regions
  int4* work[2];          // [2 classes, G]: group, expert or -1, width, offset
  int* slots;             // [G, TOKENS], S for an unused place
  int* ranks;             // [S] scratch
  int* counts;            // [EXPERTS] slots of each expert; or null
  float* statistics;      // [2, EXPERTS] sums of weights and squares, added to; or null
  const int* live;        // [1] tokens that are real, the others have no expert; or null: all are
  int slot_count, groups, threshold;   // S, G, widest width of class 0
};

constexpr int WARPS = THREADS / 32;

// As in moe.cu: a launch may begin while the one before it ends.
#if __CUDA_ARCH__ >= 900
#define WAIT_FOR_EARLIER() asm volatile("griddepcontrol.wait;" ::: "memory")
#define LET_NEXT_BEGIN() asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#else
#define WAIT_FOR_EARLIER()
#define LET_NEXT_BEGIN()
#endif

__device__ u64 exclusive_scan(u64 value, u64* warp_sums) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u64 sum = value;
  for (int step = 1; step < 32; step *= 2) {
    u64 other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  u64 before = 0;
  for (int w = 0; w < warp; w++) before += warp_sums[w];
  __syncthreads();
  return before + sum - value;
}

extern "C" __global__ void __launch_bounds__(THREADS) route(Routing a) {
  __shared__ u32 counts[EXPERTS];
  __shared__ int first[EXPERTS];
  __shared__ u64 mass[EXPERTS], square[EXPERTS], sums[WARPS];
  __shared__ u64 listed;
  LET_NEXT_BEGIN();
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) { counts[e] = 0; mass[e] = 0; square[e] = 0; }
  for (int i = threadIdx.x; i < a.groups * TOKENS; i += THREADS) a.slots[i] = a.slot_count;
  __syncthreads();
  int count = a.live ? min(a.live[0] * TOP_K, a.slot_count) : a.slot_count;
  for (int s = threadIdx.x; s < count; s += THREADS) {
    long long e = a.ids[s];
    if (e < 0 || e >= EXPERTS) continue;
    a.ranks[s] = atomicAdd(&counts[e], 1);
    if (a.statistics) {
      double weight = a.weights[s];
      atomicAdd(&mass[e], (u64)__double2ll_rn(weight * 4294967296.0));
      atomicAdd(&square[e], (u64)__double2ll_rn(weight * weight * 4294967296.0));
    }
  }
  __syncthreads();
  int e = threadIdx.x, width[2] = {0, 0}, shift[2] = {0, 32};
  u64 mine = e < EXPERTS ? (counts[e] + TOKENS - 1) / TOKENS : 0, packed = 0;
  if (e < EXPERTS) {
    if (a.counts) a.counts[e] = counts[e];
    for (int m = 0; m < 2; m++) {
      width[m] = a.bits[m][e];
      shift[m] += width[m] > a.threshold ? 16 : 0;
      packed += mine << shift[m];
    }
    if (a.statistics) {
      a.statistics[e] += (float)((double)(long long)mass[e] / 4294967296.0);
      a.statistics[EXPERTS + e] += (float)((double)(long long)square[e] / 4294967296.0);
    }
  }
  u64 before = exclusive_scan(packed, sums);
  if (e == THREADS - 1) listed = before + packed;
  if (e < EXPERTS) {
    first[e] = (int)((before & 0xFFFF) + (before >> 16 & 0xFFFF));
    for (int m = 0; m < 2; m++) {
      int4* list = a.work[m] + (width[m] > a.threshold ? a.groups : 0) + (before >> shift[m] & 0xFFFF);
      for (int i = 0; i < (int)mine; i++) list[i] = make_int4(first[e] + i, e, width[m], a.offsets[m][e]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 4 * a.groups; i += THREADS) {
    int list = i / a.groups, place = i % a.groups;
    if (place >= (int)(listed >> 16 * list & 0xFFFF)) a.work[list >> 1][(list & 1) * a.groups + place] = make_int4(0, -1, 0, 0);
  }
  for (int s = threadIdx.x; s < count; s += THREADS) {
    long long expert = a.ids[s];
    if (expert >= 0 && expert < EXPERTS) a.slots[first[expert] * TOKENS + a.ranks[s]] = s;
  }
}

__device__ u16 narrow(float v) {
  u16 h;
#if FLOAT16
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(v));
#else
  asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(h) : "f"(v));
#endif
  return h;
}

// out [T, width] = weighted results [S, width] of each token, added in slot order; width a multiple of 4.
// Zero for tokens from live[0] on.
extern "C" __global__ void __launch_bounds__(256) combine(const float4* results, const long long* ids, ushort4* out, int width,
                                                          const int* live) {
  int column = blockIdx.x * 256 + threadIdx.x;
  if (column >= width / 4) return;
  WAIT_FOR_EARLIER();
  float4 sum = make_float4(0, 0, 0, 0);
  int experts = live && (int)blockIdx.y >= live[0] ? 0 : TOP_K;
  for (int j = 0; j < experts; j++) {
    u64 slot = (u64)blockIdx.y * TOP_K + j;
    long long e = ids[slot];
    if (e < 0 || e >= EXPERTS) continue;
    float4 v = __ldcs(results + slot * (width / 4) + column);
    sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
  }
  out[(u64)blockIdx.y * (width / 4) + column] = make_ushort4(narrow(sum.x), narrow(sum.y), narrow(sum.z), narrow(sum.w));
}
