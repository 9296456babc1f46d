// The blocks of a cluster: which one this is, writing to another one's shared memory, and meeting. Included as text, behind
// common.cuh; compute capability 9.0.

DI u32 rank_in_cluster() { u32 rank; asm("mov.u32 %0,%%cluster_ctarank;" : "=r"(rank)); return rank; }
DI void push(u32 at, u32 rank, float v) {
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there,%0,%1; st.shared::cluster.f32 [there],%2;}" :: "r"(at), "r"(rank), "f"(v) : "memory");
}
DI void push(u32 at, u32 rank, float4 v) {
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there,%0,%1; st.shared::cluster.v4.f32 [there],{%2,%3,%4,%5};}"
               :: "r"(at), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
DI void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DI void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
