// What the CUDA sources of this package share: short names, bits of a word, products of the matrix unit, rounding,
// copies and barriers of shared memory that are waited for, launches that overlap.
// Included as text (sources.py). FLOAT16, 1: numbers of 16 bits are fp16; 0: bf16.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
#define DI __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

DI u32 prmt(u32 a, u32 b, u32 s) { u32 d; asm("prmt.b32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(s)); return d; }
template <int TABLE> DI u32 lop3(u32 a, u32 b, u32 c) {
  u32 d; asm("lop3.b32 %0,%1,%2,%3,%4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE)); return d;
}
DI u32 choose(u32 a, u32 b, u32 mask) { return lop3<0xE2>(a, mask, b); }     // (a & mask) | (b & ~mask)
DI u32 and_or(u32 a, u32 mask, u32 b) { return lop3<0xEA>(a, mask, b); }     // (a & mask) | b
DI u32 mad(u32 a, u32 b, u32 c) { u32 d; asm("mad.lo.u32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
DI constexpr u32 rotl(u32 x, int n) { return (n & 31) ? (x << (n & 31)) | (x >> (32 - (n & 31))) : x; }
template <int S> DI u32 rotl_by(u32 x) { if constexpr ((S & 31) == 0) return x; else return __funnelshift_l(x, x, S & 31); }
template <int S> DI u32 rotr(u32 x) { if constexpr ((S & 31) == 0) return x; else return __funnelshift_r(x, x, S & 31); }
DI void multiply(float* c, const u32* a, u32 b0, u32 b1) {
#if FLOAT16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif
  asm volatile(MMA " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DI u16 to_half(float v) {
  u16 h;
#if FLOAT16
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(v));
#else
  asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(h) : "f"(v));
#endif
  return h;
}
DI float from_half(u16 h) {
#if FLOAT16
  float v;
  asm("cvt.f32.f16 %0,%1;" : "=f"(v) : "h"(h));
  return v;
#else
  return __uint_as_float((u32)h << 16);
#endif
}
DI void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DI void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
// Barriers of shared memory: threads that arrive do not wait.
DI void barrier_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(at), "r"(count) : "memory"); }
DI void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(at) : "memory"); }
DI void barrier_wait(u32 at, u32 parity) {
#if __CUDA_ARCH__ >= 900
#define TEST "mbarrier.try_wait.parity.shared::cta.b64"
#else
#define TEST "mbarrier.test_wait.parity.shared::cta.b64"
#endif
  u32 done;
  do {
    asm volatile("{.reg .pred p; " TEST " p,[%1],%2; selp.u32 %0,1,0,p;}" : "=r"(done) : "r"(at), "r"(parity) : "memory");
  } while (!done);
}
// A launch may begin while the one before it ends: what that one writes is there after the wait, not before.
#if __CUDA_ARCH__ >= 900
DI void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DI void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DI void wait_for_earlier() {}
DI void let_next_begin() {}
#endif
