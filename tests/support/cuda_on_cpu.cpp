// Runs a kernel's blocks one after the other, a block's threads as coroutines in turn.

#include "cuda_on_cpu.h"

#include <ucontext.h>

#include <vector>

Index threadIdx, blockIdx, gridDim;
extern "C" { alignas(128) unsigned char dynamic[256 << 10]; }
extern "C" void kernel(const void* arguments);

namespace {
constexpr int STACK = 128 << 10, MOST_WARPS = 32;
struct Thread { ucontext_t context; bool done; long barriers, exchanges; };
struct Operands { u32 words[6]; };
std::vector<Thread> threads;
ucontext_t scheduler;
int current;
long arrived, in_warp[MOST_WARPS];
Operands offered[MOST_WARPS][2][32];
const void* given;

void body() {
  threadIdx.x = current;
  kernel(given);
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

void pass_on() { swapcontext(&threads[current].context, &scheduler); threadIdx.x = current; }
void __syncthreads() {
  long until = (long)threads.size() * ++threads[current].barriers;
  arrived++;
  while (arrived < until) pass_on();
}
u32 warp_take(u32 value, int lane) { return exchange({{value}})[lane].words[0]; }
u32 warp_vote(bool vote) {
  const Operands* all = exchange({{vote}});
  u32 votes = 0;
  for (int lane = 0; lane < 32; lane++) votes |= all[lane].words[0] << lane;
  return votes;
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
  given = arguments;
  gridDim = {(u32)columns, (u32)rows, 1};
  std::vector<char> stacks((size_t)size * STACK);
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
      memset(dynamic, 0xFF, sizeof dynamic);                    // NaN, where a kernel reads what nothing wrote
      threads.assign(size, Thread());
      arrived = 0;
      memset(in_warp, 0, sizeof in_warp);
      for (int i = 0; i < size; i++) {
        getcontext(&threads[i].context);
        threads[i].context.uc_stack = {&stacks[(size_t)i * STACK], 0, STACK};
        makecontext(&threads[i].context, body, 0);
      }
      for (int left = size; left;)
        for (current = 0, left = 0; current < size; current++)
          if (!threads[current].done) {
            left++;
            swapcontext(&scheduler, &threads[current].context);
          }
    }
}
