// What router.cu needs beyond cuda_on_cpu.h.

#include "products_on_cpu.h"
#include "clusters_on_cpu.h"

u32 warp_most(u32 value);
inline u32 most_of_warp(u32 value) { return warp_most(value); }
inline u32 least_of_warp(u32 value) { return ~warp_most(~value); }
inline float power(float v) { return expf(v); }
inline float divide(float v, float by) { return v / by; }
