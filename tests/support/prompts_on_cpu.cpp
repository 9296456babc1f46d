// Beside cuda_on_cpu.cpp, whose threads it switches: barriers that count arrivals and bytes, and products of a warpgroup.

#include "cuda_on_cpu.cpp"
#define CUDA_ON_CPU
#include "prompts_on_cpu.h"

#include <map>

namespace {
struct Barrier { int count, left; long bytes; u32 phase; };
std::map<u32, Barrier> barriers;
constexpr int NAMED = 16;
std::vector<long> meetings[NAMED];                              // of each thread, at each named barrier
long met[NAMED];

void may_end(Barrier& b) {
  if (b.left == 0 && b.bytes == 0) { b.phase ^= 1; b.left = b.count; }
}
Barrier& barrier_at(u32 at) {
  auto found = barriers.find(at);
  if (found == barriers.end()) abort();
  return found->second;
}
}  // namespace

void barrier_init(u32 at, u32 count) {                          // before anything else in a block
  barriers[at] = {(int)count, (int)count, 0, 0};
  for (auto& mine : meetings) mine.assign(threads.size(), 0);
  memset(met, 0, sizeof met);
}
void barrier_arrive(u32 at) {
  Barrier& b = barrier_at(at);
  if (b.left == 0) abort();                                     // one arrival too many
  b.left--;
  may_end(b);
}
void barrier_expect(u32 at, u32 bytes) { barrier_at(at).bytes += bytes; barrier_arrive(at); }
void barrier_wait(u32 at, u32 parity) { while (barrier_at(at).phase == parity) pass_on(); }
void copy_bulk(u32 to, u64 from, u32 bytes, u32 barrier) {
  if (to % 16 || from % 16 || bytes % 16) abort();
  memcpy(dynamic + to - SHARED_BASE, (const void*)from, bytes);
  Barrier& b = barrier_at(barrier);
  b.bytes -= bytes;
  may_end(b);
}
void copy_line(u32 to, u64 from) {
  if (to % 16 || from % 16) abort();
  memcpy(dynamic + to - SHARED_BASE, (const void*)from, 16);
}
void meet(int number, int size) {
  long until = size * ++meetings[number][current];
  met[number]++;
  while (met[number] < until) pass_on();
}
void warpgroup_multiply(float* sums, const u32* a, u64 b, int columns) {
  const Operands* all = exchange({{a[0], a[1], a[2], a[3]}});
  int lane = current % 32;
  u32 start = (b & 0x3FFF) << 4, next_rows = (b >> 32 & 0x3FFF) << 4;
  if (b >> 62 != 1) abort();                                    // 128-byte swizzle alone
  for (int j = 0; j < columns / 8; j++)
    for (int i = 0; i < 4; i++) {
      int row = (lane >> 2) + 8 * (i >> 1), column = 2 * (lane & 3) + (i & 1);
      for (int k = 0; k < 16; k++) {
        u32 at = start + j * next_rows + column * 128 + k * 2;
        at ^= (at >> 7 & 7) << 4;
        u16 half;
        memcpy(&half, dynamic + at - SHARED_BASE, 2);
        const u32* left = all[(row & 7) * 4 + (k >> 1 & 3)].words;
        sums[4 * j + i] += bf16(left[(row >> 3) + 2 * (k >> 3)], k & 1) * bf16(half, 0);
      }
    }
}
