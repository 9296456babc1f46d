// The experts of a token from its logits, by one warp: as `_choose` of triton_routers.py, without groups and biases.
//
//   EXPERTS, TOP_K  SCORE, 0: softmax of all; 1: of the chosen ones alone  NORMALIZE, 1: weights of a token sum to 1
//   SCALED          1: weights are times a factor of each expert
//
// A lane has the CHOICES neighbouring experts from CHOICES * lane on. Of equal ones the first is chosen.

constexpr int CHOICES = EXPERTS <= 32 ? 1 : EXPERTS <= 64 ? 2 : EXPERTS <= 128 ? 4 : EXPERTS <= 256 ? 8 : 16;

DI u32 most_of_warp(u32 v) { u32 most; asm volatile("redux.sync.max.u32 %0,%1,0xffffffff;" : "=r"(most) : "r"(v)); return most; }
DI u32 least_of_warp(u32 v) { u32 least; asm volatile("redux.sync.min.u32 %0,%1,0xffffffff;" : "=r"(least) : "r"(v)); return least; }
DI float power(float v) { float e; asm("ex2.approx.f32 %0,%1;" : "=f"(e) : "f"(v * 1.4426950408889634f)); return e; }
DI float divide(float v, float by) { float q; asm("div.full.f32 %0,%1,%2;" : "=f"(q) : "f"(v), "f"(by)); return q; }
DI float sum_of_warp(float v) {
  UNROLL for (int by = 16; by; by /= 2) v += __uint_as_float(__shfl_sync(~0u, __float_as_uint(v), (threadIdx.x & 31) ^ by));
  return v;
}
// Grows with v and is never 0; NaN is beyond all numbers.
DI u32 order_of(float v) { u32 bits = __float_as_uint(v); return bits >> 31 ? max(~bits, 1u) : bits | 1u << 31; }
DI float of_order(u32 order) { return __uint_as_float(order >> 31 ? order & ~(1u << 31) : ~order); }

// Lane j < TOP_K gets the token's j-th expert, the best first, and its weight; other lanes have weight 0.
DI void choose_experts(const float* logits, int lane, float scale, const u16* expert_scale, int& expert, float& weight) {
  u32 order[CHOICES];
#if SCORE == 0
  u32 top = 0;
  UNROLL for (int i = 0; i < CHOICES; i++)
    if (CHOICES * lane + i < EXPERTS) top = max(top, order_of(logits[i]));
  float most = of_order(most_of_warp(top)), powers[CHOICES], sum = 0;
  UNROLL for (int i = 0; i < CHOICES; i++) {
    powers[i] = CHOICES * lane + i < EXPERTS ? power(logits[i] - most) : 0;
    sum += powers[i];
  }
  sum = sum_of_warp(sum);
  UNROLL for (int i = 0; i < CHOICES; i++) order[i] = CHOICES * lane + i < EXPERTS ? order_of(divide(powers[i], sum)) : 0;
#else
  UNROLL for (int i = 0; i < CHOICES; i++) order[i] = CHOICES * lane + i < EXPERTS ? order_of(logits[i]) : 0;
#endif
  expert = 0, weight = 0;
  float first = 0;
  UNROLL for (int j = 0; j < TOP_K; j++) {
    u32 best = 0, at = EXPERTS;
    UNROLL for (int i = 0; i < CHOICES; i++) best = max(best, order[i]);
    best = most_of_warp(best);
    UNROLL for (int i = CHOICES - 1; i >= 0; i--)
      if (order[i] == best) at = CHOICES * lane + i;
    at = least_of_warp(at);
    UNROLL for (int i = 0; i < CHOICES; i++)
      if (CHOICES * lane + i == at) order[i] = 0;
    float score = of_order(best);
    if (j == 0) first = score;
    if (lane == j) expert = (int)at, weight = score;
  }
#if SCORE == 1
  weight = lane < TOP_K ? power(weight - first) : 0;
  weight = divide(weight, sum_of_warp(weight));
#endif
#if NORMALIZE
  weight = divide(weight, sum_of_warp(weight));
#endif
  weight *= scale;
#if SCALED
  if (lane < TOP_K) weight *= from_half(__ldg(expert_scale + expert));
#endif
}
