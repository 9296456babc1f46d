// What attention.cu needs beyond products_on_cpu.h.

#define wait_for_earlier wait_for_nothing
#include "products_on_cpu.h"
#undef wait_for_earlier

// What the launch before writes: there when all of the `waiting` threads of one block wait for it, if there are any.
struct Written { void* to; const void* from; u64 bytes; };
extern "C" { Written written[3]; int waiting, waited; }
inline void wait_for_earlier() {
  if (!waiting) return;
  waited++;
  while (waited < waiting) pass_on();
  for (const Written& w : written) memcpy(w.to, w.from, w.bytes);
}

struct float2 { float x, y; };
#define __popc(v) __builtin_popcount(v)
inline void __syncwarp() { warp_take(0, 0); }
inline float exp2_fast(float v) { return std::exp2(v); }
inline void copy_rows(u32 to, u64 from) { copy_async(to, from); }
inline int load_int(const int* p) { return at<int>((u64)p); }
inline float2 load_pair(const float* p) { return at<float2>((u64)p, 8); }
inline float4 load_four(const float* p) { return at<float4>((u64)p, 16); }
inline void load_rows(u32* r, u32 address) {
  int lane = threadIdx.x & 31;
  for (int i = 0; i < 4; i++) {
    u32 row = warp_take(address, 8 * i + lane / 4) - SHARED_BASE;
    r[i] = at<u32>((u64)dynamic + row + lane % 4 * 4);
  }
}
inline void load_columns(u32* r, u32 address) {
  int lane = threadIdx.x & 31;
  for (int i = 0; i < 4; i++) {
    r[i] = 0;
    for (int half = 0; half < 2; half++) {
      u32 row = warp_take(address, 8 * i + lane % 4 * 2 + half) - SHARED_BASE;
      r[i] |= (u32)at<u16>((u64)dynamic + row + lane / 4 * 2) << (16 * half);
    }
  }
}
inline u32 transposed(u32 value) {
  int lane = threadIdx.x & 31, from = lane % 4 * 8 + lane / 8;
  u32 low = warp_take(value, from), high = warp_take(value, from + 4), by = lane / 4 % 2 * 16;
  return (low >> by & 0xFFFF) | (high >> by & 0xFFFF) << 16;
}

// A barrier's eight bytes: arrivals that it waits for, arrivals that are left, phases that have ended.
struct Barrier { u16 count, left; u32 phases; };
inline Barrier& barrier_at(u32 address) {
  if (address % 8) abort();
  return *(Barrier*)(dynamic + address - SHARED_BASE);
}
inline void barrier_init(u32 address, u32 count) { barrier_at(address) = {(u16)count, (u16)count, 0}; }
inline void barrier_arrive(u32 address) {
  Barrier& b = barrier_at(address);
  if (--b.left == 0) b.left = b.count, b.phases++;
}
inline void barrier_wait(u32 address, u32 parity) {
  while ((barrier_at(address).phases & 1) == parity) pass_on();
}
