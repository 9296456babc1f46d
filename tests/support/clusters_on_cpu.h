// Clusters of blocks (clusters.cuh); cuda_on_cpu.cpp runs them.

#define __cluster_dims__(...)

u32 rank_in_cluster();
void push(u32 at, u32 rank, float value);
inline void push(u32 at, u32 rank, float4 v) {
  if (at % 16) abort();
  push(at, rank, v.x), push(at + 4, rank, v.y), push(at + 8, rank, v.z), push(at + 12, rank, v.w);
}
void cluster_arrive();
void cluster_wait();
