// Runs a kernel's blocks one after the other, a block's threads as coroutines in turn; the CLUSTER blocks of a cluster at once,
// each with memory of its own while its threads run.

#include "cuda_on_cpu.h"

#include <ucontext.h>

#include <cstdlib>
#include <memory>
#include <vector>

#ifndef CLUSTER
#define CLUSTER 1
#endif

Index threadIdx, blockIdx, gridDim;
extern "C" { alignas(128) unsigned char dynamic[256 << 10]; }
extern "C" void kernel(const void* arguments);

namespace {
constexpr int STACK = 128 << 10, MOST_WARPS = 32 * CLUSTER, MEMORY = 256 << 10;
struct Thread { ucontext_t context; bool done; long barriers, meetings, waits, exchanges; };
struct Operands { u32 words[6]; };
std::vector<Thread> threads;
ucontext_t scheduler;
int current, block_size;
long arrived[CLUSTER], clusters_met, in_warp[MOST_WARPS];
std::vector<unsigned char> memories[CLUSTER];                   // of the blocks that do not run
Operands offered[MOST_WARPS][2][32];
const void* given;

// A thread that has arrived waits before it arrives again or leaves: a GPU counts who leaves as having arrived.
void all_waited() { if (threads[current].meetings != threads[current].waits) abort(); }
void body() {
  threadIdx.x = current % block_size;
  kernel(given);
  all_waited();
  threads[current].done = true;
  swapcontext(&threads[current].context, &scheduler);
}
// What all lanes of the warp offer; a lane can be one exchange ahead of another, hence two places.
const Operands* exchange(const Operands& mine) {
  int warp = current / 32;
  long number = threads[current].exchanges++;
  offered[warp][number & 1][current % 32] = mine;
  in_warp[warp]++;
  while (in_warp[warp] < 32 * (number + 1)) pass_on();
  return offered[warp][number & 1];
}
float bf16(u32 pair, int which) {
  u32 bits = (which ? pair >> 16 : pair & 0xFFFF) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
}  // namespace

void pass_on() { swapcontext(&threads[current].context, &scheduler); threadIdx.x = current % block_size; }
void __syncthreads() {
  int block = current / block_size;
  long until = (long)block_size * ++threads[current].barriers;
  arrived[block]++;
  while (arrived[block] < until) pass_on();
}
u32 rank_in_cluster() { return current / block_size; }
void push(u32 at, u32 rank, float value) {
  unsigned char* memory = rank == rank_in_cluster() ? dynamic : memories[rank].data();
  memcpy(memory + at - SHARED_BASE, &value, 4);
}
void cluster_arrive() { all_waited(), clusters_met++, threads[current].meetings++; }
void cluster_wait() {
  while (clusters_met < (long)threads.size() * threads[current].meetings) pass_on();
  threads[current].waits = threads[current].meetings;
}
u32 warp_take(u32 value, int lane) { return exchange({{value}})[lane].words[0]; }
u32 warp_vote(bool vote) {
  const Operands* all = exchange({{vote}});
  u32 votes = 0;
  for (int lane = 0; lane < 32; lane++) votes |= all[lane].words[0] << lane;
  return votes;
}
u32 warp_most(u32 value) {
  const Operands* all = exchange({{value}});
  u32 most = 0;
  for (int lane = 0; lane < 32; lane++) most = max(most, all[lane].words[0]);
  return most;
}
void warp_multiply(float* sums, const u32* a, u32 b0, u32 b1) {
  const Operands* all = exchange({{a[0], a[1], a[2], a[3], b0, b1}});
  int lane = current % 32;
  for (int i = 0; i < 4; i++) {
    int row = (lane >> 2) + 8 * (i >> 1), column = 2 * (lane & 3) + (i & 1);
    for (int k = 0; k < 16; k++) {
      const u32 *left = all[(row & 7) * 4 + (k >> 1 & 3)].words, *right = all[column * 4 + (k >> 1 & 3)].words;
      sums[i] += bf16(left[(row >> 3) + 2 * (k >> 3)], k & 1) * bf16(right[4 + (k >> 3)], k & 1);
    }
  }
}
extern "C" void run(const void* arguments, int columns, int rows, int size) {
  given = arguments, block_size = size;
  gridDim = {(u32)columns, (u32)rows, 1};
  int all = size * CLUSTER;
  std::unique_ptr<char[]> stacks(new char[(size_t)all * STACK]);
  for (u32 y = 0; y < gridDim.y; y++)
    for (u32 x = 0; x < gridDim.x; x += CLUSTER) {
      memset(dynamic, 0xFF, MEMORY);                              // NaN, where a kernel reads what nothing wrote
      if (CLUSTER > 1)
        for (auto& memory : memories) memory.assign(MEMORY, 0xFF);
      threads.assign(all, Thread());
      memset(arrived, 0, sizeof arrived);
      memset(in_warp, 0, sizeof in_warp);
      clusters_met = 0;
      for (int i = 0; i < all; i++) {
        getcontext(&threads[i].context);
        threads[i].context.uc_stack = {&stacks[(size_t)i * STACK], 0, STACK};
        makecontext(&threads[i].context, body, 0);
      }
      for (int left = all; left;) {
        left = 0;
        for (int block = 0; block < CLUSTER; block++) {
          blockIdx.x = x + block, blockIdx.y = y;
          if (CLUSTER > 1) memcpy(dynamic, memories[block].data(), MEMORY);
          for (current = block * size; current < (block + 1) * size; current++)
            if (!threads[current].done) {
              left++;
              swapcontext(&scheduler, &threads[current].context);
            }
          if (CLUSTER > 1) memcpy(memories[block].data(), dynamic, MEMORY);
        }
      }
    }
}
