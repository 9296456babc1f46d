// What the .cu files of pw_kernels need of CUDA, for a CPU: threads of a block are coroutines (cuda_on_cpu.cpp) that switch
// at barriers and at operations of a warp; copies are done at once, so races are not seen. Addresses must be aligned as a GPU
// wants them, else the program ends. bf16 alone.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct int4 { int x, y, z, w; };
struct Index { u32 x, y, z; };
struct float4 { float x, y, z, w; };
struct ushort4 { u16 x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline ushort4 make_ushort4(u16 x, u16 y, u16 z, u16 w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

#define __device__
#define __global__
#define __shared__ static                                       // of a block; they run in turn
#define __forceinline__ inline
#define __launch_bounds__(...)

constexpr u32 SHARED_BASE = 1024;                               // as on a GPU, where the driver keeps the first bytes
extern "C" unsigned char dynamic[];
extern Index threadIdx, blockIdx, gridDim;
void __syncthreads();
void pass_on();                                                 // let other threads of the block run
void warp_multiply(float* sums, const u32* a, u32 b0, u32 b1);  // m16n8k16
u32 warp_take(u32 value, int lane);
u32 warp_vote(bool vote);
inline u32 __shfl_sync(u32, u32 value, int lane) { return warp_take(value, lane); }
inline u32 __shfl_up_sync(u32, u32 value, int step) {
  int lane = threadIdx.x & 31;
  return warp_take(value, lane < step ? lane : lane - step);
}
inline u64 __shfl_up_sync(u32 lanes, u64 value, int step) {
  u32 low = __shfl_up_sync(lanes, (u32)value, step), high = __shfl_up_sync(lanes, (u32)(value >> 32), step);
  return (u64)high << 32 | low;
}
inline u32 __ballot_sync(u32, bool vote) { return warp_vote(vote); }
inline void __threadfence() {}
inline int __ffs(u32 value) { return __builtin_ffs((int)value); }
inline void __trap() { abort(); }
template <class T, class V> T atomicAdd(T* p, V v) { T old = *p; *p += v; return old; }
inline long long __double2ll_rn(double value) { return llrint(value); }
inline u32 __cvta_generic_to_shared(const void* p) { return (u32)((const unsigned char*)p - dynamic) + SHARED_BASE; }
inline u32 __funnelshift_r(u32 low, u32 high, u32 by) { return (u32)((((u64)high << 32) | low) >> (by & 31)); }
inline u32 __funnelshift_l(u32 low, u32 high, u32 by) { return (u32)(((((u64)high << 32) | low) << (by & 31)) >> 32); }
template <class T> T at(u64 address, u64 alignment = sizeof(T)) {
  if (address % alignment) abort();
  return *reinterpret_cast<const T*>(address);
}
template <class T> T __ldg(const T* p) { return at<T>((u64)p); }

template <class T> T __ldcs(const T* p) { return at<T>((u64)p); }
template <class T> T __ldcg(const T* p) { return at<T>((u64)p); }

// In place of the functions of moe.cu that are single instructions.
inline u32 prmt(u32 a, u32 b, u32 selector) {
  u64 bytes = ((u64)b << 32) | a;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    u32 code = selector >> (4 * i) & 15, byte = bytes >> (8 * (code & 7)) & 255;
    if (code & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}
template <int TABLE> u32 lop3(u32 a, u32 b, u32 c) {
  u32 result = 0;
  for (int i = 0; i < 8; i++)
    if (TABLE >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return result;
}
inline u32 mad(u32 a, u32 b, u32 c) { return a * b + c; }
inline u32 upper(u32 t) { return t >> 16; }
template <int Q> u32 line(u32 codes, u32 at) { return (codes >> 8 * Q & 255) * 128 + at; }
inline u64 mad_wide(u32 a, u32 b, u64 c) { return (u64)a * b + c; }
template <class V> V load_stream(const void* p) { return at<V>((u64)p); }
inline uint4 load_written(const uint4* p) { return at<uint4>((u64)p); }
inline void multiply(float* sums, const u32* a, u32 b0, u32 b1) { warp_multiply(sums, a, b0, b1); }
inline u16 to_half(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline u32 __float_as_uint(float v) { u32 bits; memcpy(&bits, &v, 4); return bits; }
inline float __uint_as_float(u32 bits) { float v; memcpy(&v, &bits, 4); return v; }
inline void wait_for_earlier() {}
inline void let_next_begin() {}
inline u32 load_acquire(const u32* p) { return *p; }
inline void add_release(u32* p, u32 v) { *p += v; }
inline u32 load_page(const void* p) { return at<u32>((u64)p); }
inline int this_thread() { return (int)threadIdx.x; }
inline void rest() { abort(); }                                 // blocks run in turn: nothing to wait for
inline void copy_async(u32 to, u64 from, u32 bytes = 16) {
  if (to % 16 || (bytes && from % 16)) abort();
  memset(dynamic + to - SHARED_BASE, 0, 16);
  if (bytes) memcpy(dynamic + to - SHARED_BASE, (const void*)from, bytes);
}
inline void copy_async8(u32 to, u64 from) {
  if (to % 8 || from % 8) abort();
  memcpy(dynamic + to - SHARED_BASE, (const void*)from, 8);
}
inline void commit() {}
template <int PENDING> void wait() {}
template <int OFFSET> u32 pair_entry(u32 address) { return at<u32>((u64)dynamic + address + OFFSET); }
template <int OFFSET> u32 entry(u32 address) { return at<u16>((u64)dynamic + address + OFFSET); }
