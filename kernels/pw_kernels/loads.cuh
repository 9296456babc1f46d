// How products, routers and choices read: small numbers that the launch before wrote, weights that nobody writes. Those of
// moe.cu and attention.cu have other caches and sizes.

#include "common.cuh"

// For what a launch that overlaps with this one wrote: not from the cache of a multiprocessor, not before the wait for it.
DI uint4 load_written(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DI u16 load_number(const u16* p) {
  u16 v;
  asm volatile("ld.global.cg.u16 %0,[%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}
DI float load_float(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0,[%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
DI u64 load_id(const u64* p) {
  u64 v;
  asm volatile("ld.global.cg.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Loads before it are asked for before anything behind it: the compiler else puts each in front of its first use.
DI void ask() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }
DI void copy_async(u32 to, u64 from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16;" :: "r"(to), "l"(from) : "memory");
}
