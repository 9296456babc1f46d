// What prompts.cu needs beside cuda_on_cpu.h: the warpgroup matrix unit, barriers of shared memory and copies in bulk, for a
// CPU. A copy is done when it is asked for, a product when it is issued: what a kernel computes is shown, and that no wait is
// forgotten which would let a copy overwrite what is still read; nothing is shown of the unit's own lateness.

#ifndef CUDA_ON_CPU
#include "cuda_on_cpu.h"
#endif

#define __grid_constant__
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float exp2_near(float v) { return exp2f(v); }
inline float reciprocal(float v) { return 1.0f / v; }
inline void __syncwarp() {}
inline u32 __shfl_xor_sync(u32, u32 value, int step) { return warp_take(value, (threadIdx.x & 31) ^ step); }

void barrier_init(u32 at, u32 count);
void barrier_expect(u32 at, u32 bytes);
void barrier_arrive(u32 at);
void barrier_wait(u32 at, u32 parity);
void copy_bulk(u32 to, u64 from, u32 bytes, u32 barrier);
void meet(int number, int threads);
void copy_line(u32 to, u64 from);
inline void lines_commit() {}
template <int PENDING> void lines_wait() {}
template <int Q, int LINE> u32 line(u32 codes, u32 at) { return (codes >> 8 * Q & 255) * LINE + at; }
void warpgroup_multiply(float* sums, const u32* a, u64 b, int columns);
inline void unit_multiply(float* sums, const u32* a, u64 b) { warpgroup_multiply(sums, a, b, SLOTS); }
inline void barriers_ready() {}
inline void unit_fence() {}
inline void unit_commit() {}
template <int PENDING> void unit_wait() {}
